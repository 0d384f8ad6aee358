"""The first of several candidates that fits."""

from collections.abc import Callable

# (whether the candidate of an index fits, how many there are) -> the index, or None
Search = Callable[[Callable[[int], bool], int], int | None]


def bisect(fits: Callable[[int], bool], count: int) -> int | None:
    """The first index that `fits`, if after the second come only such.

    The first is tried by itself: it may fit where its neighbour does not, as a whole
    batch does, which needs no sum of gradients. The index that is returned has been
    tried, and so has the one before it.
    """
    if fits(0):
        return 0
    too_large, small_enough = 0, count
    while small_enough - too_large > 1:
        middle = (too_large + small_enough) // 2
        if fits(middle):
            small_enough = middle
        else:
            too_large = middle
    return small_enough if small_enough < count else None


def try_all(fits: Callable[[int], bool], count: int) -> int | None:
    """The first index that `fits`; all are tried."""
    fitting = [i for i in range(count) if fits(i)]
    return fitting[0] if fitting else None


def most_trials(search: Search, count: int) -> int:
    """How many of `count` candidates a search tries at most."""
    if search is try_all:
        return count
    return 1 + (count - 1).bit_length()  # 1 + ceil(log2(count))
