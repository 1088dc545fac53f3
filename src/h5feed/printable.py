"""File names and class names as one line that a terminal can be trusted with."""

__all__ = ["printable"]


def printable(text: str) -> str:
    """Return `text` with line ends, control characters and undecodable bytes escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
