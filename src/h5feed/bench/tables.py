"""Tables for a terminal and for a page."""

from collections.abc import Collection, Sequence

__all__ = ["markdown_table", "text_table"]


def text_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]
) -> list[str]:
    """Return lines with aligned columns: those in `left` to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) if k in left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    return [line(heads), "  ".join("─" * width for width in widths), *map(line, rows)]


def markdown_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]
) -> list[str]:
    """Return a Markdown table's lines."""
    align = ["---" if k in left else "---:" for k in range(len(heads))]
    return ["| " + " | ".join(cells) + " |" for cells in (heads, align, *rows)]
