"""Tables for a terminal and for a page."""

from collections.abc import Collection, Sequence

__all__ = ["markdown_table", "text_table"]


def text_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]
) -> list[str]:
    """Return lines with aligned columns: those in `left` to the left, numbers to the right.

    Heads of numbers stand in two lines where they are wider than their numbers.
    """
    columns = list(zip(*rows, strict=True)) or [()] * len(heads)
    needed = [max((len(cell) for cell in column), default=0) for column in columns]
    broken = [
        ("", head) if k in left or len(head) <= width else _in_two(head)
        for k, (head, width) in enumerate(zip(heads, needed, strict=True))
    ]
    widths = [max(width, *map(len, head)) for width, head in zip(needed, broken, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) if k in left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    above = [line(words) for words in zip(*broken, strict=True)]
    return [*filter(None, above), "  ".join("─" * width for width in widths), *map(line, rows)]


def _in_two(head: str) -> tuple[str, str]:
    """Break a head at the blank that makes the wider of its two lines the shortest."""
    words = head.split()
    breaks = [(" ".join(words[:k]), " ".join(words[k:])) for k in range(len(words))]
    return min(breaks, key=lambda two: max(map(len, two)))


def markdown_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]
) -> list[str]:
    """Return a Markdown table's lines."""
    align = ["---" if k in left else "---:" for k in range(len(heads))]
    return ["| " + " | ".join(cells) + " |" for cells in (heads, align, *rows)]
