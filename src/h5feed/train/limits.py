"""What an option's value may be, and one sentence where it is something else."""

from h5feed.errors import UsageError

__all__ = ["above_zero", "at_least", "below_one", "flag"]


def flag(name: str) -> str:
    """Return the option that sets the field `name`."""
    return "--" + name.replace("_", "-")


def at_least(options: object, least: float, *names: str) -> None:
    """Raise UsageError unless each of these fields is `least` or more; NaN is not."""
    for name in names:
        value = getattr(options, name)
        if not value >= least:
            raise UsageError(f"{flag(name)} {value} is too small: it must be at least {least:g}")


def above_zero(options: object, *names: str) -> None:
    """Raise UsageError unless each of these fields is above 0."""
    for name in names:
        value = getattr(options, name)
        if not value > 0:
            raise UsageError(f"{flag(name)} {value} is too small: it must be above 0")


def below_one(options: object, *names: str) -> None:
    """Raise UsageError unless each of these fields is a share: 0 or more, and less than 1."""
    for name in names:
        value = getattr(options, name)
        if not 0 <= value < 1:
            raise UsageError(f"{flag(name)} {value} is out of range: 0 turns it off, 1 is too much")
