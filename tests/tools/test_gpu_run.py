"""gpu_run.py on the CPU: every part once, small, and the tables made of what it wrote."""

import json
import sys
from pathlib import Path

import pytest
import torch

from h5feed import H5Dataset
from hosts import importable
from images import jpeg_bytes, smooth

torch.set_num_threads(1)
TOOLS = str(Path(__file__).parents[2] / "tools")


@pytest.fixture(scope="module")
def gpu_run():
    sys.path.insert(0, TOOLS)
    try:
        import gpu_run

        yield gpu_run
    finally:
        sys.path.remove(TOOLS)


@pytest.fixture(scope="module")
def results(gpu_run, tmp_path_factory):
    """All parts, on the CPU whatever there is, with three ways to load."""
    folder = tmp_path_factory.mktemp("gpu_run")
    few = ("synthetic", "H5Loader, crop on cpu", "H5Loader, device", "ImageFolder, DataLoader")
    with pytest.MonkeyPatch.context() as patch:
        importable(patch)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        whole = gpu_run.ways
        patch.setattr(
            gpu_run, "ways", lambda *a, **k: [way for way in whole(*a, **k) if way.name in few]
        )
        args = ["--out", str(folder / "out"), "--scratch", str(folder / "scratch")]
        assert gpu_run.main(args) == 0
    return folder / "out"


def read(results, name):
    return json.loads((results / f"cpu-{name}.json").read_text())


def test_each_part_writes_its_result_with_machine_and_versions(results):
    names = sorted(path.name for path in results.glob("*.json"))
    assert names == [
        "cpu-ablation.json",
        "cpu-alone.json",
        "cpu-cifar.json",
        "cpu-loaders-tiny.json",
        "cpu-ops.json",
    ]
    for path in results.glob("*.json"):
        values = json.loads(path.read_text())
        assert values["facts"]["versions"]["torch"] == torch.__version__
        assert values["facts"]["gpu"] is False
        assert values["facts"]["drawn"] is True
        assert "core" in values["machine"]


def test_loaders_stand_beside_the_synthetic_ceiling(results):
    rows = read(results, "loaders-tiny")["rows"]
    assert [(row["name"], row["threads"]) for row in rows] == [
        ("synthetic", None),
        ("H5Loader, crop on cpu", 1),
        ("H5Loader, crop on cpu", 2),
        ("H5Loader, device", 1),
        ("ImageFolder, DataLoader", 1),
    ]
    assert all(row["error"] is None for row in rows)
    ceiling = rows[0]["images_per_second"]
    for row in rows[1:]:
        assert row["share_of_ceiling"] == pytest.approx(row["images_per_second"] / ceiling)
        assert row["input_bound"] == pytest.approx(1 - row["share_of_ceiling"])
        assert row["cpu_seconds_per_1000"] > 0


def test_alone_loaders_have_no_ceiling(results):
    rows = read(results, "alone")["rows"]
    assert [row["name"] for row in rows[:2]] == ["H5Loader, crop on cpu"] * 2
    for row in rows:
        assert row["error"] is None
        assert row["images_per_second"] > 0
        assert row["share_of_ceiling"] is None


def test_ops_are_measured_eager_and_compiled(results):
    rows = read(results, "ops")["rows"]
    assert [row["name"] for row in rows] == ["padded crop, flip", "the same from NV12"]
    for row in rows:
        assert row["eager_ms"] > 0
        assert row["error"] is not None or row["compiled_ms"] > 0


def test_the_ablation_measured_real_processes(results):
    rows = read(results, "ablation")["ablation"]["rows"]
    names = ["the plain loop", "+ packed file", "+ H5Loader", "+ fused optimizer"]
    assert [row["name"] for row in rows] == names
    for row in rows:
        assert row["error"] is None
        assert min(row["images_per_second"], row["ceiling"], row["memory_bytes"]) > 0
        assert row["final_loss"] > 0
    # Three ways to load, one way to train: one ceiling
    assert len({row["ceiling"] for row in rows[:3]}) == 1


def test_a_loader_that_fails_is_told_in_its_row(gpu_run, tmp_path):
    from gpu.loaders import Way
    from gpu.loading import measure_loaders
    from packed import random_images, write_packed

    def broken(_trial):
        raise ImportError("no such library")

    file = write_packed(tmp_path / "a.h5", random_images(16, (16, 16)))
    scale = gpu_run.SMALL
    config = gpu_run.training_config(file, scale.models[0], scale, on_gpu=False)
    found = [way for way in gpu_run.ways(_photos(file), (1,), workers=0) if way.ceiling]
    taking = [*found, Way(name="broken", open=broken, threads=1)]
    rows = measure_loaders(config, taking, images=16, seconds=0.02, repeats=1)
    assert rows[0]["images_per_second"] > 0
    assert rows[1]["error"] == "ImportError: no such library"
    assert rows[1]["images_per_second"] is None


def _photos(file):
    from gpu.data import Photos

    return Photos(folder=file, raw=file, jpeg=file, drawn=True)


def test_cifar_trains_each_seed_anew(results):
    found = read(results, "cifar")
    assert [run["seed"] for run in found["runs"]] == [0, 1]
    assert found["runs"][0]["accuracy"] != found["runs"][1]["accuracy"] or (
        found["runs"][0]["seconds"] != found["runs"][1]["seconds"]
    )
    for run in found["runs"]:
        assert [epoch for epoch, _, _ in run["history"]] == [1]
        assert run["seconds"] == run["history"][-1][1]
    assert "A100" in found["anchors"]


def test_seconds_to_the_target_are_those_of_the_first_scoring_that_reaches_it(gpu_run, tmp_path):
    from gpu import cifar, data

    train, val, _ = data.prepare_cifar(None, tmp_path, count=80)
    config = cifar.recipe(train, val, epochs=2, on_gpu=False)
    found = cifar.train_seeds(config, seeds=1, target=0.0)
    assert found["reached"] == 1
    assert found["seconds_to_target_mean"] == found["runs"][0]["history"][0][1]
    twice = cifar.train_seeds(config, seeds=2, target=1.1)
    assert twice["reached"] == 0
    assert twice["seconds_to_target_mean"] is None
    # Compiling, warming up and the seed before leave no trace: the same seed, the same accuracies
    history = [[accuracy for _, _, accuracy in run["history"]] for run in twice["runs"]]
    assert history[0] == [accuracy for _, _, accuracy in found["runs"][0]["history"]]


def test_tables_are_made_of_the_files_alone(gpu_run, results, capsys, tmp_path):
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- gpu_run: begin -->\nof last year\n<!-- gpu_run: end -->\nafter\n")
    assert gpu_run.main(["--tables", "--out", str(results), "--readme", str(page)]) == 0
    said, text = capsys.readouterr().out, page.read_text()
    assert text.startswith("before\n<!-- gpu_run: begin -->\n**")
    assert text.endswith("<!-- gpu_run: end -->\nafter\n")
    assert "of last year" not in text
    for title in (
        "Training h5feed.bench.training:tiny",
        "CIFAR-10, gpu.speednet:small",
        "Loaders alone, crops of 32 px",
        "Ops on a batch of 8 images",
        "the plain loop",
    ):
        assert title in text
        assert title in said
    assert len(list(results.glob("*.png"))) == 3


def test_a_page_without_the_marks_is_left_alone(gpu_run, results, tmp_path):
    page = tmp_path / "README.md"
    page.write_text("nothing\n")
    with pytest.raises(SystemExit, match="lacks the lines <!-- gpu_run: begin -->"):
        gpu_run.main(["--tables", "--out", str(results), "--readme", str(page)])
    assert page.read_text() == "nothing\n"


def test_no_results_no_tables(gpu_run, tmp_path):
    with pytest.raises(SystemExit, match=r"holds no results of gpu_run\.py: run it first"):
        gpu_run.main(["--tables", "--out", str(tmp_path)])


def test_few_images_are_repeated(gpu_run, tmp_path):
    from gpu.data import draw_folder, repeat_folder

    draw_folder(tmp_path / "a", 6, (8, 8), classes=3)
    repeat_folder(tmp_path / "a", tmp_path / "b", 15)
    files = list((tmp_path / "b").rglob("*.jpg"))
    assert len(files) == 15
    assert len({path.resolve() for path in files}) == 6
    assert {path.parent.name for path in files} == {"class000", "class001", "class002"}


def test_a_folder_without_images_is_said(gpu_run, tmp_path):
    from gpu.data import repeat_folder

    with pytest.raises(SystemExit, match="holds no images: give a folder of class folders"):
        repeat_folder(tmp_path, tmp_path / "b", 3)


def test_what_an_interrupted_run_drew_is_not_taken_for_the_whole(gpu_run, tmp_path, monkeypatch):
    from gpu import data

    draw = data.draw_folder

    def interrupted(folder, count, size, classes):
        draw(folder, 3, size, classes)
        raise KeyboardInterrupt

    for prepare in (
        lambda count: data.prepare_photos(None, tmp_path, count=count, side=8).raw,
        lambda count: data.prepare_cifar(None, tmp_path, count=count)[0],
    ):
        with monkeypatch.context() as half:
            half.setattr(data, "draw_folder", interrupted)
            with pytest.raises(KeyboardInterrupt):
                prepare(12)
        sizes = [len(H5Dataset(prepare(count))) for count in (12, 12, 20)]
        assert sizes == [12, 12, 20]  # and another number is another folder
    assert not list(tmp_path.glob("*.unfinished"))
    given = data.prepare_photos(tmp_path / "drawn-12-8", tmp_path, count=15, side=8)
    assert not given.drawn
    assert len(H5Dataset(given.jpeg)) == 15


@pytest.fixture(scope="module")
def photos(gpu_run, tmp_path_factory):
    from gpu import data

    scratch = tmp_path_factory.mktemp("photos")
    return data.prepare_photos(None, scratch, count=24, side=32)


RIVALS = {"DALI, files": "nvidia.dali", "torchvision nvJPEG": "torchvision"}


@pytest.mark.parametrize("name", [*RIVALS, "DaliLoader, raw", "DaliLoader, jpeg", "H5Loader, jpeg"])
def test_what_decodes_on_a_gpu_runs_on_the_cpu_as_well(gpu_run, photos, name):
    """Every image once an epoch, as the measuring checks."""
    from gpu.loading import measure_loaders

    pytest.importorskip(RIVALS.get(name, "nvidia.dali"))
    if name == "torchvision nvJPEG":
        _decode_or_skip()
    scale = gpu_run.SMALL
    config = gpu_run.training_config(photos.raw, scale.models[0], scale, on_gpu=False)
    taking = [way for way in gpu_run.ways(photos, (1,), workers=1) if way.name == name]
    (row,) = measure_loaders(config, taking, images=24, seconds=0.02, repeats=1, trains=False)
    assert row["error"] is None
    assert row["images_per_second"] > 0


def _decode_or_skip():
    """A torchvision built for another torch can be imported, but not decode."""
    from torchvision.io import decode_jpeg

    data = torch.frombuffer(bytearray(jpeg_bytes(smooth(8, 8))), dtype=torch.uint8)
    try:
        decode_jpeg(data)
    except RuntimeError as ex:
        pytest.skip(f"torchvision cannot decode here: {ex}")


class FakeGpu:
    """Its memory, as torch.cuda tells of it."""

    allocated, reserved, used, peak = 100, 300, 1000, 0

    def memory_allocated(self, device):
        return self.allocated

    def memory_reserved(self, device):
        return self.reserved

    def mem_get_info(self, device):
        return 9000 - self.used, 9000

    def max_memory_allocated(self, device):
        return self.peak

    def reset_peak_memory_stats(self, device):
        self.peak = self.allocated


def test_memory_is_that_of_one_loader_among_several(gpu_run):
    from gpu.loading import GpuShare

    gpu = FakeGpu()
    share = GpuShare(torch.device("cuda"), gpu)
    before = share.now()
    gpu.allocated, gpu.reserved, gpu.used = 600, 900, 1600  # images: torch took 600 of the driver
    share.opened(before)
    gpu.used = 1850  # and another library 250
    share.tried(before)
    assert (share.held, share.outside) == (500, 250)
    for peak in (1400, 1300):
        share.begin()
        gpu.peak = peak
        share.end(others=70)
    assert share.total == 1400 - 70 + 250
    assert GpuShare(torch.device("cpu")).total is None
