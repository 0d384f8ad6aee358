"""Every optimizer of Optax inside `accumulate`: what the bare one does with the means.

Both are run operation by operation, so that they agree to the last bit where they get
the same gradient; compiled, they would be fused differently.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bits_equal, feed, run_bare, temporary_bytes, types
from optax import contrib
from pages import DOCS, run_page

import optax_accum

WINDOWS, EVERY_K = 3, 2
VALUES = np.array([[1.0, 3.0], [2.0, 1.0], [0.5, 1.0]], np.float32)


@pytest.fixture(scope="module", autouse=True)
def own_caches():
    """What thousands of single operations leave would crowd out what others count."""
    yield
    jax.clear_caches()


def sum_of_squares(params):
    return sum(
        jnp.sum(x.astype(jnp.float32) ** 2, dtype=jnp.float32)
        for x in jax.tree.leaves(params)
    )


NEED_VALUE = {"polyak_sgd", "momo", "momo_adam", "reduce_on_plateau"}

# By the name of the function that makes it; what it is wrapped around is a detail.
OPTIMIZERS = {
    "adabelief": lambda: optax.adabelief(1e-2),
    "adadelta": lambda: optax.adadelta(0.1),
    "adafactor": lambda: optax.adafactor(5e-3, min_dim_size_to_factor=2),
    "adagrad": lambda: optax.adagrad(1.0),
    "adam": lambda: optax.adam(0.1),
    "adamax": lambda: optax.adamax(0.1),
    "adamaxw": lambda: optax.adamaxw(0.1),
    "adamw": lambda: optax.adamw(0.1),
    "adan": lambda: optax.adan(0.1),
    "amsgrad": lambda: optax.amsgrad(0.1),
    "fromage": lambda: optax.fromage(5e-3),
    "lamb": lambda: optax.lamb(1e-3),
    "lars": lambda: optax.lars(1.0),
    "lbfgs": lambda: optax.lbfgs(0.1, linesearch=None),
    "lion": lambda: optax.lion(1e-2),
    "nadam": lambda: optax.nadam(1e-2),
    "nadamw": lambda: optax.nadamw(1e-2),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-3, eta=1e-4, key=0),
    "novograd": lambda: optax.novograd(1e-3),
    "optimistic_adam_v2": lambda: optax.optimistic_adam_v2(2e-3),
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(2e-3),
    "polyak_sgd": lambda: optax.polyak_sgd(1.0),
    "radam": lambda: optax.radam(5e-3),
    "rmsprop": lambda: optax.rmsprop(5e-3, momentum=0.9),
    "rprop": lambda: optax.rprop(0.1),
    "sgd": lambda: optax.sgd(1e-3, momentum=0.9),
    "sign_sgd": lambda: optax.sign_sgd(0.1),
    "signum": lambda: optax.signum(1e-2),
    "sm3": lambda: optax.sm3(1.0),
    "yogi": lambda: optax.yogi(0.1),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "acprop": lambda: contrib.acprop(1e-3),
    "ademamix": lambda: contrib.ademamix(1e-3),
    "adopt": lambda: contrib.adopt(1e-2),
    "cocob": lambda: contrib.cocob(weight_decay=1e-2),
    "dadapt_adamw": lambda: contrib.dadapt_adamw(0.1),
    "dog": lambda: contrib.dog(1.0),
    "dowg": lambda: contrib.dowg(1.0),
    "galore": lambda: contrib.galore(1e-2, rank=2),
    "madgrad": lambda: contrib.madgrad(1e-2),
    "mechanize": lambda: contrib.mechanize(optax.sgd(0.1), weight_decay=0.0),
    "momo": lambda: contrib.momo(0.1),
    "momo_adam": lambda: contrib.momo_adam(0.1),
    "muon": lambda: contrib.muon(1e-2),
    "prodigy": lambda: contrib.prodigy(0.1),
    "reduce_on_plateau": lambda: optax.chain(
        optax.sgd(1e-3), contrib.reduce_on_plateau(patience=1)
    ),
    "sam": lambda: contrib.sam(
        optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.1))
    ),
    "schedule_free": lambda: contrib.schedule_free(optax.sgd(1e-2), 1e-2),
    "schedule_free_adamw": lambda: contrib.schedule_free_adamw(1e-2, warmup_steps=2),
    "schedule_free_sgd": lambda: contrib.schedule_free_sgd(1e-2, warmup_steps=2),
    "simplified_ademamix": lambda: contrib.simplified_ademamix(1e-3),
    "sophia": lambda: contrib.sophia(1e-2),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(
        optax.adam(0.1)
    ),
}

# Of 16-bit moments and a wider gradient: their own branches would differ in dtype.
REFUSE_WIDER = {"apply_if_finite", "galore", "mechanize", "novograd"}

# Of which parameters and gradients in different dtypes are tried as well: those with
# moments, branches or dtypes of their own. All of them would take minutes.
MIXED = REFUSE_WIDER | {
    "adafactor",
    "adam",
    "lion",
    "muon",
    "prodigy",
    "schedule_free_adamw",
    "sgd",
}

CANNOT = {"differentially_private_aggregate", "dpsgd"}

COVERED_BY_ANOTHER = {
    "optimistic_adam": "optimistic_adam_v2, of which it is the deprecated name",
    "hutchinson_estimator_diag_hessian": "sophia",
    "normalize": "sam",
}

DTYPES = [
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("float16", "float16"),
    ("float16", "float32"),
]


def test_no_optimizer_of_optax_is_forgotten():
    def rates(function):
        return [p for p in inspect.signature(function).parameters if "learning" in p]

    own = {n for n, f in functions_of(optax) if rates(f)}
    contributed = {n for n, _ in functions_of(contrib)} - {"schedule_free_eval_params"}
    links = {n for n in own | contributed if n.startswith("scale_by_")}
    known = set(OPTIMIZERS) | CANNOT | set(COVERED_BY_ANOTHER)
    assert (own | contributed) - links - known == set()
    assert known - own - contributed == {"apply_if_finite"}  # which has no rate


def functions_of(module):
    def is_function(x):
        return inspect.isfunction(x) or isinstance(x, functools.partial)

    members = inspect.getmembers(module, is_function)
    return [(name, function) for name, function in members if name[0] != "_"]


def make_params(dtype):
    w = [[1, -2, 0.5], [0.75, 1.5, -0.25], [-1.25, 0.5, 2], [1, 1, -1]]
    return {"w": jnp.array(w, dtype), "b": jnp.array([0.5, -1, 0], dtype)}


def make_windows(dtype):
    """Gradients of a window and their mean, by NumPy; the mean needs one bit more.

    Sums and halves of these are exact in float32, so that a mean that went through 16
    bits differs.
    """
    w = [[1, -2, 0.5], [0.5, 1, -0.25], [-0.5, 0.125, 2], [1, 1, -1]]
    step = max(float(jnp.finfo(dtype).eps), 2.0**-10)
    windows = []
    for size in (1, 0.25, -0.5):
        grads = [
            {"w": size * factor * np.array(w), "b": size * factor * np.array(w[1])}
            for factor in (1, 1 + step)
        ]
        mean = {}
        for name in grads[0]:
            total = np.zeros(grads[0][name].shape, np.float32)
            for grad in grads:
                total += grad[name].astype(np.float32)
            mean[name] = jnp.asarray(total / np.float32(EVERY_K))
        windows.append((jax.tree.map(lambda g: jnp.asarray(g, dtype), grads), mean))
    return windows


def make_extra(name, value):
    if name in NEED_VALUE:
        return {"value": jnp.asarray(value)}
    return {"obj_fn": sum_of_squares} if name == "sophia" else {}


def cast_like(tree, other):
    """The types of `other`: floats in its dtypes, as a loop that keeps them would."""

    def cast(x, like):
        return x.astype(like.dtype) if jnp.issubdtype(like.dtype, jnp.number) else x

    return jax.tree.map(cast, tree, other)


def step_alone(name, windows, params, grad_dtype):
    """Updates, parameters and state of the bare optimizer, fed with the means."""
    inner = optax.with_extra_args_support(OPTIMIZERS[name]())
    with jax.numpy_dtype_promotion("standard"):
        state = jax.tree.map(jnp.asarray, inner.init(params))

        for (_, mean), values in zip(windows, VALUES, strict=True):
            extra = make_extra(name, values.mean(dtype=np.float32))
            update = functools.partial(inner.update, **extra)
            incoming = jax.tree.map(lambda g: g.astype(grad_dtype), mean)
            outgoing, _ = jax.eval_shape(update, incoming, state, params)
            narrow = name in REFUSE_WIDER and params["w"].dtype != jnp.float32
            mean = incoming if narrow else mean
            updates, new_state = update(mean, state, params)
            updates = cast_like(updates, outgoing)
            state = cast_like(jax.tree.map(jnp.asarray, new_state), state)
            params = optax.apply_updates(params, updates)
            yield updates, params, state


def check_optimizer(name, param_dtype, grad_dtype):
    windows, params = make_windows(grad_dtype), make_params(param_dtype)
    tx = optax_accum.accumulate(OPTIMIZERS[name](), EVERY_K)
    state = tx.init(params)
    check_scan(name, tx, windows, params)
    moved = False
    alone = step_alone(name, windows, params, grad_dtype)
    for i, expected in enumerate(alone):
        for j, grad in enumerate(windows[i][0]):
            before, extra = params, make_extra(name, VALUES[i, j])
            updates, state = tx.update(grad, state, params, **extra)
            with jax.numpy_dtype_promotion("standard"):
                params = optax.apply_updates(params, updates)
            if j < EVERY_K - 1:
                zeros = jax.tree.map(lambda u: -jnp.zeros_like(u), expected[0])
                assert_bits_equal(updates, zeros)
                assert_bits_equal(params, before)
            else:
                assert_bits_equal((updates, params), expected[:2])
                moved |= any(np.asarray(u, float).any() for u in updates.values())
        assert_bits_equal(*strip_keys(state.inner_opt_state, expected[2]))
        assert types(state) == types(tx.init(params))
    assert moved


def strip_keys(*trees):
    """Random keys as the numbers they consist of."""

    def data(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    return [jax.tree.map(data, tree) for tree in trees]


def check_scan(name, tx, windows, params):
    """Traced alone: a state whose types change is no carry, and would compile anew."""
    grads = [grad for window, _ in windows for grad in window]
    calls = jax.tree.map(lambda *g: jnp.stack(g), *grads), VALUES.reshape(-1)

    def body(state, call):
        grad, value = call
        updates, state = tx.update(grad, state, params, **make_extra(name, value))
        return state, updates

    jax.eval_shape(lambda: jax.lax.scan(body, tx.init(params), calls))


def assert_steps_as_the_bare_optimizer(name, dtypes):
    if dtypes[0] == dtypes[1]:
        return check_optimizer(name, *dtypes)
    with jax.numpy_dtype_promotion("standard"):  # as who mixes them has it
        return check_optimizer(name, *dtypes)


def is_refused(name, param_dtype, grad_dtype):
    """By the bare optimizer itself."""
    is_wider = param_dtype != grad_dtype == "float32"
    if name == "apply_if_finite":  # a branch has updates, the other zero gradients
        return param_dtype != grad_dtype
    return name in REFUSE_WIDER and is_wider


@pytest.mark.slow
@pytest.mark.filterwarnings(
    # lbfgs stores the float32 mean among parameters of 16 bits.
    "ignore:scatter inputs have incompatible types:FutureWarning"
)
@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        pytest.param(name, dtypes, id="-".join((name, *dtypes)))
        for name in OPTIMIZERS
        for dtypes in DTYPES
        if dtypes[0] == dtypes[1] or name in MIXED
    ],
)
def test_steps_as_the_bare_optimizer_on_the_mean(name, dtypes):
    windows, params = make_windows(dtypes[1]), make_params(dtypes[0])
    if is_refused(name, *dtypes):
        with pytest.raises(TypeError, match="types"):
            assert_steps_as_the_bare_optimizer(name, dtypes)
    if is_refused(name, *dtypes) or (name, *dtypes) == ("galore", *DTYPES[1]):
        with pytest.raises(TypeError, match="types"):  # nothing to compare with
            list(step_alone(name, windows, params, dtypes[1]))
    else:
        assert_steps_as_the_bare_optimizer(name, dtypes)


@pytest.mark.parametrize("name", ["sgd", "adamw", "schedule_free_sgd"])
def test_a_few_step_as_the_bare_optimizer_on_the_mean(name):
    assert_steps_as_the_bare_optimizer(name, ("bfloat16", "bfloat16"))


# -- Names in the state


@pytest.mark.parametrize(
    "inner",
    [
        optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1.0, 0.0, 5)),
        optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau()),
        optax.apply_if_finite(contrib.schedule_free_adamw(0.1), 3),
        optax.lbfgs(),
    ],
    ids=["inject_hyperparams", "reduce_on_plateau", "nested", "lbfgs"],
)
def test_every_name_is_found_as_often_as_in_the_bare_state(inner):
    """One that we had too would be ambiguous to `optax.tree.get`."""
    bare = inner.init(jnp.ones(2))
    ours = optax_accum.accumulate(inner, 2).init(jnp.ones(2))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(bare)]
    names = {getattr(k, "name", getattr(k, "key", None)) for p in paths for k in p}
    for name in names | {"learning_rate", "hyperparams"}:
        found = optax.tree.get_all_with_path(ours, name)
        assert len(found) == len(optax.tree.get_all_with_path(bare, name))
    for name in ("gradient_step", "mini_step"):
        assert optax.tree.get(ours, name) == 0


def test_a_learning_rate_that_is_set_in_an_open_window_is_applied():
    tx = optax_accum.accumulate(optax.inject_hyperparams(optax.sgd)(0.5), 2)
    _, state = feed(tx, [1.0])
    rate = optax.tree.get(state, "learning_rate")
    halved = optax.tree.set(state, learning_rate=rate / 2)
    assert types(halved) == types(state)
    update, _ = tx.update(jnp.array(3.0), halved)
    assert update == -0.25 * 2.0


# -- What the wrapped optimizer needs


@pytest.mark.parametrize(
    ("name", "missing"),
    [(name, "value") for name in sorted(NEED_VALUE)] + [("sophia", "obj_fn")],
)
def test_what_is_missing_is_told_by_the_optimizer_itself(name, missing):
    inner, params = OPTIMIZERS[name](), jnp.ones(2)
    tx = optax_accum.accumulate(inner, 2)
    bare = optax.with_extra_args_support(inner)
    with jax.numpy_dtype_promotion("standard"):
        with pytest.raises((TypeError, ValueError), match=missing) as expected:
            bare.update(params, bare.init(params), params)
    with pytest.raises(expected.type, match=missing) as ours:
        tx.update(params, tx.init(params), params)
    assert str(ours.value) == str(expected.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["polyak_sgd", "reduce_on_plateau"])
def test_steps_hand_over_the_loss(name):
    inner, x = OPTIMIZERS[name](), jnp.array([1.0, 2.0, 3.0, 6.0])
    bare, _ = run_bare(inner, [3.0] * 3, 1.0, value=[3.0] * 3)

    def loss_fn(w, x):  # 3 with these rows, its gradient 3, whatever w is
        return jnp.mean(x) + jnp.mean(x) * (w - jax.lax.stop_gradient(w))

    train_step = optax_accum.make_train_step(loss_fn, inner, num_microbatches=2)
    state = optax_accum.init_train_state(1.0, inner)
    for update in bare:
        before = np.asarray(state.params)
        state, _ = train_step(state, x)
        # One rounding of the sum, of parameters of size 1 or less, and one here.
        np.testing.assert_allclose(state.params - before, update, atol=2.0**-23)


def loss_of_line(w, x):
    return jnp.mean((w * x - 1.0) ** 2)


@pytest.mark.parametrize("name", ["value_fn", "obj_fn"])
def test_functions_do_not_pass_the_steps(name):
    train_step = optax_accum.make_train_step(loss_of_line, optax.sgd(0.1))
    state = optax_accum.init_train_state(1.0, optax.sgd(0.1))
    with pytest.raises(TypeError, match=name):
        train_step(state, jnp.ones(4), **{name: loss_of_line})


# -- What cannot work, or only another way round


@pytest.mark.slow
@pytest.mark.filterwarnings(
    # dpsgd has no other argument for it.
    'ignore:"seed" is deprecated:DeprecationWarning'
)
@pytest.mark.parametrize("name", sorted(CANNOT))
def test_private_aggregation_needs_the_gradient_of_each_example(name):
    options = dict(l2_norm_clip=1.0, noise_multiplier=0.5)
    if name == "dpsgd":
        inner = contrib.dpsgd(0.1, seed=0, **options)
    else:
        inner = contrib.differentially_private_aggregate(key=0, **options)
    params, grads = {"w": jnp.ones(2)}, {"w": jnp.ones((4, 2))}
    tx = optax_accum.accumulate(inner, 2)
    with pytest.raises(ValueError, match=r"shapes that `init` saw.*got float32\[4,2\]"):
        tx.update(grads, tx.init(params), params)
    with jax.numpy_rank_promotion("allow"):  # as it wants itself
        updates, _ = feed(optax_accum.accumulate(inner, 1), [grads], params)
        bare, _ = run_bare(inner, [grads], params)
    assert_bits_equal(updates, bare)


def make_lookahead(fast, sync_period):
    return optax.lookahead(fast, sync_period, slow_step_size=0.5)


def test_lookahead_inside_does_not_fit_and_around_counts_calls():
    pair = optax.LookaheadParams.init_synced({"w": jnp.ones(())})
    inside = optax_accum.accumulate(make_lookahead(optax.sgd(1.0), 2), 2)
    with pytest.raises(ValueError, match="structure that `init` saw.*LookaheadParams"):
        inside.update({"w": jnp.ones(())}, inside.init(pair), pair)

    def run(tx, grads):
        params, state = pair, tx.init(pair)
        for grad in grads:
            with jax.numpy_dtype_promotion("standard"):  # as lookahead itself needs
                updates, state = tx.update({"w": jnp.array(grad)}, state, params)
            params = optax.apply_updates(params, updates)
        return params

    accumulated = optax_accum.accumulate(optax.sgd(1.0), 2)
    # Means 2, 4, -1: two of them, synchronized by halves, are 1 - (2 + 4) / 2 = -2.
    grads = [1.0, 3.0, 5.0, 3.0, -1.0, -1.0]
    params = run(make_lookahead(accumulated, 4), grads)
    assert (params.slow["w"], params.fast["w"]) == (-2.0, -1.0)
    bare = run(make_lookahead(optax.sgd(1.0), 2), [2.0, 4.0, -1.0])
    assert_bits_equal(params, bare)
    naive = run(make_lookahead(accumulated, 2), grads)
    assert naive.slow["w"] != -2.0


@pytest.mark.slow
def test_sam_takes_no_argument_that_a_step_hands_over():
    x, sam = jnp.array([1.0, 2.0, 3.0, 4.0]), OPTIMIZERS["sam"]()
    state = optax_accum.init_train_state(jnp.ones(1), sam)

    def loss_fn(w, x):
        return jnp.mean((x[:, None] * w[None] - 1.0) ** 2)

    with pytest.raises(TypeError, match="unexpected keyword argument 'weight'"):
        optax_accum.make_train_step(loss_fn, sam)(state, x)
    deaf = optax.GradientTransformation(sam.init, sam.update)
    train_step = optax_accum.make_train_step(loss_fn, deaf, num_microbatches=2)
    params, opt_state = jnp.ones(1), sam.init(jnp.ones(1))
    for _ in range(4):
        state, _ = train_step(state, x)
        grads = jax.grad(loss_fn)(params, x)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = sam.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    # Gradients of up to 2 * 7.5 in sums of four roundings, steps of a tenth of them.
    np.testing.assert_allclose(state.params, params, rtol=1e-5)


def test_a_nan_in_the_mean_costs_the_window_and_in_a_call_that_call():
    inner = optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=1)
    grads = [np.nan, 1.0, 1.0, 3.0]
    updates, state = feed(optax_accum.accumulate(inner, 2), grads)
    np.testing.assert_array_equal(updates, [0, 0, 0, -2])
    assert (state.gradient_step, optax.tree.get(state, "total_notfinite")) == (2, 1)
    guarded = optax_accum.accumulate(inner, 2, skip_fn=optax_accum.skip_nonfinite)
    updates, state = feed(guarded, grads)
    np.testing.assert_array_equal(updates, [0, -1, 0, -2])
    assert (state.skipped, optax.tree.get(state, "total_notfinite")) == (1, 0)
    # One more in a row than it bears.
    updates, _ = feed(optax_accum.accumulate(inner, 2), [np.nan] * 4)
    np.testing.assert_array_equal(updates, [0, 0, 0, np.nan])


@pytest.mark.slow
def test_a_line_search_in_a_window_wants_a_function_of_its_rows():
    x = jnp.array([[1.0, 2.0], [5.0, 9.0]])
    inner = optax.chain(
        optax.sgd(1.0),
        optax.scale_by_backtracking_linesearch(max_backtracking_steps=40),
    )

    def run(tx, calls):
        w, state = jnp.array(0.5), tx.init(jnp.array(0.5))
        for rows, searched in calls:
            value, grad = jax.value_and_grad(loss_of_line)(w, rows)
            updates, state = tx.update(
                grad,
                state,
                w,
                value=value,
                grad=grad,
                value_fn=lambda w, searched=searched: loss_of_line(w, searched),
            )
            w = optax.apply_updates(w, updates)
        return w

    with jax.numpy_dtype_promotion("standard"):
        whole = run(inner, [(x.reshape(-1), x.reshape(-1))])
        tx = optax_accum.accumulate(inner, 2)
        # Sums of a few numbers exact in binary, then the same operations.
        assert run(tx, [(rows, x.reshape(-1)) for rows in x]) == whole
        assert run(tx, [(rows, rows) for rows in x]) != whole


# -- The page


@pytest.fixture(scope="module")
def page():
    return run_page(DOCS / "optimizers.md")


@pytest.fixture(scope="module")
def windows(page):
    """The large batches: each four micro-batches of the loader."""
    loader = page["loader"]
    return [
        jax.tree.map(lambda *x: jnp.concatenate(x), *loader[i : i + 4])
        for i in range(0, 16, 4)
    ]


def train_whole(page, optimizer, windows, params, loss_of=lambda fun, params: fun):
    """The bare optimizer, with the gradient of the whole batch, in plain JAX."""
    optimizer = optax.with_extra_args_support(optimizer)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state = optimizer.init(params)
        for batch in windows:
            fast = getattr(params, "fast", params)
            loss, grads = jax.value_and_grad(page["loss_fn"])(fast, batch)
            updates, state = optimizer.update(grads, state, params, value=loss)
            params = optax.apply_updates(params, updates)
    return params, state


# Gradients that were summed in another order differ by some roundings, 1e-6 of them;
# Adam's quotient keeps that, and four steps add it up.
PAGE = dict(rtol=2e-5, atol=1e-7)


def assert_close(actual, desired):
    jax.tree.map(lambda a, d: np.testing.assert_allclose(a, d, **PAGE), actual, desired)


@pytest.mark.slow
def test_page_logs_the_rate_of_each_gradient_step(page):
    expected = [0.05 * (1 + np.cos(np.pi * step / 4)) for step in range(4)]
    np.testing.assert_allclose(page["rates"], expected, rtol=1e-6)  # a cosine, rounded


@pytest.mark.slow
def test_page_halves_the_rate_that_it_finds(page):
    assert page["rate"] == np.float32(0.1)
    assert page["constant"] is not None


@pytest.mark.slow
def test_page_plateau_is_that_of_the_large_batches(page, windows):
    _, state = train_whole(page, page["plateau"], windows, page["init_params"]())
    assert page["scale"] == optax.tree.get(state, "scale") < 1.0


@pytest.mark.slow
def test_page_evaluation_parameters_are_those_of_the_large_batches(page, windows):
    start = page["init_params"]()
    params, state = train_whole(page, page["schedule_free"], windows, start)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        expected = contrib.schedule_free_eval_params(state, params)
    assert_close(page["eval_params"], expected)
    lookahead = make_lookahead(optax.sgd(0.1), 2)
    pair = optax.LookaheadParams.init_synced(start)
    params, _ = train_whole(page, lookahead, windows, pair)
    assert_close(page["slow_params"], params.slow)


@pytest.mark.slow
def test_page_searches_as_with_the_undivided_loss(page):
    search, loss_fn, batch = page["line_search"], page["loss_fn"], page["batch"]
    params, losses = page["init_params"](), []
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state = search.init(params)
        for _ in range(5):
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
            updates, state = search.update(
                grads,
                state,
                params,
                value=loss,
                grad=grads,
                value_fn=loss_fn,
                batch=batch,
            )
            params = optax.apply_updates(params, updates)
            losses.append(loss)
    np.testing.assert_allclose(page["losses"], losses, **PAGE)
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_page_loss_has_the_memory_of_a_micro_batch(page):
    """The derivative through `value` has that of the large batch."""
    batch = jax.tree.map(
        lambda x: jnp.tile(x, (100,) + (1,) * (x.ndim - 1)), page["batch"]
    )
    params = page["init_params"]()

    def temporaries(fun):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return temporary_bytes(jax.jit(jax.grad(fun)), params, batch)

    assert temporaries(page["large_loss"]) < 0.5 * temporaries(page["loss_fn"])
    through = temporaries(page["in_micro_batches"])
    assert temporaries(page["large_loss"]) < 0.5 * through


@pytest.mark.slow
def test_page_loss_fits_lbfgs_and_sophia(page):
    batch = page["batch"]

    def run(optimizer, fun, **functions):
        params = page["init_params"]()
        state, update = (
            optimizer.init(params),
            jax.jit(
                lambda g, s, p, v: optimizer.update(
                    g, s, p, value=v, grad=g, **functions
                )
            ),
        )
        for _ in range(3):
            loss, grads = jax.value_and_grad(fun)(params, batch)
            updates, state = update(grads, state, params, loss)
            params = optax.apply_updates(params, updates)
        return params

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for optimizer, name in (
            (optax.lbfgs(), "value_fn"),
            (contrib.sophia(0.1), "obj_fn"),
        ):
            ours, plain = (
                run(optimizer, fun, **{name: lambda p, fun=fun: fun(p, batch)})
                for fun in (page["large_loss"], page["loss_fn"])
            )
            # Curvature is a difference of gradients: their roundings weigh more in it.
            jax.tree.map(
                lambda a, d: np.testing.assert_allclose(a, d, rtol=1e-3), ours, plain
            )
