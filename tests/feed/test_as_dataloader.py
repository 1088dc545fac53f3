"""H5Loader where code expects a DataLoader: its attributes, its arguments, parts of datasets."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Sampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)

from h5feed import H5Dataset, H5Loader, ShuffleSampler, UsageError, augment
from h5feed.augment import CenterCrop, MixUp, RandomHorizontalFlip, RandomResizedCrop, Resize
from h5feed.feed.as_dataloader import StockOptions
from loaders import assert_same, by_index, write_kind

CROP = (RandomResizedCrop(16), RandomHorizontalFlip())


@pytest.fixture
def ds(tmp_path):
    return H5Dataset(write_kind(tmp_path / "a.h5", "raw"), aspect="stored")


def copies(batches):
    return [tuple(part.clone() for part in batch) for batch in batches]


def assert_batches(found, expected):
    found, expected = list(found), list(expected)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# --- what is read from it -------------------------------------------------------------------------


def test_it_has_every_attribute_of_a_dataloader(ds):
    stock = DataLoader(ds, 5)
    names = {name for name in (*vars(stock), *dir(DataLoader)) if not name.startswith("_")}
    names -= {"check_worker_number_rationality", "is_generic"}
    with H5Loader(ds, 5, shuffle=True, prefetch=3, num_workers=2) as loader:
        assert [name for name in sorted(names) if not hasattr(loader, name)] == []
        assert (loader.batch_size, loader.drop_last, loader.num_workers) == (5, False, 2)
        assert (loader.prefetch_factor, loader.pin_memory, loader.timeout) == (3, False, 0)
        assert loader.worker_init_fn is loader.generator is loader.multiprocessing_context is None
        assert loader.dataset is ds


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"indices": [7, 3, 3, 5, 1, 0, 2]}])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_sampler_gives_this_ranks_order_and_sets_the_epoch(ds, options, rank):
    loader = H5Loader(ds, 2, rank=rank, world_size=2, with_index=True, **options)
    with loader:
        for epoch in (0, 3):
            loader.sampler.set_epoch(epoch)
            listed, batches = list(loader.sampler), list(loader.batch_sampler)
            loader.batch_sampler.set_epoch(epoch)
            delivered = [indices.tolist() for *_, indices in loader]
            assert listed == [index for batch in delivered for index in batch]
            assert batches == delivered
            assert len(listed) == len(loader.sampler)
            assert len(batches) == len(loader.batch_sampler) == len(loader)
    assert isinstance(loader.sampler, Sampler)
    assert isinstance(loader.batch_sampler, BatchSampler)


def test_looking_at_the_order_takes_nothing_of_a_pass(ds):
    with H5Loader(ds, 5, shuffle=True, seed=3) as loader:
        whole = copies(loader)
        loader.set_epoch(0)
        going = iter(loader)
        found = copies([next(going)])
        list(loader.sampler)
        state = loader.state_dict()
        assert (state["epoch"], state["consumed"]) == (0, 5)
        assert_batches(found + copies(going), whole)


class Skip(BatchSampler):
    """As accelerate has it."""

    def __init__(self, batch_sampler, skip):
        self.batch_sampler, self.skip = batch_sampler, skip

    def __iter__(self):
        return (batch for k, batch in enumerate(self.batch_sampler) if k >= self.skip)

    def __len__(self):
        return len(self.batch_sampler) - self.skip


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ops", [CROP, (*CROP, MixUp(num_classes=2)), ()])
def test_a_dataloader_of_its_batch_sampler_and_collate_makes_its_batches(ds, ops, workers):
    """What accelerate's skip_first_batches and Hugging Face's Trainer build to resume."""
    with H5Loader(ds, 5, shuffle=True, augment=ops, seed=2) as loader:
        loader.set_epoch(4)
        whole = copies(loader)
        loader.set_epoch(4)
        rest = DataLoader(
            loader.dataset,
            batch_sampler=Skip(loader.batch_sampler, 1),
            collate_fn=loader.collate_fn,
            num_workers=workers,
            pin_memory=loader.pin_memory,
            generator=loader.generator,
        )
        assert len(rest) == 2
        assert_batches(rest, whole[1:])
        assert loader.state_dict()["epoch"] == 5


@pytest.mark.parametrize(
    "options",
    [{"indices": [5, 3, 1], "weights": [1.0] * 12}, {"repeats": 2, "shuffle": True}],
    ids=str,
)
def test_the_same_in_every_order(ds, options):
    with H5Loader(ds, 2, augment=CROP, **options) as loader:
        whole = copies(loader)
        loader.set_epoch(0)
        rest = DataLoader(
            ds, batch_sampler=Skip(loader.batch_sampler, 1), collate_fn=loader.collate_fn
        )
        assert_batches(rest, whole[1:])


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_of_parts_of_datasets(ds, workers):
    parts = [Subset(ds, [9, 3, 3, 1, 0]), ConcatDataset([ds, Subset(ds, [2, 1])])]
    for part in parts:
        with H5Loader(part, 2, shuffle=True, augment=CROP) as loader:
            whole = copies(loader)
            loader.set_epoch(0)
            rest = DataLoader(
                loader.dataset,
                batch_sampler=Skip(loader.batch_sampler, 1),
                collate_fn=loader.collate_fn,
                num_workers=workers,
            )
            assert_batches(rest, whole[1:])
            plain = DataLoader(loader.dataset, batch_size=len(part))
            assert next(iter(plain))[1].tolist() == [part[k][1] for k in range(len(part))]


def test_accelerate_prepares_it_and_skips_its_first_batches(ds):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    loader = H5Loader(ds, 5, shuffle=True, augment=CROP, num_workers=1)
    model = torch.nn.Linear(2, 2)
    model, prepared = accelerator.prepare(model, loader)
    with loader:
        whole = copies(prepared)
        loader.set_epoch(0)
        assert_batches(accelerator.skip_first_batches(prepared, 2), whole[2:])


class Own(Subset):
    """A class of a script's own."""


def test_a_dataset_that_the_plan_does_not_reach_is_one_sentence(ds):
    loader = H5Loader(Own(ds, range(8)), 4, augment=CROP)
    rest = DataLoader(
        loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn
    )
    with loader, pytest.raises(UsageError) as caught:
        list(rest)
    assert "collate_fn gets samples of the dataset, which augment=(RandomResized" in str(
        caught.value
    )
    assert "make it of an H5Dataset, a Subset or a ConcatDataset of torch's own" in str(
        caught.value
    )
    plain = H5Loader(Subset(ds, range(8)), 4)
    with plain:
        images, _ = plain.collate_fn([ds[0], ds[1]])
        assert images.shape == (2, 3, 32, 32)


def test_it_pickles_with_where_it_stands(ds):
    loader = H5Loader(ds, 5, shuffle=True, augment=CROP, seed=9)
    with loader:
        loader.set_epoch(2)
        loader.set_size(8)
        for made in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
            loader.set_epoch(2)
            with made:
                assert made.state_dict() == loader.state_dict()
                assert_batches(copies(made), copies(loader))


# --- what it is given -----------------------------------------------------------------------------


def test_a_dataloaders_line_needs_another_class_alone(ds):
    generator = torch.Generator().manual_seed(7)
    options = {
        "batch_size": 4, "shuffle": True, "num_workers": 2, "pin_memory": True, "drop_last": True,
        "persistent_workers": True, "prefetch_factor": 4, "timeout": 0, "worker_init_fn": print,
        "generator": generator, "collate_fn": None, "multiprocessing_context": None,
    }  # fmt: skip
    DataLoader(dataset=ds, **options)
    with H5Loader(dataset=ds, **options) as loader, H5Loader(ds, 4, shuffle=True, seed=7) as same:
        assert loader.seed == 7
        assert_batches(copies(loader), copies(same))
    with H5Loader(ds, num_workers=0, collate_fn=default_collate) as loader:
        assert len(loader) == len(DataLoader(ds, num_workers=0)) == 12
        assert loader.num_workers == 1


def test_every_argument_of_a_dataloader_is_known(ds):
    stock = set(DataLoader.__init__.__annotations__) - {"return"}
    ours = set(H5Loader.__init__.__annotations__) | set(StockOptions.__annotations__)
    assert stock <= ours


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_worker": 4},
            "num_worker=4 is not an argument of H5Loader or DataLoader; help(H5Load",
        ),
        ({"collate_fn": print}, "collate_fn=<built-in function print> would have to run in Pyth"),
        ({"batch_sampler": [[1]]}, "batch_sampler=[[1]]: H5Loader makes its batches itself"),
        ({"generator": 5}, "generator=5 with seed=0: H5Loader's order is a function of one seed"),
        ({"keys": ("a",)}, "keys=('a',) is not two names, of image and target"),
        ({"keys": "ab"}, "keys='ab' is not two names"),
        ({"augment": CenterCrop(8)}, "augment=CenterCrop(size=8, mask_fill=0) is one op: give"),
        ({"augment": None}, "augment=None is not a list"),
    ],
)
def test_refuses_a_wrong_argument(ds, options, message):
    with pytest.raises(UsageError) as caught:
        H5Loader(ds, 4, **options)
    assert message in str(caught.value)


def test_samples_are_dicts_under_keys(ds):
    keys = ("pixel_values", "labels")
    with H5Loader(ds, 5, keys=keys, with_index=True) as loader, H5Loader(ds, 5) as plain:
        for batch, (images, labels) in zip(loader, plain, strict=True):
            assert list(batch) == [*keys, "index"]
            assert torch.equal(batch["pixel_values"], images)
            assert torch.equal(batch["labels"], labels)


# --- other people's loops -------------------------------------------------------------------------


class Trainer:
    """What Hugging Face's Trainer does with a loader, to begin and to go on in mid-epoch."""

    def __init__(self, model, loader):
        self.model, self.loader = model, loader

    def train(self, epochs, done=0):
        steps = len(self.loader)
        for epoch in range(done // steps, epochs):
            batches = self.loader
            if hasattr(batches, "set_epoch"):
                batches.set_epoch(epoch)
            if skip := (done % steps if epoch == done // steps else 0):
                batches = DataLoader(
                    self.loader.dataset,
                    batch_sampler=Skip(self.loader.batch_sampler, skip),
                    num_workers=self.loader.num_workers,
                    collate_fn=self.loader.collate_fn,
                    pin_memory=self.loader.pin_memory,
                    timeout=self.loader.timeout,
                    worker_init_fn=self.loader.worker_init_fn,
                    multiprocessing_context=self.loader.multiprocessing_context,
                    generator=self.loader.generator,
                    prefetch_factor=self.loader.prefetch_factor,
                    persistent_workers=self.loader.persistent_workers,
                )
            for batch in batches:
                self.model(**batch)


def test_hugging_faces_trainer_goes_on_exactly(ds):
    def seen(done=0):
        found = []

        def model(pixel_values, labels):
            found.append((pixel_values.clone(), labels.clone()))

        keyed = H5Dataset(ds.files.paths, keys=("pixel_values", "labels"))
        with H5Loader(keyed, 5, shuffle=True, augment=CROP, num_workers=2) as loader:
            assert len(loader.dataset) == 12
            Trainer(model, loader).train(2, done)
        return found

    assert_batches(seen(done=2), seen()[2:])


def test_timms_loop_is_served(ds):
    """train_one_epoch and main of timm's train.py: names they use of a loader."""
    loader = H5Loader(ds, 5, shuffle=True, augment=[*CROP, MixUp()], drop_last=True)
    with loader:
        orders = []
        for epoch in range(3):
            if hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch)
            if epoch == 2 and loader.mixup_enabled:
                loader.mixup_enabled = False
            last = len(loader) - 1
            for number, (images, target) in enumerate(loader):
                assert images.shape == (5, 3, 16, 16)
                assert target.shape == (5, 2)
                assert number <= last
            assert number == last
            assert epoch < 2 or target.max(1).values.min() == 1
            orders.append(target.tolist())
        assert orders[0] != orders[1]
        assert len(loader.dataset) == 12


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_stateful_dataloader_resumes_over_the_dataset(ds, workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def make():
        sampler = ShuffleSampler(ds, seed=5)
        sampler.set_epoch(1)
        return stateful(ds, batch_size=4, sampler=sampler, num_workers=workers)

    loader = make()
    going = iter(loader)
    next(going)
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    rest = copies(going)
    assert len(rest) == 2
    resumed = make()
    resumed.load_state_dict(state)
    assert_batches(copies(resumed), rest)


# --- parts of datasets ----------------------------------------------------------------------------


def load(ds, **options):
    with H5Loader(ds, 5, with_index=True, augment=CROP, **options) as loader:
        return by_index(loader)


def test_a_part_is_the_indices_of_the_whole(ds):
    nested = Subset(Subset(ds, [9, 8, 7, 1, 0, -6]), [0, 2, 3, 5])
    for options in ({}, {"shuffle": True}):
        assert_same(load(nested, **options), load(ds, indices=[9, 7, 1, 6], **options))
    assert_same(load(nested, indices=[1, 3]), load(ds, indices=[7, 6]))
    loader = H5Loader(nested, 2)
    assert isinstance(loader.dataset, Subset)
    assert (loader.dataset.dataset, loader.dataset.indices) == (nested.dataset, nested.indices)
    assert loader.state_dict() == H5Loader(ds, 2, indices=[9, 7, 1, 6]).state_dict()
    assert list(loader.sampler) == [0, 1, 2, 3]


def test_a_split_has_every_sample_once(ds):
    parts = random_split(ds, [8, 4], torch.Generator().manual_seed(0))
    found = [set(load(part, shuffle=True)) for part in parts]
    assert [len(part) for part in found] == [8, 4]
    assert found[0] | found[1] == set(range(12))


def test_a_sampler_of_a_part_gives_its_positions(ds):
    part = Subset(ds, [11, 10, 9])
    weighted = WeightedRandomSampler([0.0, 1.0, 0.0], 1)
    assert list(load(part, sampler=weighted)) == [10]
    with pytest.raises(UsageError, match="sampler gives indices from 3 to 3; the dataset has 0 to"):
        iter(H5Loader(part, 1, sampler=[3]))


def test_joined_datasets_are_one_after_the_other(ds, tmp_path):
    other = H5Dataset(write_kind(tmp_path / "b.h5", "raw", count=7), aspect="stored")
    joint = ConcatDataset([Subset(other, [6, 5]), ds, other])
    with H5Loader(joint, 30, with_index=True) as loader:
        [(images, labels, indices)] = loader
        assert len(loader.sampler) == len(joint) == 21
    assert indices.tolist() == [6, 5, *range(7, 19), *range(7)]
    want = [joint[k] for k in range(len(joint))]
    assert torch.equal(images, torch.stack([image for image, _ in want]))
    assert labels.tolist() == [label for _, label in want]


def test_parts_of_other_things_are_one_sentence(ds):
    for wrong in (Subset([1, 2], [0]), ConcatDataset([ds, [1, 2]]), "train.h5"):
        with pytest.raises(UsageError, match="is not an H5Dataset, nor a Subset or ConcatDa"):
            H5Loader(wrong, 4)
    with pytest.raises(UsageError, match="has indices from 12 to 12, and what it is a"):
        H5Loader(Subset(ds, [12]), 4)
    other = H5Dataset(ds.files.paths, aspect="stored", target_dtype=torch.int32)
    with pytest.raises(UsageError, match=r"joins datasets of target_dtype=None and targe"):
        H5Loader(ConcatDataset([ds, other]), 4)


# --- what changes while it lives ------------------------------------------------------------------


def sizes(loader):
    return [tuple(images.shape[2:]) for images, *_ in loader]


def test_a_size_takes_effect_at_the_next_pass(ds):
    with H5Loader(ds, 5, shuffle=True, augment=CROP) as loader:
        going = iter(loader)
        assert next(going)[0].shape[2:] == (16, 16)
        loader.set_size(24)
        assert sizes(going) == [(16, 16)] * 2
        assert sizes(loader) == [(24, 24)] * 3
        loader.set_size((8, 12))
        assert sizes(loader) == [(8, 12)] * 3


def test_a_resumed_pass_of_another_size_goes_on_exactly(ds):
    def make():
        loader = H5Loader(ds, 5, shuffle=True, augment=CROP, seed=4)
        loader.set_size(20)
        return loader

    with make() as loader, make() as other:
        going = iter(loader)
        next(going)
        other.load_state_dict(loader.state_dict())
        assert_batches(copies(other), copies(going))


def test_sizes_before_the_last_change_in_proportion(ds):
    with H5Loader(ds, 12, augment=[Resize(32), CenterCrop(28)]) as loader:
        loader.set_size(14)
        [(small, _)] = loader
    with H5Loader(ds, 12, augment=[Resize(16), CenterCrop(14)]) as loader:
        assert torch.equal(next(iter(loader))[0], small)


def test_a_wrong_size_is_one_sentence_and_changes_nothing(ds):
    with H5Loader(ds, 5, augment=[CenterCrop(16)]) as loader:
        for size, text in [
            (0, "size=0 must be a positive whole"),
            ("x", "size='x' must be"),
        ]:
            with pytest.raises(UsageError, match=text):
                loader.set_size(size)
        assert sizes(loader)[0] == (16, 16)
    with (
        H5Loader(ds, 5) as loader,
        pytest.raises(UsageError, match="has a size that could"),
    ):
        loader.set_size(16)


def test_mixing_is_turned_off_as_timm_does(ds):
    plain = H5Loader(ds, 12, augment=CROP)
    with H5Loader(ds, 12, augment=[*CROP, MixUp()]) as loader, plain:
        assert loader.mixup_enabled
        assert not plain.mixup_enabled
        mixed, _ = next(iter(loader))
        mixed = mixed.clone()
        loader.mixup_enabled = False
        assert not loader.mixup_enabled
        loader.set_epoch(0)
        [(images, targets)], [(want, labels)] = copies(loader), copies(plain)
        assert torch.equal(images, want)
        assert torch.equal(targets, torch.nn.functional.one_hot(labels, 2).float())
        assert not torch.equal(images, mixed)
        loader.mixup_enabled = True
        loader.set_epoch(0)
        assert torch.equal(next(iter(loader))[0], mixed)
        with pytest.raises(UsageError, match="has no MixUp and no CutMix"):
            plain.mixup_enabled = True


def test_mixing_turned_off_on_the_device_leaves_images_alone(ds):
    options = {"augment": [*CROP, augment.CutMix()], "augment_on": "device"}
    with H5Loader(ds, 12, **options) as loader, H5Loader(ds, 12, augment=CROP) as plain:
        loader.mixup_enabled = False
        [(images, _)], [(want, _)] = copies(loader), copies(plain)
        assert (images.int() - want.int()).abs().max() <= 2
        assert np.asarray(images).dtype == np.uint8
