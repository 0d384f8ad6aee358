"""What a compiled step sends between devices: found in real programs, and in texts."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import auto_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum
from optax_accum import make_train_step
from optax_accum._collective_report import assert_one_reduction, collective_report

MICROBATCHES = 4
PARAMS = {"w": jnp.ones((6, 8)), "b": jnp.ones((1, 8)), "v": jnp.ones((8, 4))}
SIZES = [8, 32, 48]
BYTES = 4 * sum(SIZES)
BATCH = jnp.linspace(-1.0, 1.0, 32 * 6).reshape(32, 6)


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]) ** 2)


def descend(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g / MICROBATCHES, params, grads)


def accumulate(params, microbatches):
    """The sum of their gradients, in a scan."""

    def body(sums, x):
        return jax.tree.map(jnp.add, sums, jax.grad(loss_fn)(params, x)), None

    return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), microbatches)[0]


def put(tree, mesh, spec):
    return jax.device_put(tree, NamedSharding(mesh, spec))


def strided(x):
    """Micro-batches that are split over the devices as the batch is."""
    return x.reshape(-1, MICROBATCHES, 6).swapaxes(0, 1)


def compile_auto(step, mesh=None, batch=BATCH):
    """With whole parameters, the batch split, and the rest left to the compiler."""
    mesh = mesh or auto_mesh((4,), ("data",))
    args = put(PARAMS, mesh, P()), put(batch, mesh, P(mesh.axis_names))
    return jax.jit(step).lower(*args).compile(), args


EVERYWHERE = P()


def compile_local(step, mesh, params=PARAMS, specs=EVERYWHERE):
    split = P(mesh.axis_names)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, split), out_specs=specs)
    placed = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
    args = jax.device_put(params, placed), put(BATCH, mesh, split)
    return jax.jit(mapped).lower(*args).compile(), args


def naive_step(params, batch):
    return descend(params, accumulate(params, strided(batch)))


def local_step(params, batch):
    """Of `jax.shard_map`: one sum after the loop."""
    local = jax.lax.pcast(params, "data", to="varying")
    sums = accumulate(local, batch.reshape(MICROBATCHES, -1, 6))
    return descend(params, jax.lax.pmean(sums, "data"))


def twin_step(params, batch):
    """The same without the cast: JAX reduces the gradient where it is taken."""
    sums = accumulate(params, batch.reshape(MICROBATCHES, -1, 6))
    return descend(params, jax.tree.map(lambda g: g / 4, sums))


def operands(collectives):
    return sorted(n for c in collectives for n in c.entries)


@functools.cache
def naive():
    return compile_auto(naive_step)


@functools.cache
def local():
    return compile_local(local_step, auto_mesh((4,), ("data",)))


# -- Programs that XLA compiles


@pytest.mark.parametrize("shape", [(4,), (4, 2)])
def test_a_scan_left_to_the_compiler_reduces_in_the_loop(shape):
    names = ("data", "more")[: len(shape)]
    compiled, _ = compile_auto(naive_step, auto_mesh(shape, names))
    report = collective_report(compiled)
    inside = report.parameter_sized_inside
    assert operands(inside) == SIZES
    assert {(c.kind, c.loops, c.trips) for c in inside} == {
        ("all-reduce", 1, MICROBATCHES)
    }
    n = np.prod(shape)
    assert {c.group_size for c in inside} == {n}
    assert report.parameter_sized_outside == ()
    assert report.bytes_moved == MICROBATCHES * 2 * (n - 1) * BYTES // n
    assert not any(c.is_conditional for c in report.collectives)
    with pytest.raises(AssertionError, match="in 1 loop, 4 times") as error:
        assert_one_reduction(compiled)
    assert "jit(naive_step)/while/body" in str(error.value)
    assert "pcast" in str(error.value)


def test_one_sum_after_the_loop():
    compiled, _ = local()
    report = collective_report(compiled)
    assert report.inside == () and report.outside == report.collectives
    assert operands(report.parameter_sized_outside) == SIZES
    assert {c.trips for c in report.outside} == {1}
    assert report.bytes_moved == 2 * 3 * BYTES // 4
    assert_one_reduction(compiled)
    assert_one_reduction(compiled, PARAMS)
    assert_one_reduction(compiled.as_text(), PARAMS)


def test_without_the_cast_the_loop_reduces():
    """Equal numbers: nothing but the program tells."""
    compiled, args = compile_local(twin_step, auto_mesh((4,), ("data",)))
    desired = local()[0](*args)
    for a, b in zip(*map(jax.tree.leaves, (compiled(*args), desired)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert operands(collective_report(compiled).parameter_sized_inside) == SIZES
    with pytest.raises(AssertionError, match="in a loop"):
        assert_one_reduction(compiled)


def test_calls_without_a_loop_reduce_each_time():
    def unrolled(params, batch):
        grads = [jax.grad(loss_fn)(params, x) for x in strided(batch)]
        return descend(params, jax.tree.map(lambda *g: sum(g), *grads))

    compiled, _ = compile_auto(unrolled)
    report = collective_report(compiled)
    assert report.inside == ()
    assert operands(report.parameter_sized_outside) == sorted(MICROBATCHES * SIZES)
    with pytest.raises(AssertionError, match="3 operands of 48 entries too many"):
        assert_one_reduction(compiled)


def test_a_step_that_forgets_to_reduce():
    mesh = auto_mesh((4,), ("data",))

    def forgetful(params, batch):
        local = jax.lax.pcast(params, "data", to="varying")
        return jax.tree.map(lambda g: g[None], accumulate(local, batch[None]))

    mapped = jax.shard_map(
        forgetful, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
    )
    compiled = jax.jit(mapped).lower(PARAMS, BATCH).compile()
    assert collective_report(compiled).collectives == ()
    assert str(collective_report(compiled)).startswith("moved by each device: 0 B")
    with pytest.raises(AssertionError, match="nothing reduced, in 0 collectives"):
        assert_one_reduction(compiled)


def test_one_device():
    compiled = jax.jit(naive_step).lower(PARAMS, BATCH).compile()
    with pytest.raises(AssertionError, match="nothing reduced.*of one device"):
        assert_one_reduction(compiled)


def test_a_parameter_that_is_left_out():
    def partial_step(params, batch):
        local = jax.lax.pcast(params, "data", to="varying")
        sums = accumulate(local, batch.reshape(MICROBATCHES, -1, 6))
        reduced = {name: jax.lax.pmean(sums[name], "data") for name in "wv"}
        # One entry of each device's own sum: as good as never.
        first = jax.lax.pmax(sums["b"][0, 0], "data")
        return descend(params, reduced | {"b": jnp.full_like(params["b"], first)})

    compiled, _ = compile_local(partial_step, auto_mesh((4,), ("data",)))
    with pytest.raises(AssertionError, match=r"got 1 of 1 as large as \['b'\] never"):
        assert_one_reduction(compiled)


# -- Parameters in parts

PARTS = {"w": P("fsdp"), "b": P(), "v": P(None, "fsdp")}


def scatter(grads):
    """Each device its part of the sum over ``fsdp``, then the sum over ``data``."""
    return {
        "w": jax.lax.psum_scatter(grads["w"], "fsdp", scatter_dimension=0, tiled=True),
        "b": jax.lax.psum(grads["b"], "fsdp"),
        "v": jax.lax.psum_scatter(grads["v"], "fsdp", scatter_dimension=1, tiled=True),
    }


def gather(params):
    return {
        "w": jax.lax.all_gather(params["w"], "fsdp", axis=0, tiled=True),
        "b": params["b"],
        "v": jax.lax.all_gather(params["v"], "fsdp", axis=1, tiled=True),
    }


def vary(params):
    axes = {"w": "data", "b": ("data", "fsdp"), "v": "data"}
    return {k: jax.lax.pcast(params[k], axes[k], to="varying") for k in params}


def two_stage_step(params, batch):
    whole = gather(vary(params))
    sums = scatter(accumulate(whole, batch.reshape(MICROBATCHES, -1, 6)))
    return descend(params, jax.lax.psum(sums, "data"))


def in_place(leaf, spec):
    sharding = NamedSharding(mesh_in_two(), spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def mesh_in_two():
    return auto_mesh((4, 2), ("data", "fsdp"))


def test_two_stages_are_one_reduction():
    """But for the bias, which is in no parts and goes the way twice."""
    compiled, _ = compile_local(two_stage_step, mesh_in_two(), specs=PARTS)
    report = collective_report(compiled)
    found = [(c.kind, c.group_size, n) for c in report.outside for n in c.entries]
    assert sorted(found) == [
        *(("all-gather", 2, 16), ("all-gather", 2, 24)),
        *(("all-reduce", 2, 8), ("all-reduce", 4, 8)),
        *(("all-reduce", 4, 16), ("all-reduce", 4, 24)),
        *(("reduce-scatter", 2, 32), ("reduce-scatter", 2, 48)),
    ]
    assert all(c.is_parameter_sized for c in report.outside) and not report.inside
    gathered = scattered = 4 * (32 + 48) // 2
    second = 2 * 3 * 4 * (16 + 24) // 4
    bias = 2 * 4 * 8 // 2 + 2 * 3 * 4 * 8 // 4
    assert report.bytes_moved == gathered + scattered + second + bias
    with pytest.raises(AssertionError, match="got 1 operands of 8 entries too many\n"):
        assert_one_reduction(compiled)
    weights = {name: in_place(PARAMS[name], PARTS[name]) for name in "wv"}
    assert_one_reduction(compiled, weights)
    # The second stage is as large as nothing where nobody says that there are parts.
    whole = {name: PARAMS[name] for name in "wv"}
    assert_one_reduction(compiled, whole)
    sizes = [8, 8, 16, 24, 32, 48]
    reductions = [c for c in report.outside if c.kind != "all-gather"]
    assert operands(reductions) == sizes
    large = collective_report(compiled, whole).parameter_sized_outside
    assert operands(c for c in large if c.kind != "all-gather") == [32, 48]


def test_gathering_in_the_loop_scatters_in_the_loop():
    def step(params, batch):
        varying = vary(params)

        def body(sums, x):
            grads = scatter(jax.grad(loss_fn)(gather(varying), x))
            return jax.tree.map(jnp.add, sums, grads), None

        zeros = jax.tree.map(jnp.zeros_like, varying) | {
            "b": jax.lax.pcast(jnp.zeros((1, 8)), "data", to="varying")
        }
        rows = batch.reshape(MICROBATCHES, -1, 6)
        return descend(params, jax.lax.psum(jax.lax.scan(body, zeros, rows)[0], "data"))

    compiled, _ = compile_local(step, mesh_in_two(), specs=PARTS)
    inside = collective_report(compiled).parameter_sized_inside
    # What is gathered is always the same, so that XLA:CPU gathers it before the loop.
    assert {c.kind for c in inside} == {"all-reduce", "reduce-scatter"}
    with pytest.raises(
        AssertionError, match="`gather='call'` where a reduce-scatter"
    ) as error:
        assert_one_reduction(compiled)
    assert "reduce-scatter  in 1 loop, 4 times" in str(error.value)
    assert "all-gather" not in str(error.value)


def test_parts_left_to_the_compiler():
    """XLA:CPU has an all-reduce of the whole, of which each device takes its part."""
    mesh = mesh_in_two()
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), PARTS)
    args = jax.device_put(PARAMS, places), put(BATCH, mesh, P(("data", "fsdp")))

    def step(params, batch):
        return descend(params, jax.grad(loss_fn)(params, batch))

    compiled = jax.jit(step, out_shardings=places).lower(*args).compile()
    reductions = [
        (n, c.group_size)
        for c in collective_report(compiled).parameter_sized_outside
        for n in c.entries
        if c.kind == "all-reduce"
    ]
    assert sorted(reductions) == [(8, 8), (16, 4), (24, 4), (32, 2), (48, 2)]
    assert_one_reduction(compiled)
    naive = jax.jit(naive_step, out_shardings=places).lower(*args).compile()
    with pytest.raises(AssertionError, match="in a loop"):
        assert_one_reduction(naive)


# -- Loops and branches


def test_loops_in_loops_multiply():
    mesh = auto_mesh((4,), ("data",))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    def nested(x):
        def inner(c, _):
            return jax.lax.pmean(jnp.sin(c), "data"), None

        def outer(c, _):
            return jax.lax.scan(inner, c, None, length=3)[0], None

        return jax.lax.scan(outer, jnp.sum(x, 0), None, length=5)[0]

    report = collective_report(nested.lower(BATCH).compile(), [jnp.ones(6)])
    (found,) = report.collectives
    assert (found.loops, found.trips, found.is_parameter_sized) == (2, 15, True)
    assert found.bytes_moved == report.bytes_moved == 15 * 2 * 3 * (6 * 4) // 4
    assert "in 2 loops, 15 times" in str(report)


def test_a_loop_that_does_not_tell_and_a_branch():
    mesh = auto_mesh((4,), ("data",))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    def loop(n, x):
        def body(carry):
            i, y = carry
            total = jax.lax.cond(
                i < 2, lambda y: jax.lax.pmean(y, "data"), lambda y: 2 * y, y
            )
            return i + 1, total

        return jax.lax.while_loop(lambda c: c[0] < n, body, (0, jnp.sum(x, 0)))[1]

    compiled = loop.lower(3, BATCH).compile()
    report = collective_report(compiled, jnp.ones(6))
    (found,) = report.collectives
    assert (found.loops, found.trips, found.is_conditional) == (1, None, True)
    assert found.bytes_moved is None and report.bytes_moved is None
    assert "in 1 loop, ? times, in a branch" in str(report)
    assert "moved by each device: unknown" in str(report)
    # By default the first argument: an integer has no gradient.
    assert not collective_report(compiled).collectives[0].is_parameter_sized


# -- What is taken for the parameters


def test_parameters_are_those_of_a_train_state():
    mesh = auto_mesh((4,), ("data",))
    optimizer = optax.adam(0.1)
    state = optax_accum.init_train_state(PARAMS, optimizer)
    step = make_train_step(loss_fn, optimizer, num_microbatches=1, donate=False)
    args = put(state, mesh, P()), put(BATCH, mesh, P("data"))
    compiled = step.lower(*args).compile()
    assert operands(collective_report(compiled).parameter_sized_outside)[-3:] == SIZES
    assert_one_reduction(compiled)
    assert_one_reduction(compiled, state)
    # The moments are as large, and not reduced.
    with pytest.raises(AssertionError, match=r"2 of 3 as large as \[1\].* never red"):
        assert_one_reduction(compiled, tuple(state))


# -- Texts

HEAD = "HloModule step, is_scheduled=true, replica_count=2, num_partitions=4\n"


def text_of(*lines, before=""):
    body = "\n".join(f"  {line}" for line in lines)
    return f"{HEAD}\n{before}\nENTRY %main.1 (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def only(*lines, before="", sizes=(8,)):
    params = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in sizes]
    (found,) = collective_report(text_of(*lines, before=before), params).collectives
    return found


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,1},{2,3}}", 2),
        ("replica_groups={{0,1,2}}", 3),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[4,2]<=[4,2]T(1,0)", 2),
        ("replica_groups={}", 8),
        ("channel_id=1", 8),
        ("replica_groups=mesh['a'=4,'b'=2] {'b'}", 2),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a','b'}", 8),
        ("replica_groups=mesh['a'=4,'b'=2] {'a':(1)2,'b'}", 4),
    ],
)
def test_groups(groups, size):
    line = f"%x = f32[8]{{0}} all-reduce(%p), {groups}, to_apply=%add"
    assert only(line).group_size == size


@pytest.mark.parametrize(
    ("type_", "opcode", "entries", "payload"),
    [
        ("f32[2,4]{1,0:T(8,128)}", "all-reduce", (8,), 32),
        ("bf16[8]{0:T(1024)(128)(2,1)S(1)}", "all-reduce", (8,), 16),
        ("(f32[8]{0}, /*index=1*/s4[3]{0}, pred[])", "all-reduce", (8, 3, 1), 35),
        ("f32[8]{0:T(8,128)}", "all-reduce-start", (8,), 32),
        ("(f32[8]{0}, c64[2]{0})", "all-reduce-start", (8, 2), 48),
        ("((f32[8]{0}), f32[8]{0}, u32[])", "all-reduce-start", (8,), 32),
        ("f32[8]", "all-gather", (4,), 32),
        ("(f32[4]{0:T(8,128)}, f32[8]{0:T(8,128)})", "all-gather-start", (4,), 32),
        (
            "((f32[4]{0:T(8,128)}, f32[2]{0}), (f32[8]{0:T(8,128)}, f32[4]{0}))",
            "all-gather-start",
            (4, 2),
            48,
        ),
        ("f32[4]{0}", "reduce-scatter", (8,), 32),
        ("((f32[8]{0}), f32[4]{0:T(8)}, s32[])", "reduce-scatter-start", (8,), 32),
        (
            "((f32[8], f8e4m3fn[2]), (f32[4], f8e4m3fn[1]))",
            "reduce-scatter-start",
            (8, 2),
            34,
        ),
        ("(f32[4], f32[4])", "all-to-all", (4, 4), 32),
        ("((f32[8]{0}), f32[8]{0})", "all-to-all-start", (8,), 32),
        (
            "((f32[8], f32[9], s32[2], s32[2]), f32[9])",
            "ragged-all-to-all-start",
            (9,),
            36,
        ),
        ("f32[8]", "collective-permute", (8,), 32),
        ("(f32[8], f32[8], u32[], u32[])", "collective-permute-start", (8,), 32),
        (
            "((f32[8], f32[2]), (f32[8], f32[2]), u32[], u32[])",
            "collective-permute-start",
            (8, 2),
            40,
        ),
        ("((f32[8]), f32[8], u32[])", "collective-broadcast-start", (8,), 32),
    ],
)
def test_operands_and_payload(type_, opcode, entries, payload):
    kind = opcode.removesuffix("-start")
    groups = "replica_groups={{0,1}}"
    line = f"ROOT %x.1 = {type_} {opcode}(%p), {groups}, dimensions={{0}}"
    found = only(
        line,
        f"%done = f32[8] {kind}-done(%x.1)",
        f'%other = f32[] add(%p, %p), metadata={{op_name="f/{kind}(x)"}}',
        sizes=(max(entries),),
    )
    assert (found.kind, found.entries, found.bytes) == (kind, entries, payload)
    assert found.is_parameter_sized
    rounds = {
        **{"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1},
        **{"ragged-all-to-all": 1, "collective-permute": 2, "collective-broadcast": 2},
    }
    assert found.bytes_moved == rounds[kind] * payload / 2


def test_what_is_gathered_may_be_a_parameter():
    gather = "%x = f32[8]{0} all-gather(%p), replica_groups={{0,1}}"
    assert only(gather, sizes=(8,)).is_parameter_sized
    assert only(gather, sizes=(4,)).is_parameter_sized
    assert not only(gather, sizes=(16,)).is_parameter_sized


@pytest.mark.parametrize(
    ("line", "loops", "trips", "is_conditional"),
    [
        ("fusion(%p), kind=kCustom, calls=%inner", 0, 1, False),
        ("async-start(%p), calls=%inner", 0, 1, False),
        ("call(%p), to_apply=%inner", 0, 1, False),
        ("call-start(%p), to_apply=%inner", 0, 1, False),
        (
            'custom-call(%p), custom_call_target="f", called_computations={%inner}',
            0,
            1,
            False,
        ),
        ("conditional(%p), branch_computations={%other, %inner}", 0, 1, True),
        (
            "conditional(%p), true_computation=%inner, false_computation=%other",
            0,
            1,
            True,
        ),
        (
            "conditional(%p), true_computation=%other, false_computation=%inner",
            0,
            1,
            True,
        ),
        ("while(%p), condition=%other, body=%inner", 1, None, False),
        ("while(%p), condition=%inner, body=%other", 1, None, False),
        (
            'while(%p), condition=%other, body=%inner, backend_config={"known_init":'
            '{"init":"0","step":"2"},"known_trip_count":{"n":"7"}}',
            *(1, 7, False),
        ),
        (
            "while(%p), condition=%other, body=%inner, "
            r'backend_config="{\"known_trip_count\":{\"n\":\"7\"}}"',
            *(1, 7, False),
        ),
    ],
)
def test_where_computations_are_run_from(line, loops, trips, is_conditional):
    before = (
        "%other (p: f32[8]) -> f32[8] {\n  ROOT %p = f32[8]{0} parameter(0)\n}\n"
        "%inner (p: f32[8], /*index=1*/q: f32[]) -> (f32[8], f32[]) {\n"
        "  ROOT %x = f32[8]{0} all-reduce(%p), to_apply=%add\n}"
    )
    found = only(f"%y = f32[8]{{0}} {line}", before=before)
    assert (found.loops, found.trips) == (loops, trips)
    assert found.is_conditional == is_conditional


def test_what_is_run_from_nowhere_or_twice():
    inner = "%inner (p: f32[8]) -> f32[8] {\n  %x = f32[8] all-reduce(%p)\n}"
    nowhere = (
        "%a = ((f32[8]), f32[8]) async-done(%s), calls=%inner",
        "%b = f32[] reduce(%p, %c), dimensions={0}, to_apply=%inner",
        '%c = f32[8] add(%p), metadata={op_name="while(p), body=%inner" id=1}',
        '%d = f32[8] fusion(%p), calls=%f, metadata={op_name="\\"calls=%inner" id=1}',
    )
    nothing = collective_report(text_of(*nowhere, before=inner), jnp.ones(8))
    assert nothing.collectives == ()
    twice = [
        "%a = f32[8] call(%p), to_apply=%inner",
        "%b = f32[8] fusion(), calls=%inner",
    ]
    report = collective_report(text_of(*twice, before=inner), jnp.ones(8))
    assert report.collectives == (report.collectives[0],) * 2
    assert report.bytes_moved == 2 * (2 * 7 * 32 // 8)
    assert "2 x  all-reduce  outside  32 B  8 devices\n" in str(report)
    with pytest.raises(AssertionError, match="1 operands of 8 entries too many"):
        assert_one_reduction(text_of(*twice, before=inner), jnp.ones(8))


def trip_count(n):
    return f'backend_config={{"known_trip_count":{{"n":"{n}"}}}}'


def test_a_branch_inside_a_loop_inside_a_call():
    before = "".join(
        f"%{name} (p: f32[8]) -> f32[8] {{\n  %x = f32[8] {line}\n}}\n"
        for name, line in {
            "leaf": "all-reduce(%p), replica_groups={{0,1}}",
            "branch": "conditional(%p), branch_computations={%leaf}",
            "body": f"while(%p), body=%branch, {trip_count(3)}",
        }.items()
    )
    loop = f"%y = f32[8] while(%p), body=%body, {trip_count(2)}"
    found = only(loop, before=before)
    assert (found.loops, found.trips, found.is_conditional) == (2, 6, True)
    found = only(loop.split(", backend")[0], before=before)
    assert (found.loops, found.trips, found.is_conditional) == (2, None, True)


def test_what_is_said_of_a_loop_is_that_of_the_loop():
    body = f"%body (p: f32[8]) -> f32[8] {{\n  {all_reduce(8, name='micro')}\n}}"
    loop = f"%y = f32[8] while(%p), body=%body, {trip_count(2)}"
    final = all_reduce(8, name="final")
    with pytest.raises(AssertionError, match="these in a loop:\n.*micro") as error:
        assert_one_reduction(text_of(loop, final, before=body), jnp.ones(8))
    assert "final" not in str(error.value)


def test_constants_of_several_lines_are_no_computations():
    constant = "%c = f32[1,2]{1,0} constant({", "  { 1, 2 }", "})"
    assert only(*constant, all_reduce(8)).kind == "all-reduce"


def all_reduce(size, groups="{{0,1}}", name="grad", kind="all-reduce"):
    return (
        f"%x = f32[{size}]{{0}} {kind}(%p), replica_groups={groups}, "
        f'metadata={{op_name="jit(step)/{name}" stack_frame_id=3}}'
    )


@pytest.mark.parametrize(("count", "is_right"), [(1, False), (2, True), (3, False)])
def test_parameters_of_the_same_size(count, is_right):
    text = text_of(*[all_reduce(8)] * count)
    if is_right:
        assert_one_reduction(text, {"a": jnp.ones(8), "b": jnp.ones((2, 4))})
        return
    wrong = "got 1 operands of 8 entries too many"
    if count == 1:
        wrong = r"got 1 of 2 as large as \['a'\] never reduced"
    with pytest.raises(AssertionError, match=wrong):
        assert_one_reduction(text, {"a": jnp.ones(8), "b": jnp.ones((2, 4))})


def in_parts(size, axes, mesh=None):
    sharding = NamedSharding(mesh or auto_mesh((2, 2), ("x", "y")), P(axes))
    return jax.ShapeDtypeStruct((size,), jnp.float32, sharding=sharding)


def is_one_reduction(params, *lines, devices=None):
    try:
        assert_one_reduction(text_of(*lines), params, devices=devices)
    except AssertionError:
        return False
    return True


def test_sizes_that_several_parameters_may_have():
    """The larger may be reduced in its part; the smaller is whole."""
    both = {"a": in_parts(16, "x"), "b": jnp.ones(8)}
    assert is_one_reduction(both, all_reduce(8), all_reduce(8))
    assert is_one_reduction(both, all_reduce(16), all_reduce(8))
    assert not is_one_reduction(both, all_reduce(8))
    assert not is_one_reduction(both, all_reduce(16))
    assert not is_one_reduction(both, all_reduce(16), all_reduce(16))
    # The part may be that of a second stage too.
    assert is_one_reduction(both, *map(all_reduce, (16, 8, 8)))
    assert not is_one_reduction(both, *map(all_reduce, (16, 8, 8, 8)))
    assert not is_one_reduction(both, *map(all_reduce, (8, 8, 8)))
    # One that could be either must leave the place to one that could not.
    three = {"a": in_parts(16, "x"), "b": in_parts(32, "y"), "c": jnp.ones(8)}
    for sizes in ((16, 16, 8), (8, 8, 32), (8, 16, 32)):
        for order in itertools.permutations(sizes):
            assert is_one_reduction(three, *map(all_reduce, order)), order
    assert not is_one_reduction(three, *map(all_reduce, (32, 16, 16)))


def test_stages():
    whole = {"a": jnp.ones(16)}
    parts = {"a": in_parts(16, ("x", "y"))}
    four = "{{0,1,2,3}}"
    scatter = functools.partial(all_reduce, kind="reduce-scatter")
    assert is_one_reduction(parts, scatter(8))
    assert is_one_reduction(parts, scatter(8), all_reduce(8))
    assert is_one_reduction(parts, scatter(4, four), all_reduce(4))
    assert is_one_reduction(parts, all_reduce(16), all_reduce(8))
    assert is_one_reduction(parts, all_reduce(16, four), all_reduce(4))
    assert not is_one_reduction(parts, scatter(8), scatter(8))
    assert not is_one_reduction(parts, scatter(8), scatter(4))
    assert not is_one_reduction(parts, scatter(8), all_reduce(8), all_reduce(8))
    assert not is_one_reduction(parts, all_reduce(16), all_reduce(16))
    assert not is_one_reduction(parts, all_reduce(4), all_reduce(4))
    # By 2 devices, 16 leave 8 and not 4; of what is nowhere in parts, nothing is left.
    assert not is_one_reduction(parts, all_reduce(16), all_reduce(4))
    assert not is_one_reduction(whole, all_reduce(16, "{{0}}"), all_reduce(16))


def test_what_is_joined_is_left_out_together_only():
    """XLA joins gradients with statistics: then nothing can be left out of it."""
    params = {"scale": jnp.ones(6)}
    line = all_reduce(6, name="(psum:transpose(jvp(M))/BatchNorm_0/psum)")
    assert_one_reduction(text_of(line), params, ignore="BatchNorm")
    both = all_reduce(6, name="(psum:M/BatchNorm_0/psum)"), all_reduce(6)
    with pytest.raises(AssertionError, match="1 operands of 6 entries too many"):
        assert_one_reduction(text_of(*both), params, ignore="BatchNorm")
    apart = all_reduce(6), all_reduce(6, name="BatchNorm_0/(psum:reduce_sum)")
    assert_one_reduction(text_of(*apart), params, ignore="BatchNorm")


def test_over_how_many_devices():
    """Else a replica whose gradient was forgotten would be none the wiser."""
    params = {"a": in_parts(16, ("x", "y")), "b": jnp.ones(6)}
    two, four = "{{0,1},{2,3}}", "{{0,1,2,3}}"
    scatter = functools.partial(all_reduce, kind="reduce-scatter")
    whole = all_reduce(6, four)
    assert is_one_reduction(params, all_reduce(16, four), whole, devices=4)
    assert not is_one_reduction(params, all_reduce(16, two), whole, devices=4)
    assert is_one_reduction(params, all_reduce(16, two), all_reduce(6, two), devices=2)
    # A stage over two, of what is left over two others.
    stages = scatter(8, two), all_reduce(8, two)
    assert is_one_reduction(params, *stages, whole, devices=4)
    assert not is_one_reduction(params, *stages, whole, devices=8)
    assert not is_one_reduction(params, scatter(8, two), whole, devices=4)
    assert not is_one_reduction(params, *stages, all_reduce(6, two), devices=4)
    with pytest.raises(
        AssertionError, match="6 entries added up over 2 devices, not 4"
    ):
        text = text_of(*stages, all_reduce(6, two))
        assert_one_reduction(text, params, devices=4)


def test_parts_of_tensors_in_parts():
    """Any axes may be gathered while a gradient is reduced."""
    mesh = auto_mesh((2, 4), ("x", "y"))
    for axes in (("x", "y"), ("y", "x")):
        placed = in_parts(64, axes, mesh)
        for size in (64, 32, 16, 8):
            assert is_one_reduction([placed], all_reduce(size)), size
        assert not is_one_reduction([placed], all_reduce(4))
    # Over an axis that it is not divided over, the compiler may divide it for itself.
    assert is_one_reduction([in_parts(64, "y", mesh)], all_reduce(32))
    assert not is_one_reduction([in_parts(64, "y", mesh)], all_reduce(4))
    cube = in_parts(64, ("x", "y", "z"), auto_mesh((2, 2, 2), ("x", "y", "z")))
    for size in (64, 32, 16, 8):
        assert is_one_reduction([cube], all_reduce(size)), size


def test_many_parameters_take_no_time():
    params = {i: jnp.ones(4 + i % 3) for i in range(1500)}
    lines = [all_reduce(4 + i % 3) for i in range(1500)]
    assert is_one_reduction(params, *lines)
    assert not is_one_reduction(params, *lines[1:])


def test_ignored_sources():
    statistics = [all_reduce(8, name="BatchNorm_0/mean"), all_reduce(8, name="var")]
    text = text_of(all_reduce(8), *statistics)
    params = {"scale": jnp.ones(8)}
    for ignore in ((), "BatchNorm", "nowhere"):
        with pytest.raises(AssertionError, match="too many"):
            assert_one_reduction(text, params, ignore=ignore)
    assert_one_reduction(text, params, ignore=["BatchNorm", "var"])
    assert_one_reduction(text, params, ignore=(x for x in ("BatchNorm", "var")))
    with pytest.raises(AssertionError, match="nothing reduced"):
        assert_one_reduction(text, params, ignore="jit(step)")


def test_scalars_are_anything():
    loss = "%l = (f32[], f32[8]{0}, f32[1]{0}) all-reduce(%a, %b, %c)"
    assert_one_reduction(text_of(loss), {"w": jnp.ones(8), "scale": jnp.ones(())})
    alone = "%l = f32[] all-reduce(%a)"
    for params in ((), jnp.ones(1), in_parts(2, "x")):
        (found,) = collective_report(text_of(alone), params).collectives
        assert not found.is_parameter_sized
    with pytest.raises(AssertionError, match="nothing reduced, in 1 collectives"):
        assert_one_reduction(text_of(alone), jnp.ones(8))


def test_gathering_is_no_reduction():
    gather = "%g = f32[8] all-gather(%x), replica_groups={{0,1}}"
    assert_one_reduction(text_of(gather, all_reduce(8), gather), jnp.ones(8))


# -- As a table


def test_the_table():
    source = "jit(step)/" + "transpose(jvp())/" * 5 + "dot_general"
    text = text_of(
        all_reduce(1024, name="small").replace("f32[1024]", "f32[]"),
        *[all_reduce(1024, name=source)] * 2,
    )
    lines = str(collective_report(text, jnp.ones(1024))).splitlines()
    assert lines == [
        "as large as a parameter:",
        f"  2 x  all-reduce  outside  4 KiB  2 devices  ...{source[-50:]}",
        "",
        "others:",
        "  1 x  all-reduce  outside  4 B  2 devices  jit(step)/small",
        "",
        "moved by each device: 8.004 KiB a run",
    ]
    with pytest.raises(AssertionError) as error:
        assert_one_reduction(text, jnp.ones(1024))
    assert source in str(error.value) and "jit(step)/small" not in str(error.value)


# -- Errors


@pytest.mark.parametrize("function", [collective_report, assert_one_reduction])
def test_errors(function):
    step = jax.jit(naive_step)
    text = text_of(all_reduce(8))
    cure = r"step\.lower\(\.\.\.\)\.compile\(\)"
    for wrong in (step, naive_step, None, 3, step.lower(PARAMS, BATCH)):
        with pytest.raises(TypeError, match=rf"`{function.__name__}\(comp.*{cure}"):
            function(wrong, PARAMS)
    with pytest.raises(ValueError, match=f"must be a compiled step.*{cure}"):
        function(step.lower(PARAMS, BATCH).as_text(), PARAMS)
    with pytest.raises(TypeError, match="must be given `params` with a text"):
        function(text)
    keywords = jax.jit(lambda *, x: x).lower(x=1.0).compile()
    with pytest.raises(ValueError, match="takes nothing first"):
        function(keywords)
    with pytest.raises(TypeError, match=r"got str at \['a'\]; give it the parameters"):
        function(text, {"a": "x"})


def test_errors_of_the_assertion():
    text = text_of(all_reduce(8))
    for params in ({}, {"a": jnp.ones(()), "b": jnp.ones(8, jnp.int32)}):
        with pytest.raises(ValueError, match="must hold a floating or complex array"):
            assert_one_reduction(text, params)
    for ignore in (3, [3], "", ["BatchNorm", ""], None):
        with pytest.raises(TypeError, match="must be strings that are not empty"):
            assert_one_reduction(text, jnp.ones(8), ignore=ignore)
