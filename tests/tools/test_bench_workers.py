"""bench_workers.py: each kind of row once, and what is said of rows that are made up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hosts import importable
from images import smooth
from loaders import write_kind
from packed import write_packed

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import bench_workers

    return bench_workers


def test_rows_are_measured(tmp_path, monkeypatch):
    importable(monkeypatch)
    raw = write_packed(tmp_path / "raw.h5", [smooth(24, 24, k) for k in range(6)])
    jpeg = write_kind(tmp_path / "jpeg.h5", "jpeg", count=6)
    kinds = [(raw, "thread"), (raw, "process"), (raw, "bare"), (jpeg, "bare")]
    code = (
        "import bench_workers, json, sys; "
        "print(json.dumps([bench_workers.measure(*kind) for kind in json.loads(sys.argv[1])]))"
    )
    asked = json.dumps([(str(path), by, 2, 0.01) for path, by in kinds])
    command = [sys.executable, "-c", code, asked]
    done = subprocess.run(command, cwd=ROOT / "tools", check=True, stdout=subprocess.PIPE)
    for found in json.loads(done.stdout):
        assert len(found["rates"]) == 3
        assert max(found["rates"]) > 0
        assert found["cpu"] >= 0


def test_a_row_runs_by_itself_with_or_without_the_simulation(tool, monkeypatch):
    given = []

    def run(command, *, env, **_):
        given.append((json.loads(command[-1]), env.get("SIMCORES"), env["PYTHONPATH"]))
        return subprocess.CompletedProcess(command, 0, stdout="noise\n[1]\n")

    monkeypatch.setattr(tool.subprocess, "run", run)
    monkeypatch.setenv("SIMCORES", "1")
    monkeypatch.setenv("PYTHONPATH", "src")
    for simulate in (None, Path("sim")):
        assert tool.measure_apart(Path("a.h5"), "bare", 4, 0.5, simulate) == [1]
    assert given == [
        (["a.h5", "bare", 4, 0.5], None, "src"),
        (["a.h5", "bare", 4, 0.5], "1", "sim:src"),
    ]


def test_the_table_the_json_and_the_plot(tool, tmp_path, monkeypatch, capsys):
    """Eight workers that use 1.5 of 2 real cores are bound by them; FFCV has no simulated ones."""

    def found(path, by, workers, seconds, simulate):
        return {"rates": [1000.0 * workers**0.9 + k for k in range(3)], "cpu": 230e-6}

    file = write_packed(tmp_path / "a.h5", [smooth(24, 24, k) for k in range(4)])
    monkeypatch.setattr(tool, "measure_apart", found)
    monkeypatch.setattr(tool, "packed_photos", lambda options, store: file)
    monkeypatch.setattr(tool, "available_cores", lambda: 2)
    monkeypatch.setattr(tool, "_ffcv", lambda *_: {"rates": [900.0], "cpu": 1e-3})
    out, plot = tmp_path / "workers.json", tmp_path / "workers.png"
    arguments = ["--ffcv", "python", "--json", str(out), "--plot", str(plot), "--workers"]
    tool.main([str(tmp_path), "--work", str(tmp_path), "--simulate", "sim", *arguments, "2", "8"])
    said = capsys.readouterr().out
    assert "raw   FFCV            2       900 img/s  efficiency 1.00  CPU 1000.0 us/image" in said
    assert "jpeg  processes       8     6,499 img/s  efficiency 0.87" in said
    assert 'raw: engine="auto" takes {' in said
    rows = json.loads(out.read_text())["rows"]
    assert {row["by"] for row in rows if row["simulated"]} == {"thread", "process", "bare"}
    assert {row["workers"] for row in rows if not row["simulated"]} == {2}
    assert {row["workers"] for row in rows if row["bound"]} == {8}
    assert said.count("simulated, bound by the real cores") == 6
    assert plot.stat().st_size > 10_000
