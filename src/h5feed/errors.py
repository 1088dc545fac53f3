"""The errors h5feed raises. Their text names argument, value, what is wrong and what to do."""

__all__ = ["DamagedItemError", "H5FeedError", "H5FormatError", "PackError", "UsageError"]


class H5FeedError(Exception):
    """Base of every error that h5feed raises by its own decision.

    `details` are lines that belong below the sentence: commands to type, or what failed where.

    >>> from h5feed import H5FeedError
    >>> print(H5FeedError("SRC holds splits: pack each", details="  pack-h5 a/train train.h5"))
    SRC holds splits: pack each
      pack-h5 a/train train.h5
    """

    def __init__(self, *args: object, details: str = "") -> None:
        super().__init__(*args)
        self.details = details

    @property
    def sentence(self) -> str:
        """The text without its details."""
        return super().__str__()

    def __str__(self) -> str:
        return f"{self.sentence}\n{self.details}" if self.details else self.sentence


class H5FormatError(H5FeedError, ValueError):
    """A file is not a sound h5feed file; raised at opening, before a pixel is read."""


class DamagedItemError(H5FeedError):
    """One item of a file cannot be decoded or augmented; the text names file, key and index."""


class PackError(H5FeedError):
    """Packing could not finish; the text says what was left to resume from."""


class UsageError(H5FeedError, ValueError):
    """An argument is wrong; commands exit with status 2."""
