import json
import sys
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
TOOLS = str(Path(__file__).parents[2] / "tools")


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, TOOLS)
    try:
        import accuracy_check

        yield accuracy_check
    finally:
        sys.path.remove(TOOLS)


def test_the_interval_is_student_s(tool):
    # mean 2, standard deviation 1, so 4.303 / √3 at two degrees of freedom
    mean, half = tool.interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.303 / 3**0.5)


@pytest.mark.parametrize("other", ["files", "plain"])
def test_both_sides_are_trained_for_each_seed(tool, tmp_path, capsys, other):
    sys.path.insert(0, TOOLS)
    from gpu.data import draw_folder

    for split, count in (("train", 128), ("test", 40)):
        draw_folder(tmp_path / split, count, (32, 32), classes=2)
    args = [str(tmp_path), "--quick", "--seeds", "2", "--epochs", "1", "--images", "128"]
    assert tool.main([*args, "--against", other, "--json", str(tmp_path / "out.json")]) == 0
    said = capsys.readouterr().out
    assert f"packed − {other} = " in said
    assert "points (95 %, 2 seeds)" in said
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["runs"]) == 2
    differences = [run["packed"] - run[other] for run in found["runs"]]
    assert found["difference"] == pytest.approx(sum(differences) / 2)


@pytest.mark.parametrize(("name", "other"), [("accuracy", "files"), ("accuracy_plain", "plain")])
def test_the_page_says_what_was_measured(name, other):
    root = Path(TOOLS).parent
    found = json.loads((root / "benchmarks" / f"{name}.json").read_text())
    said = (root / "docs/benchmarks.md").read_text("utf-8").replace("\n", " ")
    signed = f"{100 * found['difference']:+.2f}".replace("-", "−")
    assert f"packed − {other} = {signed} ± {100 * found['half_width_95']:.2f} points" in said
    assert f"`benchmarks/{name}.json`" in said


def test_broken_off_it_keeps_the_seeds_it_has(tool, tmp_path, monkeypatch):
    scores = iter([0.5, 0.5, 0.6, 0.7])

    def trained(*_):
        score = next(scores, None)
        if score is None:
            raise KeyboardInterrupt
        return score

    monkeypatch.setattr(tool, "accuracy", trained)
    monkeypatch.setattr(tool, "link_some", lambda source, folder, count: folder)
    monkeypatch.setattr(tool, "pack", lambda *_, **__: None)
    with pytest.raises(KeyboardInterrupt):
        tool.main([str(tmp_path), "--quick", "--json", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["runs"]) == 2
    assert found["difference"] == pytest.approx(0.05)


def test_one_seed_has_no_spread(tool, tmp_path, capsys):
    with pytest.raises(SystemExit):
        tool.read_options([str(tmp_path), "--seeds", "1"])
    assert "--seeds 1: a spread needs 2 or more" in capsys.readouterr().err
