import os
import threading

import numpy as np
import pytest

from h5feed import H5Dataset, H5Loader
from h5feed.feed.files import PackedFiles
from h5feed.feed.order import FullShuffle
from h5feed.feed.readahead import ReadAhead
from h5feed.feed.sampling import BatchPlan, Steps
from packed import random_images, write_packed

COUNT, BATCH = 200, 5
ITEM = 32 * 32 * 3


class Spy(PackedFiles):
    """Packed files that note what is announced, and say what is in memory."""

    cached = False

    def announce(self, indices, fields=None):
        self.announced.append(np.asarray(indices).tolist())
        return super().announce(indices, fields)

    def in_memory(self, indices, field="images"):
        return self.cached


@pytest.fixture
def files(tmp_path):
    spy = Spy([write_packed(tmp_path / "a.h5", random_images(COUNT))])
    spy.announced = []
    return spy


def make(files, lookahead, **options):
    steps = Steps(samples=COUNT, batch_size=BATCH, **options)
    plan = BatchPlan(FullShuffle(COUNT, 1, 0), steps, None, seed=1, epoch=0)
    return ReadAhead(files, plan, lookahead=lookahead)


def test_batches_are_announced_once_in_order_and_lookahead_bytes_ahead(files):
    ahead = make(files, 3 * BATCH * ITEM)
    expected = FullShuffle(COUNT, 1, 0)(np.arange(COUNT)).reshape(-1, BATCH)
    total = 0
    for step in range(COUNT // BATCH):
        samples = ahead.samples(step)
        total += samples.announced
        assert samples.indices.tolist() == expected[step].tolist()
        assert files.announced == expected[: step + 4].tolist()
    assert total >= COUNT * ITEM, "gaps of less than a page are read along"


def test_a_lookahead_of_part_of_a_batch_is_one_batch(files):
    make(files, 1).samples(0)
    assert len(files.announced) == 2


def test_small_items_are_announced_by_number(files, monkeypatch):
    monkeypatch.setattr("h5feed.feed.readahead._UNDER_WAY", 4 * BATCH - 1)
    make(files, 10**9).samples(0)
    assert len(files.announced) == 5


def test_nothing_is_announced_without_lookahead(files):
    ahead = make(files, 0)
    assert all(ahead.samples(step).announced == 0 for step in range(40))
    assert files.announced == []


def test_what_is_in_memory_is_not_announced(files, monkeypatch):
    monkeypatch.setattr("h5feed.feed.readahead._AT_ONCE", BATCH)  # decide on each batch alone
    files.cached = True
    ahead = make(files, 1)
    for step in range(20):
        ahead.samples(step)
    assert files.announced == []
    files.cached = False
    ahead.samples(20)
    assert len(files.announced) == 1
    files.cached = True
    for step in range(21, 40):
        ahead.samples(step)
    assert len(files.announced) == 16, "it stays awake for some time"


def test_steps_may_be_asked_for_in_any_order_and_by_threads(files):
    expected = FullShuffle(COUNT, 1, 0)(np.arange(COUNT)).reshape(-1, BATCH)
    ahead, found = make(files, 4 * BATCH * ITEM), {}
    steps = list(np.random.default_rng(0).permutation(COUNT // BATCH))

    def ask():
        while steps:
            try:
                step = int(steps.pop())
            except IndexError:
                return
            found[step] = ahead.samples(step).indices

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(COUNT // BATCH))
    assert all((found[step] == expected[step]).all() for step in found)


def test_only_this_ranks_samples_are_announced(files):
    ahead = make(files, 10**9, rank=1, world_size=4)
    ahead.samples(0)
    mine = [
        sample
        for step in range(len(ahead.steps))
        for sample in FullShuffle(COUNT, 1, 0)(ahead.steps.positions(step)).tolist()
    ]
    assert [sample for batch in files.announced for sample in batch] == mine


def drop_from_memory(path):
    """Make a file cold, before anything maps it; skip where that cannot be done or told."""
    if not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("the system cannot tell what is in memory")
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.preadv(fd, [bytearray(1)], os.fstat(fd).st_size // 2, os.RWF_NOWAIT)
    except BlockingIOError:
        return
    except OSError:
        pass
    finally:
        os.close(fd)
    pytest.skip("this file system cannot tell, or keeps everything in memory")


def test_a_cold_file_is_announced_and_a_warm_one_is_not(tmp_path):
    path = write_packed(tmp_path / "a.h5", random_images(COUNT, (64, 64)))
    drop_from_memory(path)
    with H5Loader(H5Dataset(path), 8, shuffle=True) as loader:
        for _ in loader:
            pass
        cold = loader.stats()["announced_bytes"]
        for _ in loader:
            pass
        assert 0 < cold == loader.stats()["announced_bytes"]
