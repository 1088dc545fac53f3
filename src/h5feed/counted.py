"""Numbers of things, as people say them."""

__all__ = ["counted"]


def counted(number: int, one: str, many: str = "") -> str:
    """Return "1 picture", "2,000 pictures"; `many` where it is not `one` and an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
