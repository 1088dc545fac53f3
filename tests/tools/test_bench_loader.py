"""bench_loader.py on small files: everything once, and the README's table made of what it wrote."""

import json
import sys
from pathlib import Path

import pytest
import torch

from hosts import importable

torch.set_num_threads(1)
ROOT = Path(__file__).parents[2]
PHOTOS = ROOT / "data_samples" / "images"


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import bench_loader

        yield bench_loader
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.fixture(scope="module")
def results(tool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench_loader")
    with pytest.MonkeyPatch.context() as patch:
        importable(patch)
        patch.setattr(tool, "COLD_ITEMS", 512)
        patch.setattr(tool, "IMAGENET", 600)
        patch.setattr(tool, "SCHEDULED", (600, 800))
        patch.setattr(sys, "argv", ["bench_loader.py", str(PHOTOS), "--work", str(folder)])
        args = ["--work", str(folder), "--rounds", "1", "--seconds", "0.01", "--threads", "1"]
        tool.main([str(PHOTOS), *args, "--json", str(folder / "loader.json")])
    return folder / "loader.json"


def test_every_figure_stands_in_the_json_with_its_circumstances(results):
    (found,) = json.loads(results.read_text())
    assert [row["what"] for row in found["rows"]] == [
        "raw crop / bare loop",
        "jpeg crop / bare loop",
        "jpeg crop / region loop",
        "yuv420 crop / raw crop",
        "set crop / file crop",
        "set gather / file gather",
        "gather / index_select",
        "cold / 16 threads pread",
    ]
    for row in found["rows"]:
        ours, other = row["rounds"]["ours"], row["rounds"]["other"]
        assert row["ratio"] == pytest.approx(ours[0] / other[0])
        assert row["images_per_second"] == ours[0]
    assert found["start"]["items"] == 600
    assert found["start"]["seconds"] > found["start"]["opening_seconds"]
    assert min(found["scheduling"]["seconds_per_batch"]) > 0
    assert [*found["python_seconds_per_image"]] == ["raw", "yuv420", "jpeg"]
    assert min(found["python_seconds_per_image"].values()) > 0
    assert found["versions"]["torch"] == torch.__version__
    assert found["command"] == "python tools/bench_loader.py PHOTOS --work FOLDER"
    assert str(results.parent) not in results.read_text()


def test_the_table_says_what_the_json_says(tool, results, tmp_path):
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- loader: begin -->\nold\n<!-- loader: end -->\nafter\n")
    import pages

    assert pages.main(["loader", str(results), "--into", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- loader: begin -->\n| measured |")
    assert text.endswith("<!-- loader: end -->\nafter\n")
    assert "old" not in text
    spent = json.loads(results.read_text())[-1]["python_seconds_per_image"]
    assert f" {spent['raw'] * 1e6:.1f} µs (raw), " in text
    first = json.loads(results.read_text())[-1]["rows"][0]
    assert f"**{first['images_per_second']:,.0f}**" in text
    assert f"| {first['ratio']:.2f} ({first['ratio']:.2f}–{first['ratio']:.2f}) |" in text


def test_the_range_is_that_of_all_runs(tool, results, tmp_path):
    (run,) = json.loads(results.read_text())
    other = json.loads(json.dumps(run)) | {"run": "monday", "machine": "another machine"}
    # Wider apart than anything this machine can have measured just now, however busy it is.
    other["rows"][0]["rounds"] = {"ours": [1.0, 99900.0], "other": [100.0, 100.0]}
    text = tool.markdown([other, run])
    assert f"| {run['rows'][0]['ratio']:.2f} (0.01–999.00) |" in text
    assert "another machine (monday); " in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: photos"),
        (["photos", "--json", "a.json", "--alone"], "--json writes all figures: leave --alone out"),
    ],
)
def test_refuses_what_makes_no_sense(tool, capsys, arguments, message):
    with pytest.raises(SystemExit):
        tool.read_options(arguments)
    assert message in capsys.readouterr().err
