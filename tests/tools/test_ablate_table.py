import json
from pathlib import Path

import pytest

from h5feed.bench.ablate import Ablation, Row
from h5feed.bench.report import as_dict, as_markdown

TOOLS = str(Path(__file__).parents[2] / "tools")
ROW = Row(name="the plain loop", group="cumulative", tricks=(), rates=(100.0, 120.0))
ABLATION = Ablation(title="a title", rows=(ROW,), images=900, batch_size=4, machine="a machine")


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    import ablate_table

    return ablate_table


@pytest.fixture
def found(tmp_path):
    path = tmp_path / "ablate.json"
    path.write_text(json.dumps(as_dict(ABLATION)))
    return str(path)


def test_the_table_is_printed_or_put_between_the_marks(tool, found, tmp_path, capsys):
    assert tool.main([found]) == 0
    table = capsys.readouterr().out
    assert table == as_markdown(ABLATION) + "\n"
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- ablate: begin -->\nold\n<!-- ablate: end -->\nafter\n")
    assert tool.main([found, "--readme", str(page)]) == 0
    marked = f"<!-- ablate: begin -->\n{table}<!-- ablate: end -->"
    assert page.read_text() == f"before\n{marked}\nafter\n"
    assert capsys.readouterr().out == ""


def test_a_page_without_the_marks_is_left_alone(tool, found, tmp_path):
    page = tmp_path / "README.md"
    page.write_text("nothing here\n")
    with pytest.raises(SystemExit, match="lacks the lines <!-- ablate: begin -->"):
        tool.main([found, "--readme", str(page)])
    assert page.read_text() == "nothing here\n"


def test_it_draws(tool, found, tmp_path):
    pytest.importorskip("matplotlib")
    assert tool.main([found, "--plot", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
