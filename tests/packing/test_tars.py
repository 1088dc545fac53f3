"""WebDataset's tar files as the source."""

import io
import json
import tarfile

import pytest

from h5feed import H5Dataset, pack
from h5feed.errors import PackError, UsageError
from h5feed.packing import tars
from h5feed.packing.output import OutputPaths
from h5feed.packing.sources import open_source
from packing.folders import png_bytes as image
from packing.folders import refusal, sha256
from packing.folders import source_keys as keys

SIZE = 16


def write_tar(path, members):
    """Write members given as (name, bytes); or text, or JSON."""
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            if not isinstance(data, bytes):
                data = (data if isinstance(data, str) else json.dumps(data)).encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def samples(first, count, *, more=lambda n: []):
    for n in range(first, first + count):
        yield f"x/{n:04}.png", image(n)
        yield f"x/{n:04}.cls", str(n % 3)
        yield from more(n)


@pytest.fixture
def shards(tmp_path):
    (tmp_path / "tars").mkdir()
    for k in range(3):
        write_tar(tmp_path / "tars" / f"train-{k:03}.tar", samples(4 * k, 4))
    return tmp_path / "tars"


def test_tars_pack_as_the_same_images_in_a_folder_do(shards, out):
    for n in range(12):
        path = out.with_name("src") / str(n % 3) / f"{n:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image(n))
    pack(out.with_name("src"), out.with_name("folder.h5"), size=SIZE, num_workers=0)
    pack(shards, out, size=SIZE, num_workers=2)
    ds, other = (H5Dataset(p, aspect="stored") for p in (out, out.with_name("folder.h5")))
    assert [path for path, _ in ds.samples[3:5]] == ["train-000.tar/x/0003", "train-001.tar/x/0004"]
    assert (ds.targets, ds.classes) == ([n % 3 for n in range(12)], ["0", "1", "2"])
    order = sorted(range(12), key=lambda n: (n % 3, n))  # the folder's
    assert all((ds[n][0] == other[order.index(n)][0]).all() for n in range(12))
    expected = sha256(out)
    pack(f"{shards}/train-*.tar", out, size=SIZE, num_workers=0, overwrite=True)
    assert sha256(out) == expected


def test_tars_are_named_in_many_ways(shards):
    everything = keys(open_source(shards))
    assert len(everything) == 12
    paths = [shards / f"train-00{k}.tar" for k in range(3)]
    for src in (paths, f"{shards}/train-{{000..002}}.tar", f"{shards}/train-00{{0,1,2}}.tar"):
        assert keys(open_source(src)) == everything
    assert keys(open_source(paths[1])) == everything[4:8]
    assert keys(open_source([paths[2], paths[0]])) == everything[8:] + everything[:4]
    with pytest.raises(UsageError, match=r"there is no file '.*/train-003.tar'"):
        open_source(f"{shards}/train-{{000..003}}.tar")
    with pytest.raises(UsageError, match=r"\*.tar': there is no file '.*/none-\*.tar'"):
        open_source(f"{shards}/none-*.tar")
    with pytest.raises(UsageError, match=r"SRC names files of '.h5', '.tar': give a folder, or"):
        open_source([paths[0], "a.h5"])


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_so_many_processes_look_into_tars(shards, monkeypatch, num_workers):
    made = []
    pool = tars.ProcessPoolExecutor
    monkeypatch.setattr(tars, "ProcessPoolExecutor", lambda *a: made.append(a[0]) or pool(*a))
    assert len(open_source(shards, num_workers=num_workers)) == 12
    assert made == [2] * (num_workers == 2)


def test_several_sets_in_one_folder_are_refused_with_the_commands(shards):
    write_tar(shards / "val-000.tar", samples(0, 1))
    assert refusal(UsageError, shards) == (
        f"SRC '{shards}' holds several sets of files (train*.tar, val*.tar); pack each by itself:\n"
        f"  pack-h5 '{shards}/train*.tar' OUT.h5\n  pack-h5 '{shards}/val*.tar' OUT.h5"
    )
    (shards / "cats").mkdir()
    assert refusal(UsageError, shards).startswith("no images")  # class folders come first


def test_what_stands_beside_an_image_is_its_columns(tmp_path):
    def more(n):
        yield f"x/{n:04}.json", {"width": n, "tags": ["a"] * (n % 2) + ["b"]}
        yield f"x/{n:04}.txt", f"number {n}\n"
        yield f"x/{n:04}.npy", b"?"

    path = write_tar(tmp_path / "a.tar", samples(0, 4, more=more))
    source = open_source(path, fields=["txt", "width:int64"])
    assert source.labels.tolist() == [0, 1, 2, 0]
    text = source.fields["txt"]
    assert [text.type.value(text.item(n)) for n in range(4)] == [f"number {n}" for n in range(4)]
    assert source.fields["width"].data.tolist() == [0, 1, 2, 3]
    assert source.notes == (
        "left out of the table: 1 column ('tags')",
        "left out of the tars, members of other kinds: 4 .npy",
    )
    several = open_source(path, label_column="tags")
    assert (several.classes, several.labels.tolist()) == (("a", "b"), [[0, 1], [1, 1]] * 2)


def test_class_names_and_images_alone(tmp_path):
    members = [("1.png", image(0)), ("1.cls", "dog"), ("2.png", image(1)), ("2.cls", "cat")]
    source = open_source(write_tar(tmp_path / "a.tar", members))
    assert (source.classes, source.labels.tolist()) == (("cat", "dog"), [1, 0])
    source = open_source(write_tar(tmp_path / "a.tar", [*members[::2], ("3.txt", "none")]))
    assert (source.classes, source.labels.tolist()) == ((), [-1, -1])
    assert source.notes == ("left out, without an image: 1 sample",)


@pytest.mark.parametrize(
    ("members", "options", "said"),
    [
        ([("1.cls", "0"), ("2.png", image(0))], {}, "a.tar, sample '2', column 'cls': missing"),
        ([("1.jpg", b"x"), ("1.png", b"x")], {}, "a.tar: sample '1' has two images: give each its"),
        ([("1.jpg", b"x"), ("1.jpg", b"x")], {}, "a.tar: sample '1' has two images: give each its"),
        ([("1.jpg", b"x"), ("1.cls", "0"), ("1.cls", "1")], {}, "sample '1' has 'cls' twice: keep"),
        ([("1.jpg", b"x"), ("1.json", "{")], {}, "a.tar: '1.json' is not json in UTF-8 (Expecting"),
        ([("1.jpg", b"x"), ("1.txt", b"\xff")], {}, "a.tar: '1.txt' is not txt in UTF-8 ("),
        ([("1.jpg", b"x"), ("1.cls", "0.5")], {}, "column 'cls': '0.5' is not a whole number"),
        ([("1.txt", "x")], {}, "lists no images"),
        ([("1.jpg", b"x")], {"label_column": "y"}, "label_column='y': "),
        ([("1.jpg", b"x")], {"path_column": "y"}, "path_column=y: the images of a tar are its mem"),
        ([("1.jpg", b"x")], {"masks": "m"}, "masks=m is about a folder, and SRC is .tar files"),
    ],
)
def test_a_mistake_in_a_tar_is_named(tmp_path, members, options, said):
    if said.startswith("a.tar, sample '2'"):
        members = [("0.png", image(0)), ("0.cls", "0"), *members]
    assert said in refusal(UsageError, write_tar(tmp_path / "a.tar", members), **options)


def test_tars_are_named_in_an_error_wherever_one_stands(tmp_path, monkeypatch):
    write_tar(tmp_path / "a.tar", samples(0, 1))
    monkeypatch.chdir(tmp_path)
    said = refusal(UsageError, "a.tar", fields=["nope"])
    assert said.startswith("field='nope': *.tar has no such column; its columns are 'cls'")


@pytest.mark.parametrize("cut", [100, 512 + 30, -700, -1024])
def test_a_tar_that_is_cut_off_is_one_sentence(tmp_path, cut):
    good = write_tar(tmp_path / "a.tar", samples(0, 1))
    whole = write_tar(tmp_path / "b.tar", samples(4, 2)).read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512 + 1024  # without the padding of the record
    (tmp_path / "b.tar").write_bytes(whole[:end][:cut])
    text = refusal(PackError, [good, tmp_path / "b.tar"])
    assert text.startswith(f"{tmp_path}/b.tar is not a tar file, or cut off (")
    assert text.endswith("): fetch it again")


def test_a_compressed_tar_is_one_sentence(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w:gz"):
        pass
    text = refusal(UsageError, tmp_path / "a.tar")
    assert text == f"{tmp_path}/a.tar is compressed: unpack it to a plain tar first"


def test_a_damaged_image_in_a_tar_is_a_counted_skip(shards, out):
    members = [*samples(0, 3), ("9.png", b"\x89PNG\r\n\x1a\n no"), ("9.cls", "1")]
    write_tar(shards / "train-000.tar", members)
    summary = pack(shards, out, size=SIZE, num_workers=2)
    assert summary.items == 11
    assert [key for key, _ in summary.skipped] == ["train-000.tar/9"]


def test_an_interrupted_run_over_tars_goes_on(shards, out, monkeypatch):
    pack(shards, out, size=SIZE, num_workers=0)
    expected = sha256(out)
    out.unlink()
    read, seen = tars.read_file, iter(range(8))

    def press(path, **limits):
        if next(seen, None) is None:
            raise KeyboardInterrupt
        return read(path, **limits)

    with monkeypatch.context() as patched:
        patched.setattr(tars, "read_file", press)
        with pytest.raises(KeyboardInterrupt):
            pack(shards, out, size=SIZE, num_workers=0)
    assert OutputPaths.of(out).journal.exists()
    assert pack(shards, out, size=SIZE, num_workers=2, resume=True).resumed >= 4
    assert sha256(out) == expected
