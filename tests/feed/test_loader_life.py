"""How H5Loader ends: at break, errors, signals, exit; and that nothing is left behind."""

import errno
import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import LifoQueue

import cv2
import numpy as np
import psutil
import pytest
import torch

from h5feed import DamagedItemError, H5Dataset, H5Loader, UsageError, augment
from h5feed.feed.rows import Augmented
from h5feed.jpeg import encode_jpeg, read_header
from h5feed.store.read import FileReader
from images import jpeg_bytes, smooth
from loaders import KINDS, by_index, loader_threads, wait_until, write_kind
from packed import image_spec, write_packed, write_sparse

CROP = (augment.RandomResizedCrop(16), augment.RandomHorizontalFlip())


@pytest.fixture
def ds(tmp_path):
    return H5Dataset(write_kind(tmp_path / "a.h5", "raw", count=60))


@pytest.fixture(autouse=True)
def no_thread_left():
    before = loader_threads()
    yield
    # Again and again: a job under way may hold what makes a cycle garbage once it is done.
    assert wait_until(lambda: gc.collect() >= 0 and loader_threads() <= before)


def test_break_leaves_a_loader_that_can_be_used(ds):
    with H5Loader(ds, 4, shuffle=True, augment=CROP, num_workers=3) as loader:
        for _ in range(50):
            for _ in loader:
                break
        assert sum(1 for _ in loader) == 15
        assert loader.stats()["slots"] <= 3 * (loader.prefetch + 2)


def test_an_error_in_the_loop_is_the_callers(ds):
    loader = H5Loader(ds, 4, shuffle=True, augment=CROP, num_workers=3)

    def loop():
        for _ in loader:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        loop()
    assert sum(len(images) for images, _ in loader) == 60


def test_closing_a_generator_that_wraps_a_pass(ds):
    def wrapped(loader):
        yield from loader

    with H5Loader(ds, 4, shuffle=True, augment=CROP) as loader:
        generator = wrapped(loader)
        next(generator)
        generator.close()
        assert sum(1 for _ in loader) == 15


def test_two_passes_at_once(ds):
    with H5Loader(ds, 4, shuffle=True, augment=CROP, with_index=True) as loader:
        one, two = iter(loader), iter(loader)
        for (a, _, i), (b, _, j) in zip(one, two, strict=True):
            assert torch.equal(i, j)
            assert torch.equal(a, b)
            assert a.data_ptr() != b.data_ptr()


def test_threads_that_share_a_pass_share_its_batches(ds):
    with H5Loader(ds, 1, shuffle=True, augment=CROP, with_index=True, prefetch=4) as loader:
        for _ in range(10):
            passed = iter(loader)
            with ThreadPoolExecutor(4) as threads:
                shares = threads.map(
                    lambda _, passed=passed: [indices.item() for *_, indices in passed], range(4)
                )
            assert sorted(itertools.chain.from_iterable(shares)) == list(range(60))
            assert list(passed) == []


def test_close_during_a_pass_and_again(ds):
    loader = H5Loader(ds, 4, shuffle=True, augment=CROP)
    passed = iter(loader)
    next(passed)
    loader.close()
    loader.close()
    assert sum(1 for _ in loader) == 15


def test_a_closed_pass_is_over(ds):
    for _ in range(20):
        loader = H5Loader(ds, 4, shuffle=True, augment=CROP, prefetch=4)
        passed = iter(loader)
        next(passed)
        loader.close()
        assert list(passed) == []


def test_close_wakes_a_loop_that_waits(ds, monkeypatch):
    fill, going = Augmented.fill, threading.Event()

    def slow(*args):
        going.set()
        time.sleep(0.1)
        fill(*args)

    monkeypatch.setattr(Augmented, "fill", slow)
    loader = H5Loader(ds, 4, shuffle=True, augment=CROP, num_workers=2)
    looping = threading.Thread(target=lambda: [None for _ in loader], daemon=True)
    looping.start()
    going.wait()
    loader.close()
    looping.join(20)
    assert not looping.is_alive()


def test_an_error_in_a_thread_reaches_the_caller(ds, monkeypatch):
    def fails(self, indices, params, k0, slots):
        if 17 in indices:
            raise MemoryError("no more")

    monkeypatch.setattr(Augmented, "fill", fails)
    with H5Loader(ds, 4, augment=CROP, num_workers=2, shuffle=False) as loader:
        passed = iter(loader)
        assert len([next(passed) for _ in range(4)]) == 4, "batches before it are delivered"
        with pytest.raises(MemoryError, match="no more"):
            next(passed)
        assert list(passed) == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes from 3.11 on")
@pytest.mark.parametrize("masks", [False, True])
def test_an_error_of_target_transform_names_the_item(tmp_path, masks):
    def fails(target):
        if target != 1 if not masks else (target == 1).all():
            raise ValueError("mine")

    kinds = [np.full((32, 32, 1), k, np.uint8) for k in range(6)]
    images = [smooth(32, 32, k) for k in range(6)]
    options = {"masks": kinds} if masks else {}
    path = write_packed(tmp_path / "a.h5", images, labels=np.array([1, 0] * 3), **options)
    loader = H5Loader(H5Dataset(path, target_transform=fails), 3, shuffle=False)
    with pytest.raises(ValueError, match="mine") as caught:
        list(loader)
    assert caught.value.__notes__ == [
        f"target_transform was at the target of {path}: item 1 of /images (key '1/ü1.png')"
    ]


def test_an_error_that_is_let_go_takes_the_loader_with_it(tmp_path):
    """Without waiting for the garbage collector: the threads would wait as long."""

    def fails(target):
        raise ValueError("mine")

    images = [smooth(32, 32, k) for k in range(6)]
    path = write_packed(tmp_path / "a.h5", images, labels=np.zeros(6, np.int64))
    gc.collect()
    gc.disable()
    try:
        with suppress(ValueError):
            next(iter(H5Loader(H5Dataset(path, target_transform=fails), 6, shuffle=True)))
        assert wait_until(lambda: not loader_threads())
    finally:
        gc.enable()


def test_an_error_while_planning_reaches_the_caller(ds):
    ops = (augment.RandomCrop(40),)  # larger than the images
    with H5Loader(ds, 4, shuffle=True, augment=ops) as loader, pytest.raises(Exception, match="40"):
        next(iter(loader))


# --- damaged items ------------------------------------------------------------------------------


def write_damaged(path, encoding="jpeg", damaged=(3,), count=12):
    encode = jpeg_bytes if encoding == "original" else partial(encode_jpeg, quality=90)
    data = [encode(smooth(32, 32, seed)) for seed in range(count)]
    for k in damaged:
        data[k] = data[k][: len(data[k]) // 3]
    spec = image_spec(encoding, (0, 0) if encoding == "original" else (32, 32))
    shapes = np.full((count, 2), 32, np.int32)
    return write_packed(path, data, spec=spec, stored_shapes=shapes, source_shapes=shapes)


def test_a_damaged_item_names_file_key_and_index(tmp_path):
    path = write_damaged(tmp_path / "a.h5")
    loader = H5Loader(H5Dataset(path), 4, shuffle=True, augment=CROP)
    with pytest.raises(DamagedItemError) as caught:
        list(loader)
    text = str(caught.value)
    assert f"{path}: item 3 of /images (key '1/ü3.png') cannot be decoded: " in text
    assert 'check-h5 lists every damaged item, and on_error="skip"' in text


@pytest.mark.parametrize("encoding", ["jpeg", "original"])
@pytest.mark.parametrize("on", ["cpu", "device"])
def test_skip_puts_the_next_whole_sample_in_its_place(tmp_path, encoding, on):
    if encoding == "original" and on == "device":
        return
    options = {"augment": CROP, "shuffle": False, "with_index": True, "augment_on": on}
    whole = H5Dataset(write_damaged(tmp_path / "whole.h5", encoding, damaged=()))
    damaged = H5Dataset(write_damaged(tmp_path / "a.h5", encoding, damaged=(3, 5, 6)))
    with H5Loader(whole, 4, **options) as loader:
        expected = by_index(loader)
    with H5Loader(damaged, 4, on_error="skip", **options) as loader:
        batches = list(loader)
        assert loader.stats()["skipped"] == 3
    indices = [k for *_, found in batches for k in found.tolist()]
    assert indices == [0, 1, 2, 0, 4, 7, 7, 7, 8, 9, 10, 11]
    for images, labels, found in batches:
        for image, label, index in zip(images, labels, found.tolist(), strict=True):
            assert torch.equal(image, expected[index][0][0])
            assert label == expected[index][1]


def half_as_high(data):
    at = read_header(data).height_at
    return data[:at] + bytes([0, 16]) + data[at + 2 :]


def huge(data):
    at = read_header(data).height_at
    return data[:at] + bytes.fromhex("ffdcffdc") + data[at + 4 :]


@pytest.mark.parametrize("encoding", ["jpeg", "original"])
@pytest.mark.parametrize("change", [half_as_high, huge])
def test_skip_covers_headers_that_lie(tmp_path, encoding, change):
    data = [encode_jpeg(smooth(32, 32, seed), 90) for seed in range(8)]
    data[3] = change(data[3])
    spec = image_spec(encoding, (0, 0) if encoding == "original" else (32, 32))
    ds = H5Dataset(
        write_packed(tmp_path / "a.h5", data, spec=spec, stored_shapes=np.full((8, 2), 32, "i4"))
    )
    with H5Loader(ds, 4, augment=CROP, shuffle=False, on_error="skip", with_index=True) as loader:
        assert [i for *_, found in loader for i in found.tolist()] == [0, 1, 2, 0, 4, 5, 6, 7]
    text = r"item 3 .* its header says .* says 32x32"
    with (
        H5Loader(ds, 4, shuffle=True, augment=CROP) as loader,
        pytest.raises(DamagedItemError, match=text),
    ):
        list(loader)


@pytest.mark.parametrize("kind", ["raw", "yuv420", "jpeg", "keep", "two files", "as stored"])
def test_what_the_disk_does_not_give_is_named_or_skipped(tmp_path, monkeypatch, kind):
    """Of a file that was cut after it was opened: a mapping would end this process."""
    path = write_kind(tmp_path / "a.h5", kind if kind in KINDS else "raw")
    ds = H5Dataset([path, path] if kind == "two files" else path)
    ops = () if kind == "as stored" else CROP
    with H5Loader(ds, 6, augment=ops, shuffle=False, indices=range(12)) as loader:
        expected = [images.clone() for images, _ in loader]
    images = FileReader(path).index.extents["images"]
    start, length = images.item_range(9)
    end = start + images.nbytes - sum(images.item_range(k)[1] for k in range(9))
    pread = os.pread
    if kind == "jpeg":  # whose segments lie behind all images, and would be cut off
        monkeypatch.setattr(
            os, "pread", lambda fd, n, at: b"" if at + n > start and at < end else pread(fd, n, at)
        )
    else:
        os.truncate(path, start + length // 2)
    options = {"augment": ops, "shuffle": False, "io": "read", "indices": range(12)}
    text = (
        rf"^{path}: item 9 of /images \(key '1/ü9.png'\) cannot be read: the file ends before it "
        rf'\(errno {errno.ENODATA}\); check-h5 lists .*, and on_error="skip" goes on without them$'
    )
    with H5Loader(ds, 6, **options) as loader:
        passed = iter(loader)
        assert torch.equal(next(passed)[0], expected[0])
        with pytest.raises(DamagedItemError, match=text):
            next(passed)
    with H5Loader(ds, 6, on_error="skip", with_index=True, **options) as loader:
        first, second = ((i.clone(), found.tolist()) for i, _, found in loader)
    assert torch.equal(first[0], expected[0])
    assert second[1] == [6, 7, 8, 6, 6, 6]
    assert torch.equal(second[0][:3], expected[1][:3])
    none_whole = pytest.raises(DamagedItemError, match=r"item 10 .* cannot be read: .* no whole it")
    with H5Loader(ds, 2, on_error="skip", **options) as loader, none_whole:
        list(loader)


def test_io_is_map_or_read(ds):
    with pytest.raises(UsageError, match="io='mmap' is none of map, read"):
        H5Loader(ds, 4, shuffle=True, io="mmap")
    text = 'io="read" reads each batch, and residency="pinned" copies the mapped files beforehand'
    with pytest.raises(UsageError, match=text):
        H5Loader(ds, 4, shuffle=True, io="read", residency="pinned")


@pytest.mark.parametrize("encoding", ["raw", "original"])
def test_skip_covers_what_an_augmentation_cannot_take(tmp_path, encoding, monkeypatch):
    resize = cv2.resize

    def cv2_refuses(src, size, *args):
        return resize(src, (0, 0) if src.shape[0] == 1 else size, *args)

    monkeypatch.setattr(cv2, "resize", cv2_refuses)
    shapes = np.int32([[8, 8]] * 8)
    shapes[3] = 1, 1
    stored = [np.zeros((*shape, 3), np.uint8) for shape in shapes.tolist()]
    if encoding == "original":
        stored = [jpeg_bytes(image) for image in stored]
    spec = image_spec(encoding, (0, 0) if encoding == "original" else (8, 8), "keep")
    ds = H5Dataset(write_packed(tmp_path / "a.h5", stored, spec=spec, stored_shapes=shapes))
    options = {"augment": [augment.Resize((8, 8))], "shuffle": False}
    with H5Loader(ds, 4, on_error="skip", with_index=True, **options) as loader:
        assert [i for *_, found in loader for i in found.tolist()] == [0, 1, 2, 0, 4, 5, 6, 7]
        assert loader.stats()["skipped"] == 1
    with (
        H5Loader(ds, 4, **options) as loader,
        pytest.raises(DamagedItemError) as caught,
    ):
        list(loader)
    text = str(caught.value)
    assert "a.h5: item 3 of /images (key '1/ü3.png') cannot be augmented: OpenCV" in text
    assert text.endswith(', and on_error="skip" goes on without them')
    assert "check-h5" not in text
    alone = H5Loader(ds, 1, indices=[3], on_error="skip", **options)
    with alone, pytest.raises(DamagedItemError, match="no whole item in this batch of 1 to stand"):
        list(alone)


def test_of_several_damaged_items_the_first_is_named(tmp_path, monkeypatch):
    """Also when the chunk with the last one is made first."""
    monkeypatch.setattr("h5feed.feed.workers.SimpleQueue", LifoQueue)
    ds = H5Dataset(write_damaged(tmp_path / "a.h5", damaged=[1, 6]))
    damaged_first = pytest.raises(DamagedItemError, match="item 1 ")
    with H5Loader(ds, 8, augment=CROP, num_workers=1) as loader, damaged_first:
        next(iter(loader))


def test_skip_needs_one_whole_sample(tmp_path):
    ds = H5Dataset(write_damaged(tmp_path / "a.h5", damaged=range(4, 8)))
    with H5Loader(ds, 4, augment=CROP, shuffle=False, on_error="skip") as loader:
        passed = iter(loader)
        next(passed)
        with pytest.raises(DamagedItemError) as caught:
            next(passed)
    text = str(caught.value)
    assert "item 4 of /images (key '0/ü4.png') cannot be decoded: " in text
    assert text.endswith(
        'check-h5 lists every damaged item; on_error="skip" found no whole item in this batch of 4 '
        "to stand in: give a larger batch_size, or indices without the damaged items"
    )


# --- leaks --------------------------------------------------------------------------------------


def anonymous_bytes():
    """Bytes of this process that are no file's pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return int(dict(line.split(":") for line in lines)["Anonymous"].split()[0]) * 1024


def test_a_thousand_epochs_leave_nothing(tmp_path):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", "raw", count=8))
    with H5Loader(ds, 3, shuffle=True, augment=CROP, num_workers=2) as loader:
        for _ in range(50):
            for _ in loader:
                pass
        gc.collect()
        objects, memory = len(gc.get_objects()), anonymous_bytes()
        threads, files = len(loader_threads()), psutil.Process().num_fds()
        slots = loader.stats()["slots"]
        for _ in range(1000):
            for _ in loader:
                pass
        gc.collect()
        assert len(gc.get_objects()) < objects + 200
        assert anonymous_bytes() < memory + (4 << 20)
        assert len(loader_threads()) == threads
        assert psutil.Process().num_fds() == files
        assert loader.stats()["slots"] <= slots + 2


def test_loaders_that_come_and_go_leave_nothing(ds):
    def one():
        for _ in H5Loader(ds, 4, shuffle=True, augment=CROP, num_workers=2):
            break

    for _ in range(5):
        one()
    wait_until(lambda: not loader_threads())
    memory = anonymous_bytes()
    for _ in range(100):
        one()
    wait_until(lambda: not loader_threads())
    assert anonymous_bytes() < memory + (8 << 20)


# --- processes ----------------------------------------------------------------------------------

SCRIPT = """
    import signal, sys, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    from h5feed import H5Dataset, H5Loader
    from h5feed.augment import RandomHorizontalFlip, RandomResizedCrop
    loader = H5Loader(H5Dataset(sys.argv[1]), 4, shuffle=True, num_workers=4, prefetch=4,
                      augment=(RandomResizedCrop(400), RandomHorizontalFlip()))
"""


@contextmanager
def start(ds, body):
    """Run SCRIPT and `body` in a process that does not outlive the test."""
    code = textwrap.dedent(SCRIPT) + textwrap.dedent(body)
    process = subprocess.Popen(
        [sys.executable, "-c", code, ds.files.paths[0]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_no_python_runs_when_a_pass_or_a_batch_ends(ds):
    """A Ctrl-C that comes in a Python function which runs because an object ends is lost."""
    loader = H5Loader(ds, 4, shuffle=True, augment=CROP, num_workers=2)
    passed = iter(loader)
    batch = next(passed)
    called = []
    sys.setprofile(lambda frame, event, _: called.append((event, frame.f_code.co_name)))
    del batch, passed
    sys.setprofile(None)
    assert [name for event, name in called if event == "call"] == []


def test_a_pass_let_go_makes_no_more_batches(ds, monkeypatch):
    fill, filled = Augmented.fill, []

    def counted(self, indices, *args):
        filled.append(len(indices))
        time.sleep(0.02)
        fill(self, indices, *args)

    monkeypatch.setattr(Augmented, "fill", counted)
    loader = H5Loader(ds, 4, shuffle=True, augment=CROP, num_workers=1, prefetch=8)
    passed = iter(loader)
    next(passed)
    del passed
    loader.close()  # waits for what is queued
    assert sum(filled) < 6 * 4


@pytest.mark.parametrize(
    "body",
    [
        "passed = iter(loader); next(passed)",
        "for batch in loader: pass",
        "for batch in loader: sys.exit(0)",
        "import threading\nthreading.Thread(target=lambda: [None for _ in loader]).start()",
    ],
)
def test_the_interpreter_exits(ds, body):
    with start(ds, body) as process:
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


def test_ctrl_c_ends_a_loop_at_once(ds):
    body = "print('go', flush=True)\nwhile True:\n  for batch in loader: pass\n"
    with start(ds, body) as process:
        assert process.stdout.readline() == "go\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode == -signal.SIGINT


def test_ctrl_c_while_waiting_keeps_the_loader_whole(ds):
    body = """
    import os, signal, threading
    from h5feed.feed.rows import Augmented
    fill = Augmented.fill
    Augmented.fill = lambda *args: (time.sleep(0.3), fill(*args))
    passed, seen = iter(loader), 0
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        next(passed)
    except KeyboardInterrupt:
        Augmented.fill = fill
        print(sum(len(images) for images, _ in passed))
    """
    with start(ds, body) as process:
        out, errors = process.communicate(timeout=60)
    assert (out, errors) == ("60\n", "")


def test_a_forked_child_can_use_the_loader(ds):
    with H5Loader(ds, 4, shuffle=True, augment=CROP) as loader:
        next(iter(loader))
        pid = os.fork()
        if pid == 0:
            count = sum(len(images) for images, _ in loader)
            os._exit(0 if count == 60 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_pass_inherited_through_fork_is_an_error(ds):
    with H5Loader(ds, 4, shuffle=True, augment=CROP) as loader:
        passed = iter(loader)
        next(passed)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)  # rather than to wait for ever
            try:
                next(passed)
            except UsageError as ex:
                os.write(write, str(ex).encode())
            finally:
                os._exit(0)
        os.close(write)
        with open(read) as told:
            assert told.read() == (
                f"this pass was begun by process {os.getpid()}, whose threads make its batches, "
                f"and process {pid} was forked from it without them: begin a pass of its own "
                "there, with iter(loader)"
            )
        os.waitpid(pid, 0)
        assert sum(1 for _ in passed) == 14


def test_memory_does_not_grow_with_the_file_or_the_epochs(tmp_path):
    path = write_sparse(tmp_path / "a.h5", 400_000, 256)
    if path.stat().st_blocks * 512 > 1 << 30:
        pytest.skip("this file system has no holes")
    assert path.stat().st_size > 70e9
    before = anonymous_bytes()
    with H5Loader(H5Dataset(path), 64, shuffle=True, augment=CROP, num_workers=2) as loader:
        for _ in range(50):
            for images, _ in itertools.islice(loader, 4):
                assert not images.any()
        most = anonymous_bytes() - before - loader.stats()["slot_bytes"]
    assert most < 300e6
