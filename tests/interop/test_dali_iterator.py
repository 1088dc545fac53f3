"""The pipeline in others' hands, and batches in the shape of DALIGenericIterator."""

import pickle

import numpy as np
import pytest

pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed")
import torch
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from h5feed import DamagedItemError, H5Dataset, H5Loader, UsageError, augment
from h5feed.interop.dali import DaliLoader, GenericIterator, pipeline
from images import jpeg_bytes, smooth
from loaders import write_kind
from packed import image_spec, write_packed

CROP = (augment.RandomResizedCrop(16), augment.RandomHorizontalFlip())
COUNT, BATCH = 12, 5
NAMES = ["data", "label", "index"]


@pytest.fixture
def ds(tmp_path):
    return H5Dataset(write_kind(tmp_path / "a.h5", "raw", count=COUNT))


def make(ds, **options):
    options.setdefault("shuffle", "sampler" not in options)
    return DaliLoader(ds, BATCH, augment=CROP, with_index=True, **options)


def expected_passes(ds, passes=2, **options):
    """The indices of some passes, batch by batch."""
    options.setdefault("shuffle", "sampler" not in options)
    loader = H5Loader(ds, BATCH, augment=CROP, with_index=True, **options)
    return [[indices.tolist() for *_, indices in loader] for _ in range(passes)]


def indices_of(batches):
    return [batch["index"].tolist() for (batch,) in batches]


# The pipeline


def test_dalis_own_iterator_takes_the_pipeline(ds):
    """Its len over an external source is 0; what it gives is right."""
    made = pipeline(ds, BATCH, shuffle=True, augment=CROP, with_index=True)
    iterator = DALIGenericIterator([made], NAMES, auto_reset=True)
    loader = H5Loader(ds, BATCH, shuffle=True, augment=CROP, with_index=True)
    for _ in range(2):
        for (batch,), (images, labels, indices) in zip(iterator, loader, strict=True):
            assert torch.equal(batch["index"], indices)
            assert torch.equal(batch["label"], labels[:, None])
            difference = batch["data"].permute(0, 3, 1, 2).int() - images.int()
            assert difference.abs().max() <= 2


def test_a_pipeline_goes_on_where_its_loader_stands(ds):
    loader = make(ds, seed=3)
    loader.set_epoch(4)
    next(iter(loader))
    again = make(ds)
    again.load_state_dict(loader.state_dict())
    made = again.pipeline()
    whole = H5Loader(ds, BATCH, shuffle=True, augment=CROP, with_index=True, seed=3)
    whole.set_epoch(4)
    first, second = ([i.tolist() for *_, i in whole] for _ in range(2))
    assert [out(made) for _ in range(2)] == first[1:]
    with pytest.raises(StopIteration):
        made.run()
    made.reset()
    assert [out(made) for _ in range(3)] == second


def out(made):
    return np.asarray(made.run()[-1].as_tensor()).tolist()


def test_what_feeds_a_pipeline_pickles_small(tmp_path):
    """Worker processes get it: nothing in it grows with the data."""
    data = [jpeg_bytes(smooth(32, 32, 0))] * 3000
    shapes = np.full((3000, 2), 32, np.int32)
    path = write_packed(tmp_path / "a.h5", data, spec=image_spec("jpeg"), stored_shapes=shapes)
    ds = H5Dataset(path)
    loader = make(ds)
    epochs = loader._epochs(0, 0)
    feed, _ = loader._factory.make(epochs, "raise", starts=None, with_index=True)
    info = type("BatchInfo", (), {"epoch_idx": 3, "iteration": 1})
    expected = feed(info)
    data = pickle.dumps(feed)
    assert len(data) < 5000
    for made, other in zip(pickle.loads(data)(info), expected, strict=True):
        assert all(map(np.array_equal, made, other))


def test_a_damaged_item_ends_a_pipeline_by_name(tmp_path):
    data = [jpeg_bytes(smooth(32, 32, seed)) for seed in range(COUNT)]
    shapes = np.full((COUNT, 2), 32, np.int32)
    spec = image_spec("jpeg")
    path = write_packed(tmp_path / "a.h5", data, spec=spec, stored_shapes=shapes)
    path.write_bytes(path.read_bytes().replace(data[1], bytes(len(data[1]))))
    made = pipeline(H5Dataset(path), BATCH, augment=CROP, shuffle=False)
    with pytest.raises(DamagedItemError, match="item 1 of /images"):
        made.run()
    made = pipeline(H5Dataset(path), BATCH, on_error="skip", with_index=True, shuffle=False)
    assert out(made) == [0, 2, 2, 3, 4]


# The iterator


def test_batches_are_dicts_in_lists(ds):
    iterator = GenericIterator(DaliLoader(ds, BATCH, shuffle=True, augment=CROP))
    assert len(iterator) == 3
    assert iterator.batch_size == BATCH
    sizes = []
    for data in iterator:
        assert isinstance(data, list)
        (batch,) = data
        assert list(batch) == ["data", "label"]
        assert batch["data"].shape[1:] == (3, 16, 16)
        assert batch["data"].is_contiguous(memory_format=torch.channels_last)
        assert batch["label"].dtype == torch.int64
        assert batch["label"].shape == (len(batch["data"]), 1)
        sizes.append(len(batch["data"]))
    assert sizes == [5, 5, 2]


@pytest.mark.parametrize("way", ["reset", "auto_reset", "iter"])
def test_epochs_follow_one_another(ds, way):
    iterator = GenericIterator(make(ds), NAMES, auto_reset=way == "auto_reset")
    found = []
    for _ in range(3):
        found.append(indices_of(iterator))
        if way == "reset":
            iterator.reset()
    assert found == expected_passes(ds, 3)


def test_an_ended_epoch_stays_ended_until_reset(ds):
    iterator = GenericIterator(make(ds), NAMES)
    for _ in range(3):
        iterator.next()
    for _ in range(2):
        with pytest.raises(StopIteration):
            iterator.next()
    iterator.reset()
    assert indices_of([iterator.next()]) == expected_passes(ds)[1][:1]


def test_after_a_break_iter_goes_on_and_reset_leaves(ds):
    first, second = expected_passes(ds)
    iterator = GenericIterator(make(ds), NAMES)
    for (batch,) in iterator:
        assert batch["index"].tolist() == first[0]
        break
    assert indices_of(iterator) == first[1:]
    iterator = GenericIterator(make(ds), NAMES)
    next(iterator)
    iterator.reset()
    assert indices_of(iterator) == second


def test_last_batch_policies(ds):
    first = expected_passes(ds, 1)[0]
    filled = GenericIterator(make(ds), NAMES, last_batch_policy=LastBatchPolicy.FILL)
    *_, (last,) = filled
    assert len(filled) == 3
    assert last["index"].tolist() == [*first[2], *[first[2][-1]] * 3]
    assert (last["label"][1:] == last["label"][1]).all()
    assert last["data"].shape == (BATCH, 3, 16, 16)
    assert last["data"].is_contiguous(memory_format=torch.channels_last)
    assert (last["data"][1:] == last["data"][1]).all()
    dropped = GenericIterator(make(ds), NAMES, last_batch_policy=LastBatchPolicy.DROP)
    assert len(dropped) == 2
    assert indices_of(dropped) == first[:2]


def test_it_is_resumed_elsewhere(ds):
    iterator = GenericIterator(make(ds, seed=2), NAMES)
    next(iterator)
    other = GenericIterator(make(ds), NAMES)
    next(other)
    other.load_state_dict(iterator.state_dict())
    first, second = expected_passes(ds, seed=2)
    assert indices_of(other) == first[1:]
    assert indices_of(other) == second


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_map": ["a", "a", "b"]}, "output_map=['a', 'a', 'b'] has a name twice"),
        ({"last_batch_policy": "drop"}, "last_batch_policy='drop' is not a LastBatchPolicy"),
    ],
)
def test_refuses_wrong_arguments(ds, options, message):
    with pytest.raises(UsageError) as caught:
        GenericIterator(make(ds), **options)
    assert message in str(caught.value)


def test_names_must_be_as_many_as_outputs(ds):
    message = r"output_map=\['data', 'label'\] names 2 outputs, the loader gives 3"
    with pytest.raises(UsageError, match=message):
        next(GenericIterator(make(ds)))
