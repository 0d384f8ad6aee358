"""Gradient accumulation for JAX and Optax: the gradient of the large batch, exactly."""

from importlib.metadata import version

from optax_accum._accumulate import accumulate, has_emitted
from optax_accum._call import AccumulateState
from optax_accum._collective_report import assert_one_reduction, collective_report
from optax_accum._mean import mean
from optax_accum._plan import Plan
from optax_accum._plan_microbatches import plan_microbatches
from optax_accum._reductions import Concat, Last, Max, Min, Stack
from optax_accum._skip import SkipFn, skip_nonfinite, skip_norm_above
from optax_accum._state import TrainState, init_train_state
from optax_accum._terms import Mean, Sum
from optax_accum._train_step import make_train_step
from optax_accum._value import value
from optax_accum._value_and_grad import grad, value_and_grad
from optax_accum._window_state import WindowState
from optax_accum._window_steps import make_window_steps

__version__ = version("optax_accum")

__all__ = [
    "AccumulateState",
    "Concat",
    "Last",
    "Max",
    "Mean",
    "Min",
    "Plan",
    "SkipFn",
    "Stack",
    "Sum",
    "TrainState",
    "WindowState",
    "accumulate",
    "assert_one_reduction",
    "collective_report",
    "grad",
    "has_emitted",
    "init_train_state",
    "make_train_step",
    "make_window_steps",
    "mean",
    "plan_microbatches",
    "skip_nonfinite",
    "skip_norm_above",
    "value",
    "value_and_grad",
]
