"""A set in the place of one file: the same items, in the same order, by whatever reads them."""

import os
import pickle
import resource
import shutil

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from h5feed import H5Dataset, H5Loader, augment
from h5feed.errors import DamagedItemError, H5FormatError, UsageError
from h5feed.feed import files as module
from h5feed.feed.files import PackedFiles
from h5feed.store import write_index
from loaders import KINDS, assert_same, by_index, write_kind
from packed import (
    further_fields,
    random_images,
    split_into_set,
    write_packed,
    write_set,
)

CROP = [augment.RandomResizedCrop(16), augment.RandomHorizontalFlip()]


@pytest.fixture
def both(tmp_path):
    """One file of 24 raw images with masks and further fields, and the same items as a set."""
    images = random_images(24)
    masks = [np.full((32, 32, 1), k, np.uint8) for k in range(24)]
    one = write_packed(tmp_path / "one.h5", images, masks=masks, further=further_fields(24))
    return one, split_into_set(one, tmp_path / "set")


def shard_names(folder):
    return sorted(path.name for path in folder.glob("shard-*.h5"))


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return np.array_equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_items_and_batches_are_those_of_one_file(tmp_path, kind):
    path = write_kind(tmp_path / "one.h5", kind)
    folder = split_into_set(path, tmp_path / "set")
    one, several = H5Dataset(path, aspect="stored"), H5Dataset(folder, aspect="stored")
    assert len(one) == len(several)
    assert one.samples == several.samples
    for index in range(len(one)):
        assert same(one[index], several[index])
    made = [
        by_index(H5Loader(ds, 5, shuffle=True, augment=CROP, num_workers=2, with_index=True))
        for ds in (one, several)
    ]
    assert_same(made[1], made[0])


def test_attributes_are_those_of_one_file(both):
    one, several = map(H5Dataset, both)
    for name in ("classes", "targets", "samples", "imgs", "class_to_idx", "extensions"):
        assert getattr(one, name) == getattr(several, name), name
    assert several.root == str(both[1])
    assert f"Root location: {both[1]}" in repr(several)
    for index in range(24):
        assert one.files.key(index) == several.files.key(index)
    assert one.files.source_shapes.tolist() == several.files.source_shapes.tolist()
    for name, column in one.fields.items():
        assert [str(value) for value in column] == [str(v) for v in several.fields[name]]
    assert np.asarray(several.fields["price"]).tolist() == (np.arange(24) / 2).tolist()


def test_select_and_fields_of_a_batch(both):
    found = []
    for path in both:
        ds = H5Dataset(path, target="all")
        chosen = ds.select(lambda columns: (columns["class"] == "cat") & (columns["price"] > 3))
        loader = H5Loader(ds, 4, indices=chosen, shuffle=True, seed=2, num_workers=1)
        found.append((chosen, list(loader)))
    assert same(found[0], found[1])


@pytest.mark.parametrize("options", [{"engine": "process"}, {"io": "read"}, {"shuffle": "block"}])
def test_every_way_of_reading(both, options):
    given = {"shuffle": True, "augment": CROP, "num_workers": 2, "with_index": True} | options
    made = [by_index(H5Loader(H5Dataset(path, target="label"), 5, **given)) for path in both]
    if options.get("shuffle") != "block":
        assert_same(made[1], made[0])
    assert made[0].keys() == made[1].keys()


def test_each_sample_once_by_shards(both):
    loader = H5Loader(H5Dataset(both[1], target="label"), 5, shuffle="shards", streams=2, window=1,
                      with_index=True, num_workers=1)  # fmt: skip
    assert by_index(loader).keys() == set(range(24))


def test_a_state_goes_on_over_a_set_and_not_over_the_file(both):
    one, several = (H5Dataset(path, target="label") for path in both)
    loader = H5Loader(several, 5, shuffle=True, with_index=True, num_workers=1)
    passing = iter(loader)
    first = [next(passing)[2].tolist() for _ in range(2)]
    state = loader.state_dict()
    loader.close()
    again = H5Loader(several, 7, shuffle=True, with_index=True, num_workers=1)
    again.load_state_dict(state)
    rest = [index for _, _, indices in again for index in indices.tolist()]
    assert sorted([*first[0], *first[1], *rest]) == list(range(24))
    with pytest.raises(UsageError, match="open the files it was made with"):
        H5Loader(one, 5, shuffle=True).load_state_dict(state)


def test_a_stock_dataloader_s_workers(both):
    ds = H5Dataset(both[1], target="label")
    loader = DataLoader(ds, batch_size=6, num_workers=1, multiprocessing_context="fork")
    assert [int(label) for _, labels in loader for label in labels] == ds.targets


def test_it_pickles_as_its_folder_and_is_opened_again(both):
    files = PackedFiles([both[1]])
    pickled = pickle.dumps(files)
    assert len(pickled) < 600
    again = pickle.loads(pickled)
    assert all(shard is None for shard in again._shards)
    assert np.array_equal(again.item("images", 5), files.item("images", 5))


def test_a_shard_is_opened_when_its_first_item_is_needed(both):
    ds = H5Dataset(both[1])
    assert ds.files._shards == [None] * 3
    ds[0]
    assert sum(shard is not None for shard in ds.files._shards) == 1


def test_the_shard_opened_first_is_let_go_and_views_of_it_live(both, monkeypatch):
    monkeypatch.setattr(module, "_MOST_MAPPED", 2)
    one, several = map(H5Dataset, both)
    held = [several[index] for index in range(24)]
    assert sum(shard is not None for shard in several.files._shards) == 2
    assert all(same(held[index], one[index]) for index in range(24))
    loader = H5Loader(several, 6, shuffle=True, num_workers=2, with_index=True)
    assert len(by_index((i, m, k) for i, m, k in loader)) == 24


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts what Linux lists there")
@pytest.mark.parametrize("reads", [False, True])
def test_more_files_than_descriptors(tmp_path, reads):
    images = random_images(3, (4, 4))
    write_packed(tmp_path / "0.h5", images)
    for number in range(1, 120):
        os.link(tmp_path / "0.h5", tmp_path / f"{number}.h5")
    names = [f"{number}.h5" for number in range(120)]
    write_index(tmp_path, names, generation=1, plan={})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors() + 90, hard))
    try:
        for root in (tmp_path, [tmp_path / name for name in names]):
            files = PackedFiles([root]) if root == tmp_path else PackedFiles(root)
            files = files.reading() if reads else files
            found = [files.item("images", index) for index in range(len(files))]
            assert all(np.array_equal(found[k], images[k % 3]) for k in range(360))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_damaged_item_is_named_by_its_shard(tmp_path):
    one = write_kind(tmp_path / "one.h5", "jpeg")
    folder = split_into_set(one, tmp_path / "set")
    files = PackedFiles([folder])
    number, address, length = (int(a[0]) for a in files._ranges("images", np.array([7])))
    with open(files.index.paths[number], "r+b") as file:
        file.seek(address)
        file.write(bytes(length))
    ds = H5Dataset(folder)
    with pytest.raises(DamagedItemError, match=r"shard-0000\d-of-00003\.h5: item \d of /images"):
        ds[7]
    loader = H5Loader(ds, 4, on_error="skip", augment=CROP, num_workers=1, with_index=True)
    assert {i for _, _, indices in loader for i in indices.tolist()} == set(range(12)) - {7}


def test_what_is_wrong_with_a_shard_is_said_when_it_is_needed(both, tmp_path):
    folder = both[1]
    names = shard_names(folder)
    ds = H5Dataset(folder, target="label")
    number = ds.files.locate(0)[0]
    (folder / names[number]).rename(tmp_path / "away.h5")
    with pytest.raises(H5FormatError, match=f"{names[number]}: this shard of the set is missing"):
        ds[0]
    with pytest.raises(H5FormatError, match=f"{names[number]}: this shard of the set is missing"):
        list(H5Loader(ds, 4, num_workers=1))
    shutil.copy(folder / names[number - 1], folder / names[number])
    with pytest.raises(H5FormatError, match=f"{names[number]}: another shard than"):
        ds[0]
    os.replace(tmp_path / "away.h5", folder / names[number])
    ds[0]


def test_a_new_generation_leaves_who_reads_the_old_one_alone(both):
    folder = both[1]
    ds, one = H5Dataset(folder, target="label"), H5Dataset(both[0], target="label")
    write_index(folder, shard_names(folder)[:2], generation=2, plan={})
    assert len(H5Dataset(folder)) == 16
    assert all(same(ds[index], one[index]) for index in range(24))
    with pytest.raises(H5FormatError, match="has changed since this dataset was opened"):
        pickle.loads(pickle.dumps(ds))


def test_what_is_appended_is_not_seen_by_who_opens_an_older_generation_again(tmp_path):
    folder, images = tmp_path / "set", random_images(9)
    folder.mkdir()
    names = [f"{number}.h5" for number in range(3)]
    kinds = [("a", "b"), ("a", "b"), ("a", "b", "c")]
    for number, (name, classes) in enumerate(zip(names, kinds, strict=True)):
        write_packed(
            folder / name,
            images[3 * number :][:3],
            classes=classes,
            positions=np.arange(3) * 2 + number % 2,
        )
    write_index(folder, names[:2], generation=1, plan={}, bases=[0, 0])
    ds = H5Dataset(folder)
    pickled = pickle.dumps(ds)
    write_index(folder, names, generation=2, plan={}, bases=[0, 0, 6])
    again = pickle.loads(pickled)
    assert (len(again), again.classes, again.files.fingerprint) == (
        6,
        ["a", "b"],
        ds.files.fingerprint,
    )
    assert again.samples == ds.samples
    assert all(same(again[index], ds[index]) for index in range(6))
    assert (len(H5Dataset(folder)), H5Dataset(folder).classes) == (9, ["a", "b", "c"])


def test_damaged_positions_are_refused_whatever_order_they_make(both):
    with h5py.File(both[1] / "index.h5", "r+") as file:
        file["positions"][:] = 1 << 30
    ds = H5Dataset(both[1], target="label")
    with pytest.raises(H5FormatError, match=r"positions .*damaged"):
        list(H5Loader(ds, 4, shuffle="shards", streams=1, num_workers=1))
    with pytest.raises(H5FormatError, match="column positions is damaged"):
        ds[0]


def test_larger_images_than_max_pixels_are_refused_at_opening(tmp_path):
    path = write_kind(tmp_path / "one.h5", "keep")
    folder = split_into_set(path, tmp_path / "set")
    with pytest.raises(H5FormatError, match=r"shard-.*more than max_pixels=100; give"):
        H5Dataset(folder, max_pixels=100)


def test_a_set_among_files_and_one_without_an_index_are_refused(both):
    one, folder = both
    with pytest.raises(UsageError, match=r"the set '.*set' among others: give it alone, or join"):
        H5Dataset([one, folder])
    (folder / "index.h5").unlink()
    with pytest.raises(UsageError, match=r"a set without its index: finish it with `merge-h5 "):
        H5Dataset(folder)


def test_small_images_of_several_shards_are_copied_together(tmp_path):
    images = random_images(40, (8, 8))
    folder = write_set(tmp_path / "set", images)
    for ops in (None, [augment.RandomCrop(8, padding=2)]):
        loader = H5Loader(H5Dataset(folder), 16, augment=ops or [], num_workers=1, shuffle=True)
        one = H5Loader(
            H5Dataset(write_packed(tmp_path / "one.h5", images)), 16, augment=ops or [],
            num_workers=1, shuffle=True,
        )  # fmt: skip
        for (a, x), (b, y) in zip(loader, one, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(x, y)
