"""The index of a set: what it says, and what is refused."""

import os
import shutil
import tracemalloc
from dataclasses import replace

import h5py
import numpy as np
import pytest

from h5feed.errors import H5FormatError, UsageError
from h5feed.jpeg import encode_jpeg
from h5feed.store import open_index, read_index, write_index
from h5feed.store.index import INDEX_NAME
from packed import further_fields, image_spec, random_images, write_packed, write_set


@pytest.fixture
def images():
    return random_images(11)


@pytest.fixture
def folder(tmp_path, images):
    return write_set(tmp_path / "set", images, further=further_fields(11))


def names(folder):
    return sorted(path.name for path in folder.glob("shard-*.h5"))


def refusal(path):
    with pytest.raises(H5FormatError) as caught:
        open_index(path)
    return str(caught.value)


def test_it_says_what_the_shards_say(folder, images):
    index = open_index(folder)
    assert (len(index), index.generation, index.plan) == (11, 1, {"made": "by a test"})
    assert index.starts.tolist() == [0, 4, 8, 11]
    assert list(index.specs) == ["images"]
    assert list(index.fields) == ["boxes", "caption", "price"]
    for number, path in enumerate(index.paths):
        index.check_rows(number)
        shard, items = read_index(path), index.items(number)
        for name in ("labels", "key_bytes", "key_offsets", "source_shapes", "crc32"):
            assert np.array_equal(getattr(items, name), getattr(shard, name)), name
        for name, extent in index.further(number).items():
            assert extent.described() == shard.fields[name].described()
            assert [extent.item_range(i) for i in range(len(shard))] == [
                shard.fields[name].item_range(i) for i in range(len(shard))
            ]
        mapped, extent = index.open_shard(number), index.extents(number)["images"]
        for i, position in enumerate(shard.positions):
            assert np.array_equal(mapped.item(extent, i), images[position])


def test_order_leads_from_the_source_s_to_the_stored_and_positions_back(folder):
    index = open_index(folder)
    order, positions = index.columns["order"], index.columns["positions"]
    kept = [read_index(path).positions for path in index.paths]
    assert positions.tolist() == np.concatenate(kept).tolist()
    assert order[positions].tolist() == list(range(11))


@pytest.mark.parametrize("fit", ["stretch", "keep"])
def test_jpeg_of_one_size_needs_no_sizes_in_it(tmp_path, fit):
    sizes = np.int32([[32, 40], [48, 32], [32, 32]] if fit == "keep" else [[32, 32]] * 3)
    images = [encode_jpeg(np.full((h, w, 3), 80, np.uint8), quality=90) for h, w in sizes.tolist()]
    spec = image_spec("jpeg", fit=fit)
    folder = write_set(tmp_path / "set", images, spec=spec, stored_shapes=sizes, shards=2)
    index = open_index(folder)
    assert ("shapes" in index.columns) == (fit == "keep")
    for number, path in enumerate(index.paths):
        index.check_rows(number)
        extent, wanted = index.extents(number)["images"], read_index(path).extents["images"]
        assert extent.offsets.tolist() == wanted.offsets.tolist()
        assert extent.shapes.tolist() == wanted.shapes.tolist()
        part = "images/segments"
        assert index.addresses[part][number] == wanted.segments.start
        assert index.lengths[part][number] == wanted.segments.nbytes
        if fit == "keep":
            assert index.rows(part, number).tolist() == wanted.segments.offsets.tolist()
        else:
            assert len(extent.offsets) == 1 + wanted.segments.nbytes // index.item_bytes(part)


def test_files_without_positions_follow_each_other(tmp_path, images):
    for number in range(2):
        write_packed(tmp_path / f"{number}.h5", images[number::2])
    write_index(tmp_path, ["1.h5", "0.h5"], generation=1, plan={})
    index = open_index(tmp_path)
    assert index.columns["order"].tolist() == list(range(11))
    assert index.starts.tolist() == [0, 5, 11]


def test_bases_put_a_later_packing_behind(tmp_path, images):
    for number, part in enumerate(([2, 0], [1, 3])):
        write_packed(tmp_path / f"{number}.h5", images[:2], positions=np.array(part))
        write_packed(tmp_path / f"b{number}.h5", images[:2], positions=np.array(part))
    shards = ["0.h5", "1.h5", "b0.h5", "b1.h5"]
    write_index(tmp_path, shards, generation=2, plan={}, bases=[0, 0, 4, 4])
    index = open_index(tmp_path)
    assert index.columns["positions"].tolist() == [2, 0, 1, 3, 6, 4, 5, 7]
    with pytest.raises(UsageError, match=r"0\.h5 and .*b0\.h5 both hold item 0 of the source"):
        write_index(tmp_path, shards, generation=3, plan={})
    assert open_index(tmp_path).generation == 2


def test_it_knows_all_classes_and_shards_of_fewer(tmp_path, images):
    write_packed(tmp_path / "0.h5", images[:2], classes=("a", "b"))
    write_packed(tmp_path / "1.h5", images[:3], classes=("a", "b", "c"))
    write_packed(tmp_path / "2.h5", images[:2], classes=("a", "c"))
    write_index(tmp_path, ["0.h5", "1.h5"], generation=1, plan={})
    assert open_index(tmp_path).classes == ("a", "b", "c")
    with pytest.raises(UsageError, match=r"2\.h5 and .*0\.h5 differ in their classes"):
        write_index(tmp_path, ["0.h5", "1.h5", "2.h5"], generation=2, plan={})


def test_who_has_the_old_index_open_goes_on(folder, images):
    index = open_index(folder)
    before = index.columns["labels"].tolist()
    write_index(folder, names(folder)[:2], generation=2, plan={})
    assert (len(open_index(folder)), len(index)) == (8, 11)
    index.check_rows(2)
    assert index.columns["labels"].tolist() == before


def test_the_same_shards_make_the_same_index_whatever_was_there(folder):
    content = (folder / INDEX_NAME).read_bytes()
    (folder / INDEX_NAME).write_bytes(b"something else")
    write_index(folder, names(folder), generation=1, plan={"made": "by a test"})
    assert (folder / INDEX_NAME).read_bytes() == content
    assert sorted(os.listdir(folder)) == [INDEX_NAME, *names(folder)]


def test_a_shard_that_is_not_sound_leaves_the_index_as_it_was(folder):
    content = (folder / INDEX_NAME).read_bytes()
    os.truncate(folder / names(folder)[1], 5000)
    with pytest.raises(H5FormatError, match="shard-00001-of-00003"):
        write_index(folder, names(folder), generation=2, plan={})
    assert (folder / INDEX_NAME).read_bytes() == content
    assert sorted(os.listdir(folder)) == [INDEX_NAME, *names(folder)]


def columns_of(folder):
    found = []
    with h5py.File(folder / INDEX_NAME) as file:
        file.visititems(lambda name, item: found.append(name) if hasattr(item, "shape") else None)
    return found


def flip(folder, name):
    """Change a byte in the middle of a dataset of the index."""
    with h5py.File(folder / INDEX_NAME) as file:
        at = file[name].id.get_offset() + file[name].nbytes // 2
    with (folder / INDEX_NAME).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_wrong_bit_anywhere_is_refused(folder, tmp_path):
    for name in columns_of(folder):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        flip(copy, name)
        if name == "classes" or name.startswith("shards/"):
            assert "does not match its checksum" in refusal(copy), name
        else:
            index = open_index(copy)
            with pytest.raises(H5FormatError, match=r"column .* is damaged .*merge-h5"):
                list(map(index.check_rows, range(3)))
        shutil.rmtree(copy)


def test_what_is_no_index_is_refused(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "no set, for it has no index.h5" in refusal(tmp_path / "empty")
    assert "it is not the index of a set" in refusal(folder / names(folder)[0])
    with pytest.raises(H5FormatError, match=r"the index of a set.*give the folder it is in"):
        read_index(folder / INDEX_NAME)
    os.truncate(folder / INDEX_NAME, 20_000)
    assert "merge-h5" in refusal(folder)


def forge(folder, change):
    """Change an opened index, and make its checksums right again."""
    from h5feed.store import index as module

    with h5py.File(folder / INDEX_NAME, "r+") as file:
        change(file)
        columns = [n for n in ("labels", "source_shapes", "crc32") if n in file]
        assert columns
        found = {name: file.attrs[name] for name in file.attrs}
        facts = {n: v.decode() if isinstance(v, bytes) else int(v) for n, v in found.items()}
        tables = {f"shards/{name}": file["shards"][name][()] for name in file["shards"]}
        tables["classes"] = file["classes"][()]
        file.attrs["checksum"] = np.bytes_(module._checksum(facts, tables).encode())


def test_paths_for_names_and_bytes_outside_a_shard_are_refused(folder, tmp_path):
    def renamed(file):
        file["shards/names"][0] = b"../../../../../etc/passwd"[:26]

    def beyond(file):
        file["shards/addresses"][1, 0] = 1 << 40

    def negative(file):
        file["shards/addresses"][1, 0] = -4096

    def too_many(file):
        file["shards/counts"][0] = 1 << 61

    for change, said in (
        (renamed, "which is not a file's name"),
        (beyond, "outside its shard"),
        (negative, "outside its shard"),
        (too_many, "more items than there can be"),
    ):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        forge(copy, change)
        assert said in refusal(copy)
        shutil.rmtree(copy)


def test_a_missing_shard_is_named(folder):
    index, gone = open_index(folder), folder / names(folder)[1]
    gone.unlink()
    with pytest.raises(H5FormatError, match=r"shard-00001-of-00003\.h5: this shard .* is missing"):
        index.open_shard(1)


def test_another_shard_in_its_place_is_told(folder, images):
    index = open_index(folder)
    one, other = (folder / name for name in names(folder)[:2])
    shutil.copy(one, other)
    with pytest.raises(H5FormatError, match=r"shard-00001.*: another shard than .*merge-h5 "):
        index.open_shard(1)
    write_packed(other, images[:4])
    with pytest.raises(H5FormatError, match=r"shard-00001.*: another shard than "):
        index.open_shard(1)


def test_a_shard_cut_short_and_one_of_another_version_are_told(folder):
    index = open_index(folder)
    cut, newer = (folder / name for name in names(folder)[:2])
    os.truncate(cut, 5000)
    with pytest.raises(H5FormatError, match=r"shard-00000.*it has 5000 bytes of \d+.*merge-h5 "):
        index.open_shard(0)
    with h5py.File(newer, "r+") as file:
        file.attrs["format_version"] = np.int64(2)
    with newer.open("ab") as file:
        file.write(b"more")
    with pytest.raises(H5FormatError, match=r"shard-00001.*format_version=2, and this h5feed"):
        index.open_shard(1)


def write_sparse_index(folder, shard, shards, items):
    """An index of many shards, of none of which is more there than a name; columns are holes."""
    from h5feed.store import index as module

    one = module._one_index(read_index(shard))
    size = one.item_bytes("images")
    tables = replace(
        one,
        paths=tuple(f"{folder}/shard-{n:05}-of-{shards:05}.h5" for n in range(shards)),
        fingerprints=one.fingerprints * shards,
        starts=np.arange(shards + 1) * items,
        sizes=np.full(shards, int(one.addresses["images"][0]) + items * size),
        seals=np.full(shards, 100),
        addresses={"images": np.repeat(one.addresses["images"], shards)},
        lengths={"images": np.full(shards, items * size)},
        largest=np.repeat(one.largest, shards, axis=0),
        key_starts=np.arange(shards + 1) * items * 25,
    )
    module._write(folder / INDEX_NAME, tables, iter(()), {})


def test_opening_reads_nothing_that_has_a_row_for_each_item(tmp_path):
    """A hundred million items: 7 GB of index, of which a few MB are there."""
    shard = write_packed(tmp_path / "one.h5", random_images(1, (4, 4)))
    write_sparse_index(tmp_path, shard, shards=1000, items=100_000)
    tracemalloc.start()
    try:
        index = open_index(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    assert (len(index), len(index.paths)) == (100_000_000, 1000)
    assert index.columns["labels"].shape == (100_000_000,)
    bytes_an_item = os.stat(tmp_path / INDEX_NAME).st_size / len(index)
    assert 60 < bytes_an_item < 80  # with keys of 25 bytes
