"""Numbers of things, as people say them."""

from collections.abc import Sequence

from h5feed.printable import printable

__all__ = ["counted", "counted_labels"]

_LISTED = 20


def counted(number: int, one: str, many: str = "") -> str:
    """Return "1 image", "2,000 images"; `many` where it is not `one` and an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def counted_labels(classes: int, targets: Sequence[str]) -> str:
    """Say what is to be learned: "2 classes", "2 targets (age, height)", "no classes"."""
    if not targets:
        return counted(classes, "class", "classes") if classes else "no classes"
    names = [printable(name) for name in targets[:_LISTED]] + ["…"] * (len(targets) > _LISTED)
    return f"{counted(len(targets), 'target')} ({', '.join(names)})"
