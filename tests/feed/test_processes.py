"""engine="process": the same batches as threads make, and nothing left behind, however it ends."""

import gc
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress

import numpy as np
import psutil
import pytest
import torch

from h5feed import DamagedItemError, H5Dataset, H5FeedError, H5Loader, UsageError, augment
from h5feed.feed.memory import Ring, SharedMemory
from h5feed.jpeg import encode_jpeg
from images import smooth
from in_workers import Fails, Invert, Kills
from loaders import KINDS, assert_same, by_index, loader_threads, wait_until, write_kind
from packed import image_spec, write_packed

CROP = (augment.RandomResizedCrop(16), augment.RandomHorizontalFlip())
FULL = (
    *CROP,
    augment.RandomApply([augment.ColorJitter(0.4, 0.4, 0.4, 0.1), augment.RandAugment()]),
    augment.RandomErasing(1.0, value=7),
)


def open_loader(ds, batch_size=4, **options):
    given = {"shuffle": True, "augment": CROP, "num_workers": 2, "engine": "process"}
    return H5Loader(ds, batch_size, **{**given, **options})


def load(ds, batch_size=5, **options):
    with open_loader(ds, batch_size, with_index=True, **options) as loader:
        return by_index(loader)


def workers(loader):
    """The worker processes, and the one that started them."""
    server = psutil.Process(loader._engine.processes[0])
    # forked all at once, but one after another
    assert wait_until(lambda: len(server.children()) == loader.num_workers)
    return server.children(), server


def pass_on(loader):
    """Begin passes until one hears of its workers' end, which takes a moment."""
    wait_until(lambda: list(loader) is None, seconds=60)


@pytest.fixture(autouse=True)
def none_left():
    """No process, thread or descriptor more than before, and no shared memory mapped."""
    gc.collect()
    children = set(psutil.Process().children(recursive=True))
    before, files = loader_threads(), descriptors()
    yield
    # Again and again: a job under way may hold what makes a cycle garbage once it is done.
    assert wait_until(lambda: gc.collect() >= 0 and loader_threads() <= before)
    assert set(psutil.Process().children(recursive=True)) <= children
    assert wait_until(lambda: descriptors() <= files and mapped() == 0)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def mapped():
    with open("/proc/self/maps") as maps:
        return sum("h5feed-batches" in line for line in maps)


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    return write_kind(tmp_path_factory.mktemp("raw") / "a.h5", "raw", count=60)


@pytest.fixture
def ds(raw):
    return H5Dataset(raw)


# --- the same batches ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_of_threads(tmp_path, kind):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", kind, count=40))
    options = {"augment": FULL, "views": 2, "io": "read" if kind == "jpeg" else "map"}
    assert_same(load(ds, **options), load(ds, engine="thread", **options))


def test_masks_floats_mixes_and_states_are_those_of_threads(tmp_path):
    images = [smooth(32, 32, k) for k in range(40)]
    masks = [np.full((32, 32, 1), k, np.uint8) for k in range(40)]
    masked = H5Dataset(write_packed(tmp_path / "m.h5", images, masks=masks))
    assert_same(load(masked, augment=FULL), load(masked, augment=FULL, engine="thread"))
    plain = H5Dataset(write_packed(tmp_path / "a.h5", images))
    floats = (*CROP, augment.ToDtype(torch.bfloat16, scale=True), augment.MixUp())
    found = []
    for engine in ("process", "thread"):
        with open_loader(plain, 4, augment=floats, engine=engine, seed=3) as loader:
            begun = iter(loader)
            first = [next(begun) for _ in range(3)]
            state = loader.state_dict()
        other = "thread" if engine == "process" else "process"
        with open_loader(plain, 4, augment=floats, engine=other, seed=3) as loader:
            loader.load_state_dict(state)
            rest = list(loader)
        found.append([(x.clone(), y.clone()) for x, y in [*first, *rest]])
    assert len(found[0]) == len(found[1]) == 10
    for (x, y), (a, b) in zip(*found, strict=True):
        assert torch.equal(x, a)
        assert torch.equal(y, b)


def write_damaged(path, damaged=(3,), count=24):
    data = [encode_jpeg(smooth(32, 32, seed), 90) for seed in range(count)]
    for k in damaged:
        data[k] = data[k][: len(data[k]) // 2]
    shapes = np.full((count, 2), 32, np.int32)
    return write_packed(path, data, spec=image_spec("jpeg"), stored_shapes=shapes)


def test_damaged_items_are_skipped_or_named_as_threads_do(tmp_path):
    ds = H5Dataset(write_damaged(tmp_path / "a.h5", (3, 7, 17)))
    skips = {"on_error": "skip", "shuffle": False}
    found = []
    for engine in ("process", "thread"):
        with open_loader(ds, 8, engine=engine, with_index=True, **skips) as loader:
            found.append([(x.clone(), i.tolist()) for x, _, i in loader])
            assert loader.stats()["skipped"] == 3
    for (x, i), (y, j) in zip(*found, strict=True):
        assert i == j
        assert torch.equal(x, y)
    said = []
    for engine in ("process", "thread"):
        with open_loader(ds, 24, engine=engine, shuffle=False) as loader:
            with pytest.raises(DamagedItemError) as caught:
                list(loader)
            said.append(str(caught.value))
            assert isinstance(caught.value.__cause__, ValueError)
    assert "item 3 of /images" in said[0]
    assert said[0] == said[1]
    every = H5Dataset(write_damaged(tmp_path / "b.h5", range(4), 4))
    none = pytest.raises(DamagedItemError, match=r"item 0 of /images .* found no whole item in")
    with open_loader(every, 4, **skips) as loader, none:
        list(loader)


def test_stats_and_slots(ds):
    with open_loader(ds) as loader:
        held = []
        for _ in range(3):
            for images, _ in loader:
                held = [*held[-1:], images[1, 0]]  # a view of a batch holds its memory
                assert images.data_ptr() not in {other.data_ptr() for other in held[:-1]}
        stats = loader.stats()
        assert (stats["engine"], stats["engine_reason"]) == ("process", "as asked")
        assert stats["batches"] == 45
        assert stats["slots"] <= loader.prefetch + 4


def test_a_batch_outlives_its_loader(ds):
    loader = open_loader(ds, 20, shuffle=False)
    batches = [images for images, _ in loader]
    expected = [images.clone() for images in batches]
    loader.close()
    assert sum(1 for _ in loader) == 3, "a closed loader begins again"
    del loader
    gc.collect()
    assert all(map(torch.equal, batches, expected))
    del batches


def test_auto_takes_processes_where_threads_would_wait_for_each_other(tmp_path, ds):
    jpeg = H5Dataset(write_kind(tmp_path / "j.h5", "jpeg"))
    crop = (augment.RandomResizedCrop(224),)
    mixing = (*crop, augment.MixUp())

    class Local(Invert):
        pass

    for given, workers, options, engine, reason in [
        (ds, 1, {}, "thread", "so few as 1 seldom wait for Python's lock"),
        (jpeg, 2, {"augment": (*crop, Invert())}, "thread", "so few as 2 seldom wait"),
        (ds, 5, {}, "thread", r"lock 31% of the time \(4 of 64 µs .*\), so that they seldom wait"),
        (
            ds,
            6,
            {},
            "process",
            r"6 threads would hold .* lock 37% of the time \(4 of 64 µs an image",
        ),
        (jpeg, 3, {}, "process", r"3 threads would hold Python's lock \d+% of the time \(18 of"),
        (jpeg, 8, {"augment": mixing}, "process", r"lock 100% of the time"),
        (ds, 3, {"augment": (*crop, Invert())}, "process", r"Invert\(\) may hold Python's lock as"),
        (ds, 8, {"batch_size": 16}, "thread", "a batch takes 1.0 ms, and handing it to processes"),
        (ds, 64, {"augment": ()}, "thread", "copying holds no lock"),
        (ds, 8, {"augment": mixing}, "thread", "whole batches are mixed in this process"),
        (ds, 8, {"augment": [*crop, Local()]}, "thread", "worker processes cannot import .*Local"),
        (ds, 8, {"engine": "thread"}, "thread", "as asked"),
        (ds, 1, {"engine": "process"}, "process", "as asked"),
    ]:
        given_options = {"batch_size": 256, "augment": crop, "engine": "auto", **options}
        stats = open_loader(given, num_workers=workers, **given_options).stats()
        assert (stats["engine"], workers) == (engine, workers)
        assert re.search(reason, stats["engine_reason"])


def test_a_process_has_two_threads_where_these_seldom_wait_for_each_other(ds):
    large = {"batch_size": 20, "augment": (augment.RandomResizedCrop(224),)}
    with open_loader(ds, num_workers=5, **large) as loader:
        list(loader)
        server = psutil.Process(loader._engine.processes[0])
        assert wait_until(lambda: sorted(p.num_threads() for p in server.children()) == [1, 2, 2])
    assert_same(
        load(ds, augment=large["augment"]), load(ds, engine="thread", augment=large["augment"])
    )
    own = {"augment": (*large["augment"], Invert())}
    with open_loader(ds, num_workers=3, **large | own) as loader:
        list(loader)
        assert len(workers(loader)[0]) == 3, "nobody knows how long an op of one's own takes"


def test_ops_may_change_between_passes(ds):
    with open_loader(ds, 60, shuffle=False) as loader:
        begun = iter(loader)
        loader.set_size(24)
        [(larger, _)], [(before, _)] = loader, begun
        assert larger.shape[2:] == (24, 24)
        assert before.shape[2:] == (16, 16), "a pass keeps its workers"


def test_engine_is_checked(ds):
    with pytest.raises(UsageError, match="engine='fork' is none of thread, process, auto"):
        H5Loader(ds, 4, engine="fork")


# --- shared memory ------------------------------------------------------------------------------


def test_memory_that_nobody_holds_goes_back_to_the_system():
    memory = SharedMemory()
    ring = Ring((4, 1000), np.dtype(np.uint8), keep=2, shared=memory)

    def held():
        return os.fstat(memory.fileno()).st_blocks

    lent = []
    for k in range(50):
        slot = ring.take()
        slot.rows[:] = k
        lent.append(slot.lend(4)[1:3].numpy())
    assert all((rows == k).all() for k, rows in enumerate(lent)), "no two share memory"
    assert held() == 50 * 8
    del slot, lent
    assert len(ring) == 2
    ring.take(), ring.take(), ring.take()
    assert held() <= 2 * 8
    memory.allocate(4096)
    assert memory._top == 50 * 4096, "what is free is used again"


def test_a_fork_of_the_memory_begins_anew():
    memory = SharedMemory()
    ring = Ring((1, 4096), np.dtype(np.uint8), keep=2, shared=memory)
    slot = ring.take()
    slot.rows[:] = 1
    slot.go_home()
    child = os.fork()
    if child == 0:
        ring.take().rows[:] = 2
        os._exit(0)
    os.waitpid(child, 0)
    assert (ring.take().rows == 1).all()


# --- ops of one's own ---------------------------------------------------------------------------


def test_ops_of_a_module_work(ds):
    ops = (*CROP, Invert())
    assert_same(load(ds, augment=ops), load(ds, augment=ops, engine="thread"))


def test_an_error_of_an_op_reaches_the_caller_and_the_workers_go_on(ds):
    with open_loader(ds, 20, augment=(*CROP, Fails())) as loader:
        for _ in range(2):
            with pytest.raises(KeyError, match="mine") as caught:
                list(loader)
            assert "on_cpu" in str(caught.value.__cause__), "where in the worker"
            assert len(workers(loader)[0]) == 2
            del caught


def test_ops_that_no_worker_can_find_are_refused(ds):
    class Local(Invert):
        pass

    with pytest.raises(UsageError, match=r"find an op by the name of its class.*top level of a mo"):
        open_loader(ds, augment=(*CROP, Local()))


SCRIPT = """
    import sys
    from dataclasses import dataclass
    import numpy as np
    from h5feed import H5Dataset, H5Loader, augment

    @dataclass(frozen=True)
    class Mine(augment.ImageOp):
        def on_cpu(self, row, image):
            image[:] = 7

    def main(engine, *ops):
        ops = (augment.CenterCrop(16), *ops)
        loader = H5Loader(H5Dataset(sys.argv[1]), 4, augment=ops, engine=engine, num_workers=2)
        print(next(iter(loader))[0].float().mean().item() == 7, flush=True)
"""


def run_script(tmp_path, path, *lines):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT) + "\n".join(lines))
    command = [sys.executable, str(script), str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


def test_a_script_s_own_ops_work_below_the_usual_guard(tmp_path, raw):
    done = run_script(tmp_path, raw, 'if __name__ == "__main__":', '    main("process", Mine())')
    assert done.stdout == "True\n", done.stderr


def test_a_script_without_the_guard_is_told_so_where_it_needs_one(tmp_path, raw):
    done = run_script(tmp_path, raw, 'main("process")', 'main("process", Mine())')
    assert done.stdout == "False\n", "without ops of its own no worker imports the script"
    assert 'put what it does below if __name__ == "__main__"' in done.stderr


# --- how it ends --------------------------------------------------------------------------------


def test_a_worker_that_is_killed_is_one_error_and_leaves_nothing(ds):
    loader = open_loader(ds, 2)
    for victim in (0, 1):
        for passed in (iter(loader), iter(loader)):
            next(passed)
        workers(loader)[0][victim].kill()
        with pytest.raises(H5FeedError, match=r"worker process.*SIGKILL, as when memory runs"):
            pass_on(loader)
        assert loader._engine.processes == []
        assert sum(len(images) for images, _ in loader) == 60


def test_an_op_that_ends_its_process_is_one_error(ds):
    with open_loader(ds, augment=(*CROP, Kills())) as loader:
        for _ in range(2):
            with pytest.raises(H5FeedError, match=r"a worker process of the loader died \(SIGBUS"):
                list(loader)


def test_the_server_of_the_workers_may_be_killed(ds):
    loader = open_loader(ds)
    next(iter(loader))
    children, server = workers(loader)
    server.kill()
    with pytest.raises(H5FeedError, match=r"died \(SIGKILL"):
        pass_on(loader)
    assert wait_until(lambda: not any(child.is_running() for child in children))


def test_passes_let_go_and_short_epochs_leave_nothing(ds):
    loader = open_loader(ds, 20)
    list(loader)
    started = workers(loader)
    size, files = psutil.Process().memory_info().rss, descriptors()
    for epoch in range(500):
        for _ in loader:
            if epoch % 3:
                break
    assert workers(loader) == started, "workers stay over epochs"
    assert descriptors() == files
    assert psutil.Process().memory_info().rss - size < 32 << 20
    assert loader.stats()["slots"] <= 3 * (loader.prefetch + 2)


def test_a_forked_child_begins_anew(ds):
    with open_loader(ds, shuffle=False) as loader:
        first = next(iter(loader))[0].clone()
        child = os.fork()
        if child == 0:
            code = 1
            with suppress(BaseException):
                own = workers(loader)[1].pid if loader._engine._team.pid == os.getpid() else 0
                loader.set_epoch(0)
                same = torch.equal(next(iter(loader))[0], first)
                new = workers(loader)[1].pid
                loader.close()
                code = 0 if same and own == 0 and not psutil.pid_exists(new) else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert sum(1 for _ in loader) == 15


def test_many_workers_on_few_cores_with_few_descriptors(ds):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 12, limits[1]))
    try:
        assert len(load(ds, num_workers=64)) == 60
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_without_descriptors_the_error_says_what_to_do(ds):
    loader = open_loader(ds)
    loader._engine._memory.fileno()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors(), limits[1]))
    try:
        with pytest.raises(H5FeedError, match=r"cannot start 2 worker processes: Too many open"):
            next(iter(loader))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    loader.close()


PARENT = """
    import os, sys, time
    from h5feed import H5Dataset, H5Loader, augment
    loader = H5Loader(
        H5Dataset(sys.argv[1]), 2, shuffle=True, augment=[augment.RandomResizedCrop(16)],
        num_workers=2, engine="process",
    )
    def forever():
        while True:
            yield from loader
    batches = forever()
    def go_on(count):
        for _ in range(count):
            next(batches)
    go_on(5)
    print(loader._engine.processes[0], flush=True)
"""


def start_parent(path, code):
    code = textwrap.dedent(PARENT) + textwrap.dedent(code)
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    parent = subprocess.Popen([sys.executable, "-c", code, str(path)], **options)
    server = psutil.Process(int(parent.stdout.readline()))
    assert wait_until(lambda: len(server.children()) == 2)
    return parent, [server, *server.children()]


def test_a_parent_that_is_killed_takes_its_workers_with_it(raw):
    # even where a child of its own, forked from it, still holds the pipes
    code = """
        if os.fork() == 0:
            os.read(0, 1)
            os._exit(0)
        while True:
            go_on(1)
    """
    parent, theirs = start_parent(raw, code)
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not any(p.is_running() for p in theirs), seconds=60)
    parent.stdin.close()
    parent.stdout.close()


def test_ctrl_c_at_fifty_moments_is_heard_each_time_and_leaves_nothing(raw):
    code = """
        heard = 0
        while heard < 50:
            try:
                print("ready", flush=True)
                while True:
                    go_on(1)
            except KeyboardInterrupt:
                heard += 1
                batches = forever()
        print("end", len(os.listdir("/proc/self/task")), flush=True)
        sys.stdin.read()
    """
    parent, theirs = start_parent(raw, code)
    rng = np.random.default_rng(0)
    for line in parent.stdout:
        if line.startswith("end"):
            break
        time.sleep(rng.uniform(0, 0.02))  # any moment will do
        parent.send_signal(signal.SIGINT)
    assert line.startswith("end")
    assert all(p.is_running() for p in theirs), "the same workers all along"
    parent.stdin.close()
    parent.stdout.close()
    assert parent.wait() == 0
    assert wait_until(lambda: not any(p.is_running() for p in theirs), seconds=60)


def test_what_a_worker_is_sent_is_small(ds):
    loader = open_loader(ds)
    assert len(loader._engine._setup) < 10_000
    assert b"__main__" not in loader._engine._setup
    assert pickle.loads(loader._engine._setup).names == ("images",)
