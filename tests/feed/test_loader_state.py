"""Leaving off anywhere and going on elsewhere, with exactly what would have come."""

import json
import subprocess
import sys
import textwrap
import zlib

import pytest
import torch
from torch.utils.data import RandomSampler, WeightedRandomSampler

from h5feed import H5Dataset, H5Loader, UsageError, augment
from loaders import assert_same, by_index, write_kind
from packed import random_images, write_set

CROP = (augment.RandomResizedCrop(16), augment.RandomHorizontalFlip())
COUNT = 40


@pytest.fixture
def ds(tmp_path):
    return H5Dataset(write_kind(tmp_path / "a.h5", "raw", count=COUNT))


def make(ds, batch_size=4, **options):
    options.setdefault("shuffle", "sampler" not in options)
    return H5Loader(ds, batch_size, augment=CROP, with_index=True, **options)


def go_on(ds, state, **options):
    """What a new loader delivers from `state`, on all ranks together."""
    found = {}
    world = options.get("world_size", 1)
    for rank in range(world):
        with make(ds, **{**options, "rank": rank, "world_size": world}) as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            found.update(by_index(loader))
    return found


ELSEWHERE = [
    {},
    {"batch_size": 7},
    {"batch_size": 1, "num_workers": 8, "prefetch": 5},
    {"batch_size": 2, "world_size": 3},
    {"seed": 99},
]


@pytest.mark.parametrize("elsewhere", ELSEWHERE, ids=str)
@pytest.mark.parametrize(
    "order",
    [
        {},
        {"shuffle": "block", "block": 5},
        {"shuffle": "shards", "streams": 3},
        {"shuffle": False},
    ],
    ids=str,
)
def test_what_is_left_comes_exactly(ds, elsewhere, order):
    with make(ds, seed=5, num_workers=2, **order) as loader:
        loader.set_epoch(3)
        expected = by_index(loader)
        loader.set_epoch(3)
        passed = iter(loader)
        done = by_index([next(passed) for _ in range(4)])
        state = loader.state_dict()
    assert len(done) == 16
    assert (state["epoch"], state["consumed"], state["seed"]) == (3, 16, 5)
    rest = go_on(ds, state, **order, **elsewhere)
    padded = set(rest) & set(done)
    assert len(padded) < elsewhere.get("world_size", 1)
    assert_same(done | rest, expected)


REST = """
    import json, sys
    import torch
    from h5feed import H5Dataset, H5Loader
    from h5feed.augment import RandomHorizontalFlip, RandomResizedCrop
    path, out, state = sys.argv[1:]
    ops = (RandomResizedCrop(16), RandomHorizontalFlip())
    found = []
    for rank in range(2):
        loader = H5Loader(H5Dataset(path), 3, augment=ops, shuffle=True, with_index=True,
                          num_workers=5, rank=rank, world_size=2)
        loader.load_state_dict(json.loads(state))
        found += [[part.clone() for part in batch] for batch in loader]
    torch.save(found, out)
"""


def test_a_new_process_goes_on_with_what_is_left(ds, tmp_path):
    with make(ds, seed=5, num_workers=1) as loader:
        expected = by_index(loader)
        loader.set_epoch(0)
        passed = iter(loader)
        done = by_index([next(passed) for _ in range(7)])
        state = json.dumps(loader.state_dict())
    out = tmp_path / "rest.pt"
    command = [sys.executable, "-c", textwrap.dedent(REST), ds.files.paths[0], str(out), state]
    subprocess.run(command, check=True)
    assert_same(done | by_index(torch.load(out)), expected)


def test_prefetched_batches_are_not_lost(ds):
    with make(ds, prefetch=8, num_workers=4) as loader:
        passed = iter(loader)
        next(passed)
        for task in passed._tasks:
            task.ready.acquire()
            task.ready.release()
        assert loader.state_dict()["consumed"] == 4


def test_state_before_and_after_a_pass(ds):
    with make(ds, seed=1) as loader:
        state = loader.state_dict()
        assert (state["epoch"], state["consumed"]) == (0, 0)
        iter(loader)
        assert loader.state_dict()["consumed"] == 0
        passed = iter(loader)
        for _ in range(10):
            next(passed)
        state = loader.state_dict()
        assert (state["epoch"], state["consumed"]) == (0, COUNT)
        assert list(passed) == []
        state = loader.state_dict()
        assert (state["epoch"], state["consumed"]) == (1, 0)


def state_of_the_last_batch(ds, **options):
    """What a loop's body saves that saves after every batch."""
    with make(ds, **options) as loader:
        for _ in loader:
            state = loader.state_dict()
    return state


@pytest.mark.parametrize("options", [{}, {"drop_last": True, "batch_size": 7}], ids=str)
def test_a_state_of_the_last_batch_begins_the_next_epoch(ds, options):
    state = state_of_the_last_batch(ds, **options)
    assert state["epoch"] == 0
    with make(ds, **options) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        got = by_index(loader)
        assert loader.state_dict()["epoch"] == 2
    with make(ds, **options) as loader:
        loader.set_epoch(1)
        assert_same(got, by_index(loader))


def test_a_state_of_the_last_batch_leaves_nothing_of_the_epoch_it_names(ds):
    state = state_of_the_last_batch(ds)
    with make(ds) as loader:  # in a loop that begins with the epoch in which it was saved
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert list(loader) == []
        loader.set_epoch(1)
        assert len(by_index(loader)) == COUNT
    with make(ds) as loader:  # and in one that counts the next
        loader.load_state_dict(state)
        loader.set_epoch(1)
        assert len(by_index(loader)) == COUNT
        assert loader.state_dict()["epoch"] == 2


def test_an_epoch_of_no_batch_is_an_epoch(ds):
    with make(ds, 64, drop_last=True) as loader:
        for epoch in range(3):
            assert loader.state_dict()["epoch"] == epoch
            assert list(loader) == []


def test_resuming_twice_and_state_in_mid_resume(ds):
    with make(ds) as loader:
        expected = by_index(loader)
    found, state = {}, None
    for batch_size in (3, 5, 2, 40):
        with make(ds, batch_size) as loader:
            if state is not None:
                loader.load_state_dict(state)
            passed = iter(loader)
            found |= by_index([next(passed), *([next(passed)] if batch_size < 40 else [])])
            state = loader.state_dict()
    assert_same(found, expected)


def test_set_epoch_of_the_same_epoch_keeps_a_loaded_state(ds):
    with make(ds) as loader:
        passed = iter(loader)
        next(passed)
        state = loader.state_dict()
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert len(by_index(loader)) == COUNT - 4
        loader.load_state_dict(state)
        loader.set_epoch(1)
        assert len(by_index(loader)) == COUNT
        assert len(loader) == 10


def test_a_state_is_a_few_values(ds):
    state = make(ds).state_dict()
    assert state.keys() == {
        "version",
        "fingerprint",
        "order",
        "listed",
        "seed",
        "epoch",
        "consumed",
    }
    assert len(json.dumps(state)) < 250
    torch.save(state, "/dev/null")


# --- samplers -----------------------------------------------------------------------------------


def test_a_sampler_is_replayed(ds):
    def sampler():
        return WeightedRandomSampler([1.0] * COUNT, 30)

    def keyed(batches):
        pairs = [(images, ids.tolist()) for images, _, ids in batches]
        return [
            (i, image.clone())
            for images, ids in pairs
            for i, image in zip(ids, images, strict=True)
        ]

    with make(ds, sampler=sampler()) as loader:
        expected = keyed(loader)
        loader.set_epoch(0)
        passed = iter(loader)
        done = keyed([next(passed) for _ in range(3)])
        state = loader.state_dict()
    with make(ds, 7, sampler=sampler()) as loader:
        loader.load_state_dict(state)
        rest = keyed(loader)
    assert len(done) + len(rest) == len(expected) == 30
    for (i, image), (j, other) in zip(done + rest, expected, strict=True):
        assert i == j
        assert torch.equal(image, other)


def test_a_sampler_with_a_generator_elsewhere_is_noticed(ds):
    sampler = RandomSampler(ds, generator=torch.Generator().manual_seed(1))
    with make(ds, sampler=sampler) as loader:
        passed = iter(loader)
        next(passed)
        state = loader.state_dict()
        loader.load_state_dict(state)
        with pytest.raises(UsageError, match="put its generator into the state it had then"):
            iter(loader)
        sampler.generator.manual_seed(1)
        assert len(by_index(loader)) == COUNT - 4


# --- refusals -----------------------------------------------------------------------------------


def test_refuses_a_state_of_other_data(ds, tmp_path):
    other = H5Dataset(write_kind(tmp_path / "b.h5", "jpeg", count=COUNT))
    state = make(ds).state_dict()
    with pytest.raises(UsageError) as caught:
        make(other).load_state_dict(state)
    assert f"its fingerprint is {ds.files.fingerprint[:12]}…" in str(caught.value)
    assert "open the files it was made with" in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": False},
        {"shuffle": "block"},
        {"shuffle": "shards"},
        {"indices": range(10)},
        {"sampler": range(10)},
    ],
    ids=str,
)
def test_refuses_a_state_of_another_order(ds, options):
    with pytest.raises(UsageError, match="the state belongs to the order 'full', this loader has"):
        make(ds, **options).load_state_dict(make(ds).state_dict())


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"epoch": "1"}, {"consumed": None}, {"seed": 1.5}], ids=str
)
def test_refuses_what_is_no_state(ds, change):
    loader = make(ds)
    state = {**loader.state_dict(), **change}
    with pytest.raises(UsageError, match=rf"is not a state of H5Loader.*{next(iter(change))}"):
        loader.load_state_dict(state)
    for other in ({}, None, [1]):
        with pytest.raises(UsageError, match=r"is not a state of H5Loader.*pass what state_dict"):
            loader.load_state_dict(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": -1}, "state has epoch=-1, and epochs count from 0; pass what state_dict"),
        ({"consumed": -5}, "state has consumed=-5, and an epoch has 40 samples; pass what"),
        ({"consumed": 41}, "state has consumed=41, and an epoch has 40 samples; pass what"),
    ],
    ids=str,
)
def test_refuses_a_state_outside_its_epoch(ds, change, message):
    loader = make(ds)
    before = loader.state_dict()
    with pytest.raises(UsageError, match=message):
        loader.load_state_dict({**before, **change})
    assert loader.state_dict() == before


def test_a_sampler_is_asked_for_the_length_of_the_states_epoch(ds):
    class Growing(torch.utils.data.Sampler):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return 10 * (1 + self.epoch)

        def __iter__(self):
            return iter(range(len(self)))

    loader = make(ds, sampler=Growing())
    state = {**loader.state_dict(), "epoch": 2}
    loader.load_state_dict({**state, "consumed": 24})
    assert len(by_index(loader)) == 6
    with pytest.raises(UsageError, match="consumed=31, and an epoch has 30 samples"):
        loader.load_state_dict({**state, "consumed": 31})


def test_a_pass_that_delivered_nothing_loses_nothing_of_a_state(ds):
    with make(ds) as loader:
        passed = iter(loader)
        next(passed)
        state = loader.state_dict()
    with make(ds) as loader:
        loader.load_state_dict(state)
        iter(loader)
        assert loader.state_dict() == state
        assert len(by_index(loader)) == COUNT - 4


# --- several ranks, killed ------------------------------------------------------------------------

# One process imports torch, and forks a world after the other: each would take seconds alone.
# Ranks say what they have through a pipe and wait for an answer, so that none goes before another.
WORLDS = """
    import json, multiprocessing, os, sys, zlib
    import torch
    from h5feed import H5Dataset, H5Loader
    from h5feed.augment import RandomHorizontalFlip, RandomResizedCrop

    path, orders, folder = json.loads(sys.argv[1])
    fork = multiprocessing.get_context("fork")

    def rank_main(rank, size, states, place, pipe):
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", f"file://{place}", rank=rank, world_size=size)
        ds, found, passes = H5Dataset(path), [], []
        for order, state in zip(orders, states, strict=True):
            loader = H5Loader(ds, 4, augment=(RandomResizedCrop(16), RandomHorizontalFlip()),
                              seed=5, num_workers=2, with_index=True, **order)
            if state is not None:
                loader.load_state_dict(state)
            seen, taken = {}, None
            passes.append(iter(loader))  # which stays, with batches under way
            for step, (images, _, indices) in enumerate(passes[-1]):
                if step == 2 and state is None:
                    break  # taken, and lost: saved was the state before
                for image, index in zip(images, indices.tolist(), strict=True):
                    seen.setdefault(index, []).append(zlib.crc32(image.numpy().tobytes()))
                taken = loader.state_dict()
            found.append((seen, taken, loader.stats()["repeated"]))
        pipe.send(found)
        pipe.recv()

    def run(name, size, states, kill=False):
        ranks = []
        for rank in range(size):
            here, there = fork.Pipe()
            arguments = rank, size, states, os.path.join(folder, name), there
            process = fork.Process(target=rank_main, args=arguments, daemon=True)
            process.start()
            there.close()
            ranks.append((process, here))
        found = [here.recv() for _, here in ranks]
        for process, here in ranks:
            process.kill() if kill else here.send("go")
        for process, _ in ranks:
            process.join()
            assert process.exitcode == (-9 if kill else 0), process.exitcode
        return found

    first = run("first", 2, [None] * len(orders), kill=True)
    states = json.loads(json.dumps([state for _, state, _ in first[0]]))
    rest = [run(f"then {size}", size, states) for size in (1, 3)]
    json.dump([first, *rest], open(os.path.join(folder, "found.json"), "w"))
"""
ORDERS = [
    {"shuffle": False},
    {"shuffle": True},
    {"shuffle": "block", "block": 3, "window": 2},
    {"shuffle": "shards", "streams": 2, "window": 1},
    {"shuffle": "shards"},
]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Two ranks killed in the middle of an epoch, and what one and what three ranks go on with.

    By order: [(samples' checksums of each rank, a rank's state, repeated samples)] of a world.
    """
    folder = tmp_path_factory.mktemp("worlds")
    path = str(write_set(folder / "set", random_images(43, (32, 32)), shards=4))
    given = json.dumps([path, ORDERS, str(folder)])
    subprocess.run([sys.executable, "-c", textwrap.dedent(WORLDS), given], check=True, timeout=200)
    found = json.loads((folder / "found.json").read_text())
    return path, [list(zip(*world, strict=True)) for world in found]


@pytest.mark.parametrize("number", range(len(ORDERS)), ids=lambda k: str(ORDERS[k]))
@pytest.mark.parametrize("size", [1, 3])
def test_ranks_killed_in_mid_epoch_go_on_as_one_or_three(worlds, number, size):
    path, (first, *rest) = worlds
    expected = {}
    with H5Loader(
        H5Dataset(path), 5, augment=CROP, seed=5, with_index=True, num_workers=1, **ORDERS[number]
    ) as loader:
        for images, _, indices in loader:
            for image, index in zip(images, indices.tolist(), strict=True):
                expected[str(index)] = [zlib.crc32(image.numpy().tobytes())]
    assert len(expected) == 43
    states = [state for _, state, _ in first[number]]
    assert states[0] == states[1]
    assert states[0]["consumed"] == 16
    found = {}
    for seen, _, repeated in [*first[number], *rest[(1, 3).index(size)][number]]:
        assert repeated == 0
        assert not found.keys() & seen.keys(), "a sample came twice"
        found |= seen
    assert found == expected
