"""Workers that fail, and what is not the image's fault: named, kept, nothing left behind."""

import errno
import faulthandler
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import cv2
import pytest
import torch
from PIL import ImageFile

from h5feed.errors import PackError
from h5feed.packing import encode, journal, pack, sources, workers
from h5feed.packing.workers import pack_here
from packing.folders import names, sha256

SIZE = 32


def failing_with(code):
    def fail(*args):
        raise OSError(code, os.strerror(code))

    return fail


def test_memory_that_runs_out_names_the_file(folder, out, monkeypatch):
    def run_out(*args, **options):
        raise MemoryError

    monkeypatch.setattr(encode, "fit_image", run_out)
    with pytest.raises(PackError, match=r"out of memory at cats/000\.jpg: fewer --workers"):
        pack(folder, out, size=SIZE, num_workers=1)


def test_a_worker_that_dies_is_one_error_that_names_the_file(folder, out, monkeypatch):
    decode = encode.decode_rgb

    def die(data, **options):
        if data == (folder / "dogs" / "002.jpg").read_bytes():
            faulthandler.disable()  # pytest's; it would print a traceback
            os.kill(os.getpid(), signal.SIGSEGV)
        return decode(data, **options)

    monkeypatch.setattr(encode, "decode_rgb", die)
    with pytest.raises(PackError, match=r"a worker process died \(SIGSEGV\) at dogs/002\.jpg; "):
        pack(folder, out, size=SIZE, num_workers=2)
    assert not out.exists()


def test_a_worker_killed_for_memory_says_so(folder, out, monkeypatch):
    monkeypatch.setattr(encode, "decode_rgb", lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(PackError, match=r"SIGKILL, as when memory runs out\) at cats/000\.jpg"):
        pack(folder, out, size=SIZE, num_workers=1)


def test_a_full_disk_leaves_what_can_be_resumed(folder, out, monkeypatch):
    """The file-size limit gives EFBIG where a full disk gives ENOSPC, at the same call."""
    pack(folder, out, size=SIZE, num_workers=0)
    expected = sha256(out)
    monkeypatch.setattr(workers, "_MOST_IMAGES", 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(PackError) as caught:
            pack(folder, out, size=SIZE, num_workers=1, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value).startswith(f"cannot write {out}.partial: File too large; ")
    assert str(caught.value).endswith(
        f"of 24 images are kept in {out}.partial: the same command with --resume goes on"
    )
    assert sha256(out) == expected
    summary = pack(folder, out, size=SIZE, num_workers=2, overwrite=True, resume=True)
    assert 8 <= summary.resumed < 24
    assert sha256(out) == expected


def test_a_disk_that_is_full_when_it_is_synced(folder, out, monkeypatch):
    monkeypatch.setattr(journal, "sync_file", failing_with(errno.ENOSPC))
    with pytest.raises(PackError, match="No space left on device; nothing was kept"):
        pack(folder, out, size=SIZE, num_workers=1)
    assert names(out.parent) == []


@pytest.mark.parametrize(
    ("memory", "started"), [(None, 3), (10 << 30, 3), (600 << 20, 2), (1 << 20, 1)]
)
def test_workers_are_as_many_as_cores_and_memory_allow(folder, out, monkeypatch, memory, started):
    counts = []

    def in_processes(job, outputs, results, tick, count):
        counts.append(count)
        pack_here(job, outputs, results, tick)

    monkeypatch.setattr(workers, "available_cores", lambda: 3)
    monkeypatch.setattr(workers, "available_memory", lambda: memory)
    monkeypatch.setattr(workers, "pack_in_processes", in_processes)
    pack(folder, out, size=SIZE)
    pack(folder, out, size=SIZE, num_workers=5, overwrite=True)
    assert counts == [started, 5]


def test_a_system_that_cannot_write_at_a_position_is_refused_at_once(folder, out, monkeypatch):
    monkeypatch.delattr(os, "pwrite")
    with pytest.raises(PackError, match="packing needs Linux or macOS: this system cannot write"):
        pack(folder, out, size=SIZE)
    assert names(out.parent) == []


def test_workers_keep_no_pipe_of_their_siblings(folder, out, monkeypatch):
    """A worker that held another end of its own pipe would never see the coordinator go."""
    work = workers._serve_tasks

    def count_sockets(*args):
        handles = Path("/proc/self/fd")
        links = [os.readlink(path) for path in handles.iterdir() if path.is_symlink()]
        sockets = sum(link.startswith("socket:") for link in links)
        (folder.parent / f"sockets{os.getpid()}").write_text(str(sockets))
        work(*args)

    monkeypatch.setattr(workers, "_serve_tasks", count_sockets)
    before = sum(
        os.readlink(path).startswith("socket:")
        for path in Path("/proc/self/fd").iterdir()
        if path.is_symlink()
    )
    pack(folder, out, size=SIZE, num_workers=3)
    counts = {path.read_text() for path in folder.parent.glob("sockets*")}
    assert counts == {str(before + 1)}


def test_workers_have_one_thread_each_and_leave_ctrl_c_alone(folder, out, monkeypatch):
    work = workers._serve_tasks

    def look(*args):
        ignores = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        said = f"{torch.get_num_threads()} {ignores}"
        (folder.parent / f"seen{os.getpid()}").write_text(said)
        work(*args)

    monkeypatch.setattr(workers, "_serve_tasks", look)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        pack(folder, out, size=SIZE, num_workers=2)
        pack(folder, out, size=SIZE, num_workers=0, overwrite=True)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    seen = [path.read_text() for path in folder.parent.glob("seen*")]
    assert seen == ["1 True", "1 True"]


def test_no_process_is_left_behind(folder, out):
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before = children.read_text()
    pack(folder, out, size=SIZE, num_workers=3)
    assert children.read_text() == before


# --- what is not the image's fault


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        cv2.error("OpenCV: (-4:Insufficient memory) Failed to allocate 9 bytes"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
@pytest.mark.parametrize("at", [(encode, "fit_image"), (sources, "read_file")])
def test_memory_that_runs_out_ends_the_run_and_skips_nothing(folder, out, monkeypatch, error, at):
    done, whole = [], getattr(*at)

    def run_out(*args, **options):
        if len(done) == 8:
            raise error
        done.append(0)
        return whole(*args, **options)

    monkeypatch.setattr(workers, "_MOST_IMAGES", 2)
    with monkeypatch.context() as short:
        short.setattr(*at, run_out)
        with pytest.raises(PackError) as caught:
            pack(folder, out, size=SIZE, num_workers=0)
    assert str(caught.value).startswith("out of memory at cats/008.jpg: fewer --workers or a small")
    assert "8 of 24 images are kept" in str(caught.value)
    assert pack(folder, out, size=SIZE, num_workers=0, resume=True).items == 24


def test_a_library_that_cannot_be_loaded_leaves_nothing_behind(folder, out, monkeypatch):
    def unloadable(*args, **options):
        raise ImportError("libtorch_cpu.so: failed to map segment")

    monkeypatch.setattr(encode, "fit_image", unloadable)
    with pytest.raises(ImportError, match="failed to map segment"):
        pack(folder, out, size=SIZE, num_workers=0)
    assert names(out.parent) == []


def test_too_many_open_files_end_the_run_and_skip_nothing(folder, out, monkeypatch):
    monkeypatch.setattr(encode, "_encode", failing_with(errno.EMFILE))
    said = r"^cannot read cats/000\.jpg: Too many open files; nothing was kept$"
    with pytest.raises(PackError, match=said):
        pack(folder, out, size=SIZE, num_workers=0)


def test_workers_that_cannot_be_started_are_one_sentence(folder, out, monkeypatch):
    monkeypatch.setattr(os, "fork", failing_with(errno.ENOMEM))
    said = "cannot start 2 worker processes: Cannot allocate memory: give fewer --workers; nothing"
    with pytest.raises(PackError, match=said):
        pack(folder, out, size=SIZE, num_workers=2)
    assert names(out.parent) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_a_cut_file_is_refused_whatever_pillow_was_told(folder, out, monkeypatch, workers):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    for name in ("cats/000.jpg", "cats/004.png"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) * 2 // 3])
    summary = pack(folder, out, size=SIZE, num_workers=workers)
    assert summary.skipped == (("cats/000.jpg", "truncated"), ("cats/004.png", "truncated"))
    assert ImageFile.LOAD_TRUNCATED_IMAGES


@pytest.mark.parametrize("size", [SIZE, "auto"])
def test_a_file_of_50_gb_is_skipped_by_its_size(folder, out, size):
    with (folder / "cats" / "999.jpg").open("wb") as file:
        file.truncate(50_000_000_000)
    with (folder / "cats" / "998.jpg").open("wb") as file:
        file.truncate(900_000)
    summary = pack(folder, out, size=size, num_workers=0, max_pixels=10_000)
    assert [reason.split(" (")[0] for _, reason in summary.skipped] == [
        "not an image in a known format",
        "file too large",
    ]
    assert summary.skipped[1][1].startswith("file too large (50.0 GB, more than 12 bytes for each")


def test_packing_imports_nothing_once_it_has_begun(folder, out):
    """What is imported late fails where a folder can't be read or no descriptor is left."""
    script = """
import sys
from pathlib import Path
from h5feed.packing import pack, workers, run
import torch

def begin(*args, start=run._fill):
    before.update(sys.modules)
    return start(*args)

before, run._fill = set(), begin
pack(sys.argv[1], sys.argv[2], size=32, num_workers=2)
print(*sorted(set(sys.modules) - before))
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, folder, out],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == []
