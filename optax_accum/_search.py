"""The first of several candidates that needs no more than a limit."""

from collections.abc import Callable, Sequence

# (what the candidate of an index needs, how many there are, the limit) -> an index
Search = Callable[[Callable[[int], float], int, float], int | None]

# A rise of less is no reason to compile all candidates: programs that do the same
# differ a little, and what would be found needs hardly less than what was.
_NOISE = 1.01


def bisect(need: Callable[[int], float], count: int, limit: float) -> int | None:
    """The first index whose need is within the limit, where needs fall.

    The first is tried by itself: it may need less than its neighbour, as a whole batch
    does, of which no gradients are summed. The index that is returned has been tried,
    and so has the one before it. Where none fits the second is tried too, and all are
    if the needs that were seen do not fall.
    """
    if need(0) <= limit:
        return 0
    seen = []
    too_large, small_enough = 0, count
    while small_enough - too_large > 1:
        middle = (too_large + small_enough) // 2
        seen.append(need(middle))
        if seen[-1] <= limit:
            small_enough = middle
        else:
            too_large = middle
    if small_enough < count:
        return small_enough
    if count == 1 or _falls([need(1), *seen]):
        return None
    return try_all(need, count, limit)


def try_all(need: Callable[[int], float], count: int, limit: float) -> int | None:
    """The same, of any needs; all are tried."""
    needs = [need(i) for i in range(count)]
    return next((i for i, each in enumerate(needs) if each <= limit), None)


def most_trials(search: Search, count: int) -> int:
    """How many of `count` candidates a search tries at most, where needs fall."""
    if search is try_all:
        return count
    return 2 + (count - 1).bit_length()  # 2 + ceil(log2(count))


def _falls(needs: Sequence[float]) -> bool:
    return all(needs[-1] <= _NOISE * each for each in needs)
