"""The parts of tools/peers that need no rival installed."""

import ast
import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from images import jpeg_bytes, smooth

PEERS = Path(__file__).parents[2] / "tools/peers"


@pytest.fixture(scope="module", autouse=True)
def _importable():
    folders = [str(PEERS), str(PEERS / "adapters"), str(PEERS.parent)]
    sys.path[:0] = folders
    yield
    for name in folders:
        sys.path.remove(name)


def adapters():
    return sorted(path for path in (PEERS / "adapters").glob("*.py") if path.name[0] != "_")


def test_every_adapter_belongs_to_a_rival_and_every_rival_has_one():
    from rivals import CEILINGS, RIVALS

    assert {rival.adapter for rival in (*RIVALS, *CEILINGS)} == {path.name for path in adapters()}
    assert len({rival.name for rival in RIVALS}) == len(RIVALS)


def test_every_environment_can_be_installed():
    from rivals import ENVIRONMENTS, RIVALS

    for rival in RIVALS:
        if rival.environment is not None:  # one environment has one list of packages
            assert rival.packages == ENVIRONMENTS[rival.environment]
            assert rival.distribution in " ".join(rival.packages)


@pytest.mark.parametrize("path", adapters(), ids=lambda path: path.stem)
def test_adapters_of_rivals_say_where_their_setup_is_recommended(path):
    said = ast.get_docstring(ast.parse(path.read_text()))
    if path.name != "h5feed_loader.py":
        assert "https://" in said


def test_install_names_an_unknown_rival():
    import subprocess

    command = [sys.executable, str(PEERS / "rivals.py"), "nobody"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no such rival: nobody; known: torchvision, ffcv" in done.stderr


def test_install_reports_what_cannot_be_installed(tmp_path, monkeypatch):
    import rivals

    monkeypatch.setattr(rivals.venv, "create", lambda *_, **__: None)  # it takes seconds
    monkeypatch.setattr(rivals, "_python", lambda *_: sys.executable)
    why = rivals.install("ffcv", ("no/such requirement",), tmp_path)
    assert why.startswith("pip install no/such requirement:")
    assert "ERROR" in why


COLD = {"rate": 123.0, "read_bytes_per_image": 1.0, "resident_before": 0.0}


def result(variant, workers, rates, run="monday"):
    outcomes = [
        {
            "name": name,
            "ceiling": name == "bare crop loop",
            "error": None if rate else "broken",
            "images_per_second": rate,
            "rates": [rate, rate * 1.1, rate] if rate else [],
            "epoch_rates": [rate] if rate else [],
            "cpu_seconds_per_1000": 0.5,
            "private_bytes": 3e8,
            "cold": COLD if name == "FFCV" else None,
            "params": {"crop": 224},
        }
        for name, rate in rates.items()
    ]
    conversions = {name: {"bytes": 2e6, "pixels": 100.0, "seconds": 1.0} for name in rates}
    conversions["FFCV"]["pixels"] = 72.0
    del conversions["bare crop loop"]
    return {
        "run": run,
        "variant": variant,
        "workers": workers,
        "title": "a title",
        "kind": "loading",
        "left_out": [],
        "machine": "a machine",
        "images": 1000,
        "batch_size": 256,
        "outcomes": outcomes,
        "facts": {
            "versions": {"FFCV": "1.0.2"},
            "conversions": conversions,
            "schedule": {"repeats": 3},
        },
    }


RATES = {"FFCV": 500.0, "h5feed": 2000.0, "LitData": None, "bare crop loop": 2500.0}
FASTER = {name: rate and 2 * rate for name, rate in RATES.items()}


def test_table_has_a_row_per_rival_fastest_first():
    from results import table

    text = table([result("raw", 2, RATES)]).partition("| h5feed / FFCV")[0]
    rows = [line for line in text.splitlines() if line[0:1] == "|"]
    names = [row.split("|")[1].strip() for row in rows[2:]]
    assert names == ["*bare crop loop*", "h5feed", "FFCV", "LitData"]
    assert "| **2,000** ±5% |" in rows[3]
    assert "failed" in rows[5]
    cold = rows[0].split("|").index(" cold ")
    assert [row.split("|")[cold].strip() for row in rows[2:]] == ["–", "–", "123", "–"]
    assert len({row.count("|") for row in rows}) == 1
    assert "FFCV stores 0.72 of the pixels" in table([result("raw", 2, RATES)])


def test_the_table_is_printed_or_put_between_the_marks(tmp_path, capsys):
    from pages import main

    found, page = tmp_path / "peers.json", tmp_path / "README.md"
    found.write_text(json.dumps([result("raw", 2, RATES)]))
    assert main(["peers", str(found)]) == 0
    printed = capsys.readouterr().out
    assert "| LitData |" in printed
    page.write_text("a\n<!-- peers: begin -->\nold\n<!-- peers: end -->\nb")
    assert main(["peers", str(found), "--into", str(page)]) == 0
    assert page.read_text() == f"a\n<!-- peers: begin -->\n{printed}<!-- peers: end -->\nb"


def test_results_of_a_setting_replace_its_former_ones(tmp_path):
    from run import save

    file = tmp_path / "peers.json"
    save([result("jpeg", 1, RATES), result("raw", 2, RATES)], file)
    merged = save([result("raw", 2, RATES | {"FFCV": 7.0}), result("raw", 1, RATES)], file)
    order = [(r["variant"], r["workers"]) for r in merged]
    assert order == [("raw", 1), ("raw", 2), ("jpeg", 1)]
    assert merged == json.loads(file.read_text())
    assert merged[1]["outcomes"][0]["images_per_second"] == 7.0


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_was_measured_is_kept_when_the_rest_is_interrupted(tmp_path, monkeypatch, interrupted):
    import run

    def measure(variant, workers, source, options):
        if interrupted and workers == 2:
            raise KeyboardInterrupt
        return result(variant, workers, FASTER if workers == 2 else RATES)

    monkeypatch.setattr(run, "measure", measure)
    (tmp_path / "images/cat").mkdir(parents=True)
    json_file, plot = tmp_path / "peers.json", tmp_path / "peers.png"
    arguments = ["--variants", "raw", "--workers", "1", "2", "--json", str(json_file)]
    arguments += ["--run", "monday"]
    monkeypatch.setattr(sys, "argv", ["run.py", str(tmp_path), *arguments, "--plot", str(plot)])
    assert run.main() == (130 if interrupted else 0)
    kept = [(r["variant"], r["workers"]) for r in json.loads(json_file.read_text())]
    assert kept == [("raw", 1), ("raw", 2)][: 1 if interrupted else 2]
    assert plot.exists()
    if interrupted:  # the same command goes on with what is missing
        monkeypatch.setattr(run, "measure", lambda *_: result("raw", 2, FASTER))
        assert run.main() == 0
        assert [r["workers"] for r in json.loads(json_file.read_text())] == [1, 2]


def test_runs_of_other_days_stay_and_count_in_the_table(tmp_path):
    from results import save, table

    file = tmp_path / "peers.json"
    save([result("raw", 2, RATES)], file)
    both = save([result("raw", 2, RATES | {"FFCV": 400.0}, run="tuesday")], file)
    text = table(both)
    assert "a machine (monday); a machine (tuesday)" in text
    assert "| FFCV | 450 ±17% |" in text
    assert "| raw 256 px, 2w | **4.50×** (4.00–5.00) | **4.50×** (4.00–5.00) |" in text


def test_what_looks_wrong_fails_until_it_is_explained(tmp_path, capsys):
    from results import findings, save, unexplained

    from pages import main

    slower = RATES | {"FFCV": 300.0}
    file = tmp_path / "peers.json"
    found = save([result("raw", 1, RATES), result("raw", 2, slower | {"h5feed": 3000.0})], file)
    (finding,) = findings(found)
    said = (
        "FFCV, raw pixels, 256 px, run monday: with 2 workers, 300 img/s are slower than with 1 "
        "(500)"
    )
    assert str(finding) == said
    with pytest.raises(SystemExit, match=re.escape(f"not explained: {said}")):
        main(["peers", str(file)])
    note = {"loader": "FFCV", "variant": "raw", "about": "slower than with 1", "why": "one core"}
    (tmp_path / "peers_explained.json").write_text(json.dumps([note | {"loader": "DALI"}]))
    assert unexplained(found, file) == [finding]
    (tmp_path / "peers_explained.json").write_text(json.dumps([note]))
    assert main(["peers", str(file)]) == 0
    assert f"{said} (one core)" in capsys.readouterr().out


def test_a_run_with_something_wrong_in_it_fails(tmp_path, monkeypatch, capsys):
    import run

    jumping = result("raw", 1, RATES)
    jumping["outcomes"][0]["cpu_per_image"] = [1e-3, 3e-3, 1e-3]
    monkeypatch.setattr(run, "measure", lambda *_: jumping)
    arguments = ["--variants", "raw", "--workers", "1", "--json", str(tmp_path / "peers.json")]
    monkeypatch.setattr(sys, "argv", ["run.py", str(tmp_path), *arguments])
    assert run.main() == 1
    assert (
        "not to be believed before it is explained: FFCV, raw pixels, 256 px, run monday: with 1 "
        "worker, window 2 of 3 took 3,000 µs of CPU an image, the median 1,000"
    ) in capsys.readouterr().err


def test_original_files_are_measured_with_the_most_workers_only(tmp_path):
    import run

    options = run.read_options([str(tmp_path), "--json", "a.json"])
    measured = run.settings(options)
    assert measured == [("raw", 1), ("raw", 2), ("jpeg", 1), ("jpeg", 2), ("original", 2)]


def test_plot_shows_failures_too(tmp_path):
    from results import save_plot

    save_plot([result("raw", 1, RATES), result("raw", 2, RATES)], tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_source_is_copied_so_that_an_epoch_lasts(tmp_path):
    from harness import copies

    (tmp_path / "images/cat").mkdir(parents=True)
    (tmp_path / "images/cat/a.jpg").write_bytes(b"x")
    out = copies(tmp_path / "images", tmp_path / "work/images-x3", 3)
    assert sorted(p.name for p in out.rglob("*.jpg")) == ["a-0.jpg", "a-1.jpg", "a-2.jpg"]
    assert not any(path.is_symlink() for path in out.rglob("*"))


@pytest.mark.parametrize("variant", ["raw", "jpeg", "original"])
def test_ours_and_the_ceilings_read_one_packed_file(tmp_path, variant):
    from _common import labeled_files
    from h5feed_loader import convert, make
    from rivals import CEILINGS

    for number in range(12):
        path = tmp_path / f"images/{number % 2}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg_bytes(smooth(40, 50, seed=number)))
    source = str(tmp_path / "images")
    told = convert({"source": source, "out": str(tmp_path), "variant": variant, "workers": 0})
    names = ["h5feed", *(one.name for one in CEILINGS if variant in one.variants)]
    for name in names:
        settings = {"name": name, "workers": 1, "batch_size": 4, "crop": 16}
        subject = make({**settings, "data": told["data"], "variant": variant})
        count = sum(len(images) for images, _ in subject.epoch())
        assert count == len(labeled_files(source)) == 12
        subject.close()


def test_the_spdl_filter_has_a_crop_a_size_and_sometimes_a_flip():
    from spdl_loader import random_filter

    drawn = [random_filter(224) for _ in range(60)]
    assert all(text.startswith("crop=w=min(iw") and "scale=224:224" in text for text in drawn)
    assert 5 < sum("hflip" in text for text in drawn) < 55


class AutoReset:
    """An iterator that begins again when it has ended, as DALI's does, and counts its batches."""

    def __init__(self):
        self.made = self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == 4:
            self.at = 0
            raise StopIteration
        self.at += 1
        self.made += 1
        return self.batch()

    def batch(self):
        images, labels = np.zeros((2, 8, 8, 3)), np.zeros((2, 1))
        return [{"images": images, "labels": labels}]

    def close(self):
        pass


def torch_batches():
    loader = AutoReset()
    loader.batch = lambda: {"image": 1, "label": 2}
    return loader


# spdl_loader.py makes each epoch's iterator itself, from a list that ends.
_HANDED_ON = [path for path in adapters() if path.stem != "spdl_loader"]


@pytest.mark.parametrize("path", _HANDED_ON, ids=lambda path: path.stem)
def test_no_adapter_makes_batches_that_nobody_gets(path, monkeypatch):
    """DALI's drained after auto_reset: each epoch ran a second one, and its rate was halved."""
    adapter = importlib.import_module(path.stem).Adapter
    subject = adapter.__new__(adapter)
    subject.loader = torch_batches() if path.stem == "datasets_loader" else AutoReset()
    for epoch in (1, 2):
        assert sum(1 for _ in subject.epoch()) == 4
        assert subject.loader.made == 4 * epoch


def test_dali_left_in_mid_epoch_begins_the_next_one_at_its_first_batch():
    from dali_cpu import Adapter

    subject = Adapter.__new__(Adapter)
    subject.loader = AutoReset()
    batches = subject.epoch()
    next(batches)
    batches.close()
    assert subject.loader.at == 0
    assert sum(1 for _ in subject.epoch()) == 4
