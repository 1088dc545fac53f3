import json
import os
import sys

import pytest
from PIL import Image

from cli.terminal import AtTerminal
from h5feed import pack
from h5feed.bench.compare import CompareOptions, crop_in_words, settings
from h5feed.cli.bench import main
from h5feed.feed.files import PackedFiles
from images import jpeg_bytes, smooth
from loaders import write_kind


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    root = tmp_path_factory.mktemp("bench")
    for number in range(24):
        path = root / "images" / f"class{number % 3}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg_bytes(smooth(40, 50, seed=number)))
    pack(root / "images", root / "data.h5", size="32", num_workers=0)
    return root


def bench(packed, *more):
    usual = ["--crop", "16", "--batch-size", "4", "--workers", "1", "--quick"]
    return main([str(packed / "data.h5"), *usual, *more])


def test_json_tells_everything_of_every_loader(packed, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    assert bench(packed, "--images", str(packed / "images"), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in told["outcomes"]}
    assert {"h5py, the usual way", "H5Loader", "make_dataloader(H5Dataset)"} <= set(rows)
    assert any("DataLoader" in name and "folder" in name.lower() for name in rows)
    for row in rows.values():
        assert row["images_per_second"] > 0, row["name"]
        assert len(row["rates"]) == 2
        assert row["error"] is None
    assert rows["H5Loader"]["checked_images"] >= 24
    assert rows["h5py, the usual way"]["dtype"] == "float32"
    assert rows["bare crop loop"]["ceiling"]
    assert told["facts"]["machine"]["cores"] >= 1
    assert told["facts"]["versions"]["torch"]
    assert not told["smoke"]
    assert str(packed) not in json.dumps(told)


def test_small_set_is_a_smoke_run_without_a_headline(packed, capsys):
    assert bench(packed, "--only", "H5Loader", "H5Dataset +", "--batch-size", "8") == 0
    out = capsys.readouterr().out
    assert "Smoke run: 24 images are fewer than 4 batches of 8." in out
    assert "×" not in out.partition("Smoke run")[2]


def test_markdown_and_plot(packed, capsys, tmp_path):
    plot = tmp_path / "bench.png"
    assert bench(packed, "--only", "H5Dataset", "bare", "--markdown", "--plot", str(plot)) == 0
    out = capsys.readouterr().out
    assert "| H5Dataset + DataLoader |" in out
    assert "| [bare crop loop] |" in out
    with Image.open(plot) as image:
        assert image.width > 800


@pytest.mark.parametrize(
    ("plot", "said"),
    [
        ("x.jpeg", " does not end in .png or .svg or .pdf: give a name that does"),
        ("data.h5", " does not end in .png or .svg or .pdf: give a name that does"),
        ("same.svg", " is a file that is read here: give another name"),
        ("images", " is a folder: give a file in it"),
        ("none/x.png", ": the folder {none} does not exist: make it first"),
    ],
)
@pytest.mark.parametrize("begin", [[], ["train"]], ids=["bench", "train"])
def test_a_plot_that_cannot_be_written_is_refused_before_measuring(
    packed, capsys, monkeypatch, begin, plot, said
):
    for work in ("compare", "train"):
        monkeypatch.setattr(f"h5feed.cli.bench.{work}", lambda *_: pytest.fail("measured"))
    same = packed / "same.svg"
    same.unlink(missing_ok=True)
    same.hardlink_to(packed / "data.h5")
    before = same.read_bytes()
    place = packed / plot
    assert main([*begin, str(packed / "data.h5"), "--plot", str(place)]) == 2
    said = said.format(none=packed / "none")
    assert capsys.readouterr().err.endswith(f": --plot {place}{said}\n")
    assert same.read_bytes() == before


def test_a_plot_without_matplotlib_is_refused_before_measuring(packed, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("h5feed.cli.bench.compare", lambda *_: pytest.fail("measured"))
    assert bench(packed, "--plot", str(packed / "x.png")) == 1
    assert "matplotlib is not installed" in capsys.readouterr().err


def test_two_forms_of_the_output_are_refused(packed, capsys):
    assert bench(packed, "--json", "--markdown") == 2
    said = "bench-h5: json and markdown are two forms of one output: give one of them\n"
    assert capsys.readouterr().err == said


def test_ctrl_c_ends_a_running_measurement(packed):
    """It once said so and stayed, for as long as a measurement may take: ten minutes."""
    long = ["--seconds", 200, "--batch-size", 4, "--crop", 16, "--workers", 1]
    with AtTerminal("h5feed.cli.bench", packed / "data.h5", *long, "--only", "bare") as running:
        running.read_until(b"round 1 of 3")
        running.press_ctrl_c()
        assert running.process.wait(timeout=240) == 130
        running.read_until()
    assert b"bench-h5: interrupted" in running.shown


def test_wrong_folder_is_named(packed, tmp_path, capsys):
    assert bench(packed, "--images", str(tmp_path)) == 2
    said = capsys.readouterr().err
    assert f"images={tmp_path} lacks 24 of the 24 images of the file" in said
    assert "give the folder it was packed from" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "0"], "workers=0 is too small: give 1 or more"),
        (["--seconds", "nan"], "seconds=nan is too small: give 0.05 or more"),
        (["--seconds", "inf"], "seconds=inf is too large: give 300 or less"),
        (["--repeats", "0"], "repeats=0 is too small: give 1 or more"),
        (["--only", "nobody"], "only=['nobody'] matches no loader: give a part of "),
    ],
)
def test_wrong_options_are_usage_errors(packed, capsys, arguments, said):
    assert bench(packed, *arguments) == 2
    assert said in capsys.readouterr().err


def test_missing_file_fails(tmp_path, capsys):
    assert main([str(tmp_path / "none.h5"), "--quick"]) == 1
    assert "none.h5" in capsys.readouterr().err


def test_a_loader_that_fails_ends_the_run_with_its_name(packed, capsys, monkeypatch):
    monkeypatch.setattr("h5feed.bench.compare._SUBJECTS", "no.such.module")
    assert bench(packed, "--only", "H5Loader") == 1
    assert "H5Loader: its process ended (exit code 1" in capsys.readouterr().err


def train(packed, *more):
    usual = ["--crop", "16", "--batch-size", "4", "--workers", "1", "--quick"]
    return main(["train", str(packed / "data.h5"), *usual, *more])


def test_training_says_what_the_loader_leaves_of_the_ceiling(packed, capsys):
    only = ["--only", "make_dataloader", "synthetic"]
    assert train(packed, *only, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in told["outcomes"]}
    assert set(rows) == {"make_dataloader(H5Dataset)", "synthetic batches"}
    assert rows["synthetic batches"]["ceiling"]
    assert all(row["images_per_second"] > 0 for row in rows.values())
    assert told["kind"] == "training"
    assert told["facts"]["model"] == "tiny"


def test_training_is_told_in_its_own_columns(packed, capsys):
    only = ["--only", "folder", "ImageFolder", "make_dataloader", "synthetic"]
    assert train(packed, *only, "--images", str(packed / "images")) == 0
    out = capsys.readouterr().out
    assert "AU" in out
    assert "bound" in out
    assert "Packing all of it takes about" in out  # in how many epochs it pays depends on the load


def test_training_has_no_sweep_and_knows_its_models(packed, capsys):
    assert train(packed, "--sweep") == 2
    assert "sweep is for loaders alone" in capsys.readouterr().err
    assert train(packed, "--model", "none", "--only", "synthetic") == 1
    assert "--model 'none' is not known" in capsys.readouterr().err


def test_a_crop_is_what_the_images_have_and_a_larger_one_is_said(packed):
    files = PackedFiles([packed / "data.h5"])
    usual = CompareOptions().for_file(files)
    assert (usual.side, usual.batch) == (32, 24)
    assert crop_in_words(files, usual) == "32²"
    large = CompareOptions(crop=48).for_file(files)
    assert crop_in_words(files, large) == "48² (enlarged: stored at 32)"
    assert crop_in_words(files, CompareOptions(crop=16).for_file(files)) == "16²"


def test_images_of_their_own_sizes_are_cropped_as_usual(tmp_path):
    original = write_kind(tmp_path / "a.h5", "original", 3)
    assert CompareOptions().for_file(PackedFiles([original])).side == 224


@pytest.mark.parametrize(
    ("given", "images", "batch"),
    [
        ({}, 100_000, 256),
        ({}, 1024, 256),
        ({}, 1023, 128),
        ({}, 500, 64),
        ({}, 64, 64),
        ({}, 10, 10),
        ({"quick": True}, 100_000, 64),
        ({"batch_size": 300}, 300, 300),
        ({"batch_size": 300}, 10, 10),
        ({"batch_size": 300, "quick": True}, 1000, 300),
    ],
)
def test_a_small_set_gets_small_batches(given, images, batch):
    assert CompareOptions(**given).for_set_of(images).batch_size == batch


def test_sweep_measures_worker_counts_and_batch_sizes(monkeypatch):
    monkeypatch.setattr("h5feed.bench.compare.available_cores", lambda: 4)
    given = settings(CompareOptions(sweep=True), 1000)
    assert [(options.batch_size, workers) for options, workers in given] == [
        (size, workers) for size in (64, 256) for workers in (1, 2, 4)
    ]
    assert {o.batch_size for o, _ in settings(CompareOptions(sweep=True, batch_size=9), 9)} == {9}
    assert [w for _, w in settings(CompareOptions(workers=3), 1000)] == [3]
