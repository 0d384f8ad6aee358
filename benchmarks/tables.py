"""Tables for readers of the README."""

from collections.abc import Iterable, Sequence


def render_rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, whose first column is words."""
    table = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in table)
