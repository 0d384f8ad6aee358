"""The loop over micro-batches, on one device or many: its options checked, and run."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.typing import DTypeLike

from optax_accum._arguments import Roles, find, values_at
from optax_accum._job import Job, prepare
from optax_accum._over_devices import Call, Parts, call_specs, holds_last, spread_out
from optax_accum._reductions import Concat, Stack, map_markers
from optax_accum._scan import (
    Accumulated,
    Returned,
    accumulate_gradients,
    evaluate,
)
from optax_accum._spread import Spread, check_spread, find_mesh
from optax_accum._sums import Accumulator, check_accumulator


class Loop(NamedTuple):
    """A function, ready to be taken through micro-batches as its user has said.

    Attributes:
      caller: whose errors there are.
      job: makes the job of a call.
      spread: over which devices.
      accumulator: how gradients are added up.
      batch_axis: the axis of the rows.
    """

    caller: str
    job: Callable[[Roles, Sequence, dict[str, Any]], Job]
    spread: Spread
    accumulator: Accumulator
    batch_axis: int

    def accumulate(self, roles: Roles, call: Call) -> tuple[Accumulated, Returned]:
        """The gradient and the outputs of all rows of a call."""
        return self._run(
            roles, call, lambda job: accumulate_gradients(job, self.accumulator)
        )

    def evaluate(self, roles: Roles, call: Call) -> tuple[Accumulated, Returned]:
        """The outputs alone."""
        return self._run(roles, call, evaluate)

    def _run(
        self,
        roles: Roles,
        call: Call,
        work: Callable[[Job], tuple[Accumulated, Returned]],
    ) -> tuple[Accumulated, Returned]:
        """``work``, on all devices if they shall share the rows."""
        caller, spread = self.caller, self.spread
        mesh = find_mesh(caller, spread)
        if mesh is None:
            return work(self.job(roles, *call))
        in_specs, placement = call_specs(
            caller, spread, mesh, roles, call, self.batch_axis
        )
        trained = values_at(find(caller, roles, *call), *call).differentiated
        sum_specs = jax.tree.unflatten(jax.tree.structure(trained), placement.specs())
        returned: Any = None

        def body(call):
            nonlocal returned
            whole, returned = work(self.job(roles, *call))
            return _take_apart(whole, returned)

        parts = spread_out(caller, spread, mesh, body, call, in_specs, sum_specs)
        return _put_together(parts, returned), returned


def make_loop(
    caller: str,
    fun: Callable,
    *,
    num_microbatches: int | None = None,
    microbatch_size: int | None = None,
    group_size: int,
    has_aux: bool,
    batch_axis: int,
    unroll: int | bool,
    reduce_axes: Any,
    mesh: Any,
    accumulator_dtype: DTypeLike | None = None,
    compensated: bool = False,
    in_place: bool = False,
    param_specs: Any = None,
    gather: Any = None,
    is_single: bool = True,
) -> Loop:
    """The loop of `fun`, with these options checked. See `check_spread`, too."""
    spread = check_spread(
        caller,
        reduce_axes,
        param_specs,
        gather,
        mesh,
        in_place=in_place,
        is_single=is_single,
    )
    job = prepare(
        caller,
        fun,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        group_size=group_size,
        has_aux=has_aux,
        batch_axis=batch_axis,
        unroll=unroll,
        spread=spread,
    )
    accumulator = check_accumulator(caller, accumulator_dtype, compensated, in_place)
    return Loop(caller, job, spread, accumulator, batch_axis)


def _take_apart(whole: Accumulated, returned: Returned) -> Parts:
    """What all micro-batches come to, by how that of other devices is put to it."""
    _, aux = returned

    def keep(stacked):
        return map_markers(
            lambda marker, value: value if _is_stacked(marker) == stacked else None,
            aux,
            whole.aux,
        )

    return Parts(
        sums=whole.grads,
        stacked=keep(True),
        equal=whole._replace(grads=(), aux=keep(False)),
        must_agree=bool(whole.carry) or holds_last(aux),
    )


def _put_together(parts: Parts, returned: Returned) -> Accumulated:
    """What `_take_apart` has taken apart."""
    _, aux = returned

    def choose(marker, stacked, equal):
        return stacked if _is_stacked(marker) else equal

    aux = map_markers(choose, aux, parts.stacked, parts.equal.aux)
    return parts.equal._replace(grads=parts.sums, aux=aux)


def _is_stacked(marker: Any) -> bool:
    return isinstance(marker, Stack | Concat)
