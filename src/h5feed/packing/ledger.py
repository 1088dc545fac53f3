"""The coordinator's book: where each picture goes, what became of it, in source order."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from h5feed.errors import PackError
from h5feed.packing.encode import Job, Record, Skip, row_type
from h5feed.printable import printable

__all__ = ["Ledger"]


class Ledger:
    """Hands out positions in source order, so that a skipped picture leaves no hole.

    Records must come in order of `start`. Kept per picture: one row of `row_type`.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.total = len(job.source)
        self.stop = 0
        """Everything before this picture has its place."""
        self.count = 0
        self.sizes = [0] * len(job.specs)
        """Bytes of payload so far, per field."""
        self.source_bytes = 0
        self.skips: list[Skip] = []
        self.say: Callable[[str], None] = lambda text: None
        """Is told of each picture that is skipped."""
        self._rows = np.empty(self.total, row_type(job.specs))
        fail = job.options.on_error == "fail"
        self._limit = 0 if fail else job.options.skip_limit(self.total)

    @property
    def skips_left(self) -> int:
        """How many more pictures may be skipped before the run has to stop."""
        return self._limit - len(self.skips)

    @property
    def rows(self) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
        """The rows of all packed pictures."""
        return self._rows[: self.count]

    def accept(self, record: Record) -> tuple[int, ...]:
        """Book the next block; return where its payloads begin, one position per field."""
        assert record.start == self.stop, f"{record.start=} after {self.stop=}"
        self._check_skips(record.skips)
        places = tuple(self.sizes)
        self._rows[self.count : self.count + len(record.rows)] = record.rows
        self.count += len(record.rows)
        self.sizes = [a + b for a, b in zip(self.sizes, record.sizes, strict=True)]
        self.source_bytes += record.source_bytes
        self.skips += record.skips
        self.stop = record.stop
        return places

    def skipped_by_reason(self) -> dict[str, int]:
        """Return how many pictures each reason cost, the commonest first."""
        return dict(Counter(skip.reason for skip in self.skips).most_common())

    def _check_skips(self, new: Sequence[Skip]) -> None:
        if new and self.job.options.on_error == "fail":
            raise PackError(f"{self._name(new[0])} cannot be packed: {new[0]}")
        last = next(iter(new[self.skips_left :]), None)
        for skip in new[: self.skips_left + 1]:
            self.say(f"skipped {self._name(skip)}: {skip}")
        if last is None:
            return
        raise PackError(
            f"more than max_skipped={self._limit} pictures cannot be packed; the last is "
            f"{self._name(last)}: {last}"
        )

    def _name(self, skip: Skip) -> str:
        return printable(self.job.name(skip.item))
