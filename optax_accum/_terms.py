"""What a loss consists of: means and sums, each with a denominator of its own."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum._numerics import (
    add,
    divide,
    is_inexact,
    is_real,
    kind_of,
    ratio,
    scale,
    sum_dtype,
    weight_dtype,
    widen,
)
from optax_accum._reductions import Mergeable, check_leaves, is_marker, register


class SizeHint:
    """How many entries were summed, if known; all of them are equal.

    It changes no result: before they are differentiated, totals are divided by a power
    of two near it, so that gradients of 16 bits stay in range. So the branches of a
    ``lax.cond`` may differ in it, as may the carry and the result of a scan.
    """

    def __init__(self, size: int | None = None):
        self.size = size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SizeHint)

    def __hash__(self) -> int:
        return hash(SizeHint)

    def __repr__(self) -> str:
        return f"SizeHint({self.size})"


class Term(Mergeable):
    """A marker that a loss may consist of: it can be added, and scaled."""

    # NumPy's scalars on the left then leave the product to us.
    __array_ufunc__ = None

    @abc.abstractmethod
    def scaled(self, factor: ArrayLike) -> Self:
        """This times a real scalar."""

    def __mul__(self, factor: Any) -> Self:
        return self.scaled(_check_factor(self, factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Self:
        divisor = _check_factor(self, divisor)
        if isinstance(divisor, int | float):  # which Python divides in double precision
            return self.scaled(1 / divisor)
        return self.scaled(1 / widen(divisor))

    def __neg__(self) -> Self:
        return self.scaled(-1)

    def __add__(self, other: Any) -> Any:
        if isinstance(other, int | float) and other == 0:  # with which `sum` starts
            return self
        return Terms((*terms_of(self), *terms_of(_summand_for(self, other))))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self + -_summand_for(self, other)

    def __rsub__(self, other: Any) -> Any:
        return -self + other


@register
class Mean(Term):
    r"""A mean over all micro-batches: :math:`\sum_i t_i / \sum_i w_i`.

    As a loss it makes the gradient that of the whole batch, however unequal the weights
    of the micro-batches are; in aux it reports such a mean. `mean` makes one of many
    entries; by hand, with n rows, it is ``Mean(n * batch_mean, n)``. ``value`` is the
    mean, and ``merge`` puts two together.

    Terms of a loss are added with ``+`` and scaled with ``*``, and each keeps its own
    denominator: ``mean(losses, where=mask) + 0.01 * mean(balance)``. A plain scalar
    among them is a mean over rows.

    Attributes:
      total: weighted sum over this micro-batch. In a loss a real scalar, in aux numbers
        of any shape, or a pytree of them.
      weight: the denominator, a real scalar >= 0: the number of rows, or of unmasked
        tokens. It is data: not differentiated. With weight 0 the total is 0, whatever
        it holds.
      size: how many entries were summed, where `mean` knows; it changes no result.

    Examples:
      >>> first, second = optax_accum.Mean(3.0, 1.0), optax_accum.Mean(9.0, 9.0)
      >>> print(first.value, second.value, first.merge(second).value)
      3.0 1.0 1.2
    """

    total: Any
    weight: Any
    size: SizeHint = dataclasses.field(
        default=SizeHint(), kw_only=True, repr=False, metadata={"static": True}
    )

    @property
    def value(self) -> Any:
        """``total / weight``, or 0 where the weight is 0."""
        widened = self.widened()
        return jax.tree.map(lambda t: ratio(t, widened.weight), widened.total)

    def widened(self) -> Self:
        weight = jnp.asarray(self.weight, weight_dtype(self.total))
        weight = jax.lax.stop_gradient(weight)

        def counted(total):
            # Selected, not multiplied: zero times NaN would be NaN.
            return jnp.where(weight == 0, jnp.zeros_like(total), total)

        total = jax.tree.map(counted, widen(self.total))
        return dataclasses.replace(self, total=total, weight=weight)

    def merged(self, later: Self) -> Self:
        one, other = self.widened(), later.widened()
        return dataclasses.replace(
            one,
            total=jax.tree.map(add, one.total, other.total),
            weight=add(one.weight, other.weight),
        )

    def over_devices(self, axes: tuple[str, ...]) -> Self:
        one = self.widened()
        total, weight = jax.lax.psum((one.total, one.weight), axes)
        return dataclasses.replace(one, total=total, weight=weight)

    def scaled(self, factor: ArrayLike) -> Self:
        return dataclasses.replace(self, total=_scaled(self.total, factor))

    def check(self, label: str) -> None:
        check_leaves(label, self, self.total, "numbers")
        if not _is_real_scalar(self.weight):
            raise TypeError(
                f"`{label}` must be a `Mean` whose weight is a real scalar, got "
                f"{_kind(self.weight)}; it is what the whole micro-batch counts for: "
                "sum it, as `optax_accum.mean` does."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class _Added(Term):
    """What is added up. Integers stay integers."""

    x: Any

    def widened(self) -> Self:
        return dataclasses.replace(self, x=jax.tree.map(_summand, self.x))

    def merged(self, later: Self) -> Self:
        return jax.tree.map(add, self.widened(), later.widened())

    def over_devices(self, axes: tuple[str, ...]) -> Self:
        return dataclasses.replace(self, x=jax.lax.psum(self.widened().x, axes))

    def scaled(self, factor: ArrayLike) -> Self:
        return dataclasses.replace(self, x=_scaled(self.x, factor))

    def check(self, label: str) -> None:
        check_leaves(label, self, self.x, "numbers")


@register
class Sum(_Added):
    """A sum over all micro-batches: added up, not averaged.

    As a loss, only for one that already divides by a count known for the whole batch:
    anything else, such as a weight decay, would count N times. In aux, for counts:
    integers stay integers.

    Where a window crosses calls, each call weighs 1, so that the optimizer gets the
    mean of their sums; ``accumulate(..., reduction="sum")`` adds them up.

    Attributes:
      x: in a loss a real floating scalar, in aux numbers of any shape, or a pytree.

    Examples:
      >>> print(optax_accum.Sum(3).merge(optax_accum.Sum(4)).value)
      7
    """

    @property
    def value(self) -> Any:
        return self.widened().x


@register
class RowMean(_Added):
    """A mean over rows, which a plain scalar is: its denominator is known beforehand.

    Attributes:
      x: the scalar times what this micro-batch weighs.
      total_weight: what all micro-batches together weigh.
    """

    total_weight: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def value(self) -> Any:
        return divide(self.x, self.total_weight)

    def over_devices(self, axes: tuple[str, ...]) -> Self:
        added, devices = super().over_devices(axes), jax.lax.axis_size(axes)
        return dataclasses.replace(added, total_weight=devices * self.total_weight)


def row_mean(x: ArrayLike, weight: int, total_weight: int) -> RowMean:
    """`x` as a `RowMean`."""
    return RowMean(scale(x, weight, sum_dtype(jnp.result_type(x))), total_weight)


@register
class Terms(Term):
    """Several terms, each with its own denominator: what ``+`` makes of them.

    Attributes:
      terms: each a `Mean`, a `Sum`, or a real scalar, which is a mean over rows.
    """

    terms: tuple[Any, ...]

    @property
    def value(self) -> jax.Array:
        """The sum of the values of the terms."""
        values = [t.value if isinstance(t, Term) else widen(t) for t in self.terms]
        dtype = weight_dtype(values)
        return sum((jnp.asarray(v, dtype) for v in values), jnp.zeros((), dtype))

    @property
    def weight(self) -> Any:
        """There is none."""
        raise AttributeError(
            f"{len(self.terms)} terms have no `weight` together; take that of the term "
            "that you weigh by, or put what is the same for all rows inside the mean."
        )

    def map(self, fun: Callable[..., Any], *rest: "Terms") -> Self:
        """With `fun` of every term, and of those of others at its place."""
        terms = zip(self.terms, *(other.terms for other in rest), strict=True)
        return dataclasses.replace(self, terms=tuple(fun(*each) for each in terms))

    def widened(self) -> Self:
        return self.map(lambda term: term.widened())

    def merged(self, later: Self) -> Self:
        return self.map(lambda one, other: one.merge(other), later)

    def over_devices(self, axes: tuple[str, ...]) -> Self:
        return self.map(lambda term: term.over_devices(axes))

    def scaled(self, factor: ArrayLike) -> Self:
        def scaled(term):
            is_term = isinstance(term, Term)
            return term.scaled(factor) if is_term else _scaled(term, factor)

        return self.map(scaled)

    def check(self, label: str) -> None:
        for i, term in enumerate(self.terms):
            if isinstance(term, Term):
                term.check(f"{label}.terms[{i}]")


def terms_of(loss: Any) -> tuple[Any, ...]:
    """The terms of a loss: each a `Mean`, a `Sum`, or a scalar."""
    return loss.terms if isinstance(loss, Terms) else (loss,)


# -- Arithmetic in the dtypes of sums


def _summand(x: ArrayLike) -> jax.Array:
    """A number as a sum takes it: an integer stays one, as in ``jnp.sum``."""
    return widen(x) if is_inexact(x) else jnp.sum(x, axis=())


def _scaled(tree: Any, factor: ArrayLike) -> Any:
    def scaled(x):
        dtype = jnp.result_type(x)
        return scale(x, factor, dtype if is_inexact(x) else sum_dtype(dtype))

    return jax.tree.map(scaled, tree)


# -- What they must be given


def _is_real_scalar(x: Any) -> bool:
    return is_real(x) and jnp.shape(x) == ()


def _kind(x: Any) -> str:
    return type(x).__name__ if is_marker(x) else str(jax.tree.map(kind_of, x))


def _check_factor(term: Term, factor: Any) -> Any:
    if _is_real_scalar(factor):
        return factor
    raise TypeError(
        f"a `{type(term).__name__}` must be multiplied or divided by a real scalar, "
        f"got {_kind(factor)}; what is not linear in it takes its `.value`, which is "
        "that of one micro-batch."
    )


def _summand_for(term: Term, other: Any) -> Any:
    """`other` as a term. A Python number follows the dtype of `term`, as in JAX."""
    if isinstance(other, Term):
        return other
    if _is_real_scalar(other):
        is_weak = not is_inexact(other) or getattr(
            other, "weak_type", type(other) is float
        )
        dtype = weight_dtype(term) if is_weak else jnp.result_type(other)
        return jnp.asarray(other, dtype)
    raise TypeError(
        f"to a `{type(term).__name__}` must be added a `Mean`, a `Sum` or a real "
        f"scalar, got {_kind(other)}; reduce it with `jnp.mean` or `optax_accum.mean`."
    )
