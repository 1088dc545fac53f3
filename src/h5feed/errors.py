"""The errors h5feed raises. Their text names argument, value, what is wrong and what to do."""

__all__ = ["DamagedItemError", "H5FeedError", "H5FormatError", "PackError", "UsageError"]


class H5FeedError(Exception):
    """Base of every error that h5feed raises by its own decision."""


class H5FormatError(H5FeedError, ValueError):
    """A file is not a sound h5feed file; raised at opening, before a pixel is read."""


class DamagedItemError(H5FeedError):
    """One item of a file cannot be decoded or augmented; the text names file, key and index."""


class PackError(H5FeedError):
    """Packing could not finish; the text says what was left to resume from."""


class UsageError(H5FeedError, ValueError):
    """An argument is wrong; commands exit with status 2."""
