"""Arguments that are whole numbers."""

from typing import Any

from h5feed.errors import UsageError

__all__ = ["check_whole"]


def check_whole(least: int | None = 1, /, **numbers: Any) -> None:
    """Refuse what is no int (True is none, 2.0 neither), or below `least`; None: any will do."""
    for name, value in numbers.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or (least is not None and value < least):
            limit = "" if least is None else f" of at least {least}"
            raise UsageError(f"{name}={value!r} must be a whole number{limit}")
