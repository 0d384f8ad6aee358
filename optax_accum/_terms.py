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
    is_numeric,
    is_real,
    kind_of,
    ratio,
    scale,
    sum_dtype,
    weight_dtype,
    widen,
)
from optax_accum._reductions import Mergeable, check_leaves, is_marker, register


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
        return self.scaled(1 / _check_factor(self, divisor))

    def __neg__(self) -> Self:
        return self.scaled(-1)

    def __add__(self, other: Any) -> Any:
        if isinstance(other, int | float) and other == 0:  # with which `sum` starts
            return self
        return Terms((*terms_of(self), *terms_of(_check_summand(self, other))))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self + -_check_summand(self, other)

    def __rsub__(self, other: Any) -> Any:
        return -self + other


@register
class Mean(Term):
    r"""A mean over all micro-batches: :math:`\sum_i t_i / \sum_i w_i`.

    As a loss it makes the gradient that of the whole batch, however unequal the weights
    of the micro-batches are; in aux it reports such a mean. `mean` makes one of many
    entries; by hand it is, say, ``Mean(rows * batch_mean, rows)``.

    Terms of a loss are added with ``+`` and scaled with ``*``, and each keeps its own
    denominator: ``mean(losses, where=mask) + 0.01 * mean(balance)``. A plain scalar
    among them is a mean over rows.

    Attributes:
      total: weighted sum over this micro-batch. In a loss a real scalar, in aux numbers
        of any shape, or a pytree of them.
      weight: what it counts for, a real scalar >= 0: rows, or unmasked tokens. It is
        data: not differentiated. With weight 0 the total is 0, whatever it holds.
      size: how many entries were summed, if known. It is static and changes no result:
        before they are differentiated, totals are divided by a power of two near it,
        which keeps gradients of 16 bits in range.

    Examples:
      >>> first, second = optax_accum.Mean(3.0, 1.0), optax_accum.Mean(9.0, 9.0)
      >>> print(first.value, second.value, first.merge(second).value)
      3.0 1.0 1.2
    """

    total: Any
    weight: Any
    size: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def value(self) -> Any:
        """``total / weight``, or 0 where the weight is 0."""
        settled = self.settled()
        return jax.tree.map(lambda t: ratio(t, settled.weight), settled.total)

    def settled(self) -> Self:
        weight = jnp.asarray(self.weight, weight_dtype(self.total))
        weight = jax.lax.stop_gradient(weight)

        def counted(total):
            # Selected, not multiplied: zero times NaN would be NaN.
            return jnp.where(weight == 0, jnp.zeros_like(total), total)

        total = jax.tree.map(counted, widen(self.total))
        return dataclasses.replace(self, total=total, weight=weight)

    def neutral(self) -> Self:
        return jax.tree.map(jnp.zeros_like, self)

    def merge(self, later: Self) -> Self:
        """The mean over both, each by its weight."""
        one, other = self.settled(), later.settled()
        return dataclasses.replace(
            one,
            total=jax.tree.map(add, one.total, other.total),
            weight=add(one.weight, other.weight),
        )

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


@register
class Sum(Term):
    """A sum over all micro-batches: added up, not averaged.

    As a loss, for one that already divides by a count known for the whole batch. In
    aux, for counts: integers stay integers.

    Attributes:
      x: in a loss a real floating scalar, in aux numbers of any shape, or a pytree.

    Examples:
      >>> print(optax_accum.Sum(3).merge(optax_accum.Sum(4)).value)
      7
    """

    x: Any

    @property
    def value(self) -> Any:
        return self.settled().x

    def settled(self) -> Self:
        return dataclasses.replace(self, x=jax.tree.map(_summand, self.x))

    def neutral(self) -> Self:
        return jax.tree.map(jnp.zeros_like, self)

    def merge(self, later: Self) -> Self:
        """Both, added."""
        return jax.tree.map(add, self.settled(), later.settled())

    def scaled(self, factor: ArrayLike) -> Self:
        return dataclasses.replace(self, x=_scaled(self.x, factor))

    def check(self, label: str) -> None:
        check_leaves(label, self, self.x, "numbers")


@register
class RowMean(Sum):
    """A mean over rows, as a plain scalar is one: its denominator is known beforehand.

    Attributes:
      x: the scalar times `share`, the rows of this micro-batch over those of one of the
        common size.
      shares: the sum of `share` over all micro-batches.
    """

    shares: float = dataclasses.field(default=1, metadata={"static": True})

    @property
    def value(self) -> Any:
        return divide(self.x, self.shares)


def row_mean(x: ArrayLike, share: float, shares: float) -> RowMean:
    """`x` as a `RowMean`."""
    return RowMean(scale(x, share, sum_dtype(jnp.result_type(x))), shares)


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

    def map(self, fun: Callable[..., Any], *rest: "Terms") -> Self:
        """With `fun` of every term, and of those of others at its place."""
        terms = zip(self.terms, *(other.terms for other in rest), strict=True)
        return dataclasses.replace(self, terms=tuple(fun(*each) for each in terms))

    def settled(self) -> Self:
        return self.map(lambda term: term.settled())

    def neutral(self) -> Self:
        return self.map(lambda term: term.neutral())

    def merge(self, later: Self) -> Self:
        """Both, term by term."""
        return self.map(lambda one, other: one.merge(other), later)

    def scaled(self, factor: ArrayLike) -> Self:
        def scaled(term):
            is_term = isinstance(term, Term)
            return term.scaled(factor) if is_term else _scaled(term, factor)

        return self.map(scaled)

    def check(self, label: str) -> None:
        for term in self.terms:
            if isinstance(term, Term):
                term.check(label)


def terms_of(loss: Any) -> tuple[Any, ...]:
    """The terms of a loss: each a `Mean`, a `Sum`, or a scalar."""
    return loss.terms if isinstance(loss, Terms) else (loss,)


def mean(
    x: ArrayLike, where: ArrayLike | None = None, weights: ArrayLike | None = None
) -> Mean:
    r"""The mean over all entries of `x` in all micro-batches together.

    Write it where ``jnp.mean(x, where=mask)`` stood. That is a mean over the entries of
    one micro-batch, and the mean of such means is another one than that over all
    entries, unless every micro-batch has as many. This is :math:`\sum w x / \sum w`
    over all of them.

    Args:
      x: numbers of any shape; integers and booleans count as floats.
      where: which entries count. Booleans, broadcast to the shape of `x`.
      weights: what each entry counts for, real numbers >= 0 (under ``jit`` a negative
        one cannot be refused): a scalar, or as many axes as `x`, each of the same size
        or of size 1. They are data: not differentiated.

    Returns:
      A `Mean` of scalars: in float32, or float64 or complex where `x` is. Entries that
      do not count add exactly nothing, even where they are NaN. If none counts, its
      value is 0.

    Raises:
      TypeError: `x` or `weights` are no numbers, or `where` no booleans.
      ValueError: `where` or `weights` do not fit the shape of `x`.

    Examples:
      >>> losses = jnp.array([[3.0, 7.0], [1.0, 1.0]])
      >>> loss = optax_accum.mean(losses, where=losses < 5)
      >>> print(loss.total, loss.weight, loss.value)
      5.0 3.0 1.6666666

    References:
      Hugging Face, `Fixing Gradient Accumulation
      <https://huggingface.co/blog/gradient_accumulation>`_, 2024.
    """
    if not is_numeric(x):
        raise TypeError(f"`mean(x)` must be given numbers, got {kind_of(x)}.")
    wide = jnp.asarray(widen(x))
    if where is None and weights is None:
        count = jnp.full((), wide.size, weight_dtype(wide))
        return Mean(jnp.sum(wide), count, wide.size)
    counts = jax.lax.stop_gradient(_entry_weights(wide, where, weights))
    # Selected, not multiplied alone: zero times NaN would be NaN.
    counted = jnp.where(counts != 0, wide, jnp.zeros_like(wide))
    total = jnp.sum(counted * counts.astype(wide.dtype))
    return Mean(total, jnp.sum(counts), wide.size)


def _entry_weights(x: jax.Array, where: Any, weights: Any) -> jax.Array:
    """What each entry of `x` counts for, in its shape."""
    counts = jnp.ones_like(x, weight_dtype(x))
    if weights is not None:
        _check_weights(x, weights)
        counts = jnp.broadcast_to(jnp.asarray(weights, counts.dtype), x.shape)
    if where is not None:
        _check_where(x, where)
        where = jnp.broadcast_to(jnp.asarray(where), x.shape)
        counts = jnp.where(where, counts, jnp.zeros_like(counts))
    return counts


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
        f"a `{type(term).__name__}` must be multiplied by a real scalar, got "
        f"{_kind(factor)}; what is not linear in it takes its `.value`, which is that "
        "of one micro-batch."
    )


def _check_summand(term: Term, other: Any) -> Any:
    if isinstance(other, Term) or _is_real_scalar(other):
        return other
    raise TypeError(
        f"to a `{type(term).__name__}` must be added a `Mean`, a `Sum` or a real "
        f"scalar, got {_kind(other)}; add its mean."
    )


def _check_where(x: jax.Array, where: Any) -> None:
    if not is_numeric(where) or jnp.result_type(where) != jnp.bool_:
        raise TypeError(
            f"`mean(where=...)` must be booleans, got {kind_of(where)}; write "
            "`mask != 0`, or say `weights=`."
        )
    try:
        fits = jnp.broadcast_shapes(jnp.shape(where), x.shape) == x.shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"`mean(where=...)` must broadcast to the shape of `x`, {x.shape}, got "
            f"{jnp.shape(where)}; give the mask an axis, as in `mask[:, None]`."
        )


def _check_weights(x: jax.Array, weights: Any) -> None:
    if not is_real(weights):
        raise TypeError(
            f"`mean(weights=...)` must be real numbers, got {kind_of(weights)}."
        )
    shape = jnp.shape(weights)
    sizes = zip(shape, x.shape, strict=False)
    if shape and (len(shape) != x.ndim or any(n not in (1, m) for n, m in sizes)):
        raise ValueError(
            f"`mean(weights=...)` must have the axes of `x`, {x.shape}, each of the "
            f"same size or of size 1, got {shape}; write `weights[:, None]` for a "
            "weight of each row."
        )
