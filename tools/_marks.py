"""Text that a program keeps up to date in a page, between two marks."""

from pathlib import Path

__all__ = ["put_into"]


def put_into(page: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- name: begin -->` and `<!-- name: end -->` of `page`."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    whole = page.read_text()
    if whole.count(begin) != 1 or whole.count(end) != 1:
        raise SystemExit(f"{page} lacks the lines {begin} and {end}: add them where it belongs")
    head, _, rest = whole.partition(begin)
    tail = rest.partition(end)[2]
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}")
