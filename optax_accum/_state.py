"""What a train step takes and gives back, and what the loss gets of it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_accum._arguments import Argument, Roles
from optax_accum._checks import check_optimizer
from optax_accum._job import check_floats
from optax_accum._mesh import on_mesh_of
from optax_accum._numerics import find_difference, is_numeric, kind_of, settle
from optax_accum._split import is_key


class TrainState(NamedTuple):
    """What a train step takes and gives back. Arrays only.

    Attributes:
      step: calls of the train step so far.
      params: what is trained.
      opt_state: state of the optimizer.
      key: where a key was given, folded with `step` and the number of the micro-batch
        before the loss sees it; never changes. None without.
      model_state: what the model carries from micro-batch to micro-batch, such as the
        statistics of BatchNorm. None without.

    Examples:
      >>> optimizer = optax.sgd(0.5)
      >>> step = optax_accum.make_train_step(lambda w, x: jnp.mean(w * x), optimizer)
      >>> state, _ = step(optax_accum.init_train_state(1.0, optimizer), jnp.ones(4))
      >>> print(state.step, state.params)
      1 0.5
    """

    step: jax.Array  # shape=(), dtype=int32
    params: Any
    opt_state: Any
    key: jax.Array | None
    model_state: Any


def init_train_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    *,
    key: jax.Array | None = None,
    model_state: Any = None,
) -> TrainState:
    """Makes the state that `make_train_step`'s function takes.

    The state owns `params` and `model_state`: the first step consumes their buffers
    (``make_train_step(..., donate=False)`` keeps them). Keys and scalars are copied,
    and so is an array that occurs twice, as in tied weights or an optimizer that keeps
    the initial parameters, for a buffer can be given away once only.

    Where the parameters are sharded, or replicated, over a mesh, whatever else lies on
    one device alone is replicated on that mesh.

    Args:
      params: pytree of floating or complex arrays.
      optimizer: any optax optimizer, one wrapped by `accumulate` too.
      key: a random key, typed or raw, for a loss that takes ``key``.
      model_state: pytree of arrays, for a loss that takes and returns ``model_state``.

    Returns:
      A `TrainState` with ``step`` 0.

    Raises:
      TypeError: `params` holds a leaf that is no floating or complex array, or `key`
        is no key.
      ValueError: an array was given away already, as to an earlier train step.

    Examples:
      >>> state = optax_accum.init_train_state({"w": jnp.ones(3)}, optax.adam(1e-3))
      >>> print(state.step, state.params["w"].shape, state.key)
      0 (3,) None
    """
    optimizer = check_optimizer("init_train_state(params, optimizer)", optimizer)
    check_floats("init_train_state", {"params": params})
    _check_arrays(params)
    _check_alive(params=params, model_state=model_state)
    _check_key(key)
    params = settle(params)
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=settle(optimizer.init(params)),
        key=key,
        model_state=settle(model_state),
    )
    return _own(on_mesh_of(params, state))


def model_inputs(state: TrainState) -> tuple[Roles, dict[str, Any]]:
    """What the loss takes by keyword, and which arguments are what."""
    rng, carry, keywords = (), (), {}
    if state.key is not None:
        rng = (Argument(None, "key"),)
        keywords["key"] = jax.random.fold_in(state.key, state.step)
    if state.model_state is not None:
        carry = (Argument(None, "model_state"),)
        keywords["model_state"] = state.model_state
    trained, batch = Argument(0, "params"), Argument(1, "batch")
    return Roles((trained,), (batch,), rng, carry), keywords


def check_made_by(
    call: str, optimizer: optax.GradientTransformation, state: Any
) -> None:
    """A state of another optimizer is an error of `call`."""
    if not isinstance(state, TrainState):
        raise TypeError(
            f"`{call}` must be given a `TrainState`, got "
            f"{type(state).__name__}; make one with "
            "`init_train_state(params, optimizer)`."
        )
    expected = jax.eval_shape(optimizer.init, state.params)
    difference = find_difference(state.opt_state, expected)
    if difference:
        raise ValueError(
            f"`{call}` must be given a state that its optimizer made, "
            f"got an `opt_state` of another one, {difference}; make it with "
            "`init_train_state(params, optimizer)` of the same optimizer."
        )


def _own(tree: Any) -> Any:
    """`tree` with every buffer once, so that each can be given away.

    Keys and scalars are copied in any case: an optimizer may have got them from its
    maker, who uses them again.
    """
    seen = set()

    def own(leaf):
        if jnp.ndim(leaf) == 0 or is_key(leaf) or _buffer(leaf) in seen:
            leaf = jnp.copy(leaf)
        seen.add(_buffer(leaf))
        return leaf

    return jax.tree.map(own, tree)


def _buffer(leaf: jax.Array) -> Any:
    """What two arrays have in common if they are one in memory."""
    if isinstance(leaf, jax.core.Tracer) or not is_numeric(leaf):
        return id(leaf)
    shards = (shard.data for shard in leaf.addressable_shards)
    return tuple(data.unsafe_buffer_pointer() for data in shards if data.size)


def _check_arrays(params: Any) -> None:
    types = (x for x in jax.tree.leaves(params) if isinstance(x, jax.ShapeDtypeStruct))
    type_ = next(types, None)
    if type_ is not None:
        raise TypeError(
            "`init_train_state(params)` must be given arrays, got the type "
            f"{kind_of(type_)}; for the types of a state write "
            "`jax.eval_shape(lambda p: init_train_state(p, optimizer), params)`."
        )


def _check_alive(**given: Any) -> None:
    """An error of JAX's would not tell who has consumed them."""
    for name, tree in given.items():
        arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
        if any(x.is_deleted() for x in arrays if not isinstance(x, jax.core.Tracer)):
            raise ValueError(
                f"`init_train_state({name})` must be given arrays that are there, got "
                "some that were given away, as to a train step, which consumes the "
                f"state it is given; take `state.{name}` of the state it returned, or "
                "make the step with `donate=False`."
            )


def _check_key(key: Any) -> None:
    if key is not None and not (is_key(key) and jax.random.key_data(key).ndim == 1):
        raise TypeError(
            f"`init_train_state(key=...)` must be a random key, got {kind_of(key)}; "
            "write `jax.random.key(0)`."
        )
