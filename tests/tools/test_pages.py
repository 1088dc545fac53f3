"""Every figure on a page is one that a command wrote into benchmarks/."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

from h5feed.bench.ablate import Ablation, Row
from h5feed.bench.report import as_dict, as_markdown, from_dict

ROOT = Path(__file__).parents[2]
NOT_OURS = {"gpu_run"}  # written by tools/gpu_run.py from a run on a GPU


@pytest.fixture(scope="module")
def pages():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import pages

        yield pages
    finally:
        sys.path.remove(str(ROOT / "tools"))


def test_every_figure_is_the_one_in_benchmarks(pages):
    assert list(pages.differences()) == []


def test_every_table_between_marks_is_compared(pages):
    for page in ("README.md", *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md"))):
        marked = set(re.findall(r"<!-- (\w+): begin -->", (ROOT / page).read_text()))
        assert marked - NOT_OURS == set(pages.TABLES.get(page, {})), page


def test_another_figure_is_found(pages, tmp_path):
    (tmp_path / "docs").mkdir()
    for page in {*pages.TABLES, *pages.SENTENCES}:
        (tmp_path / page).write_text((ROOT / page).read_text())
    assert list(pages.differences(tmp_path)) == []
    page = tmp_path / "docs/benchmarks.md"
    text = page.read_text()
    table = text.index("<!-- peers: begin -->")
    figure = re.search(r"\d,\d{3}", text[table:])
    said = re.search(r"± (\d)(\.\d\d) points", text)
    text = text[: table + figure.start()] + "9,999,999" + text[table + figure.end() :]
    text = text.replace(said[0], f"± 9{said[1]}{said[2]} points")
    page.write_text(text)
    found = list(pages.differences(tmp_path))
    assert (
        found[0]
        == "docs/benchmarks.md: the table 'peers' is another one: run python tools/pages.py"
    )
    assert re.fullmatch(
        r"docs/benchmarks.md lacks the words '.*', which benchmarks/ gives", found[1]
    )
    assert said[0] in found[1]
    assert len(found) == 2


def test_the_recipes_that_were_run_are_those_of_the_page(pages):
    from readme_training import RECIPES

    said = " ".join(
        pages.ROOT.joinpath("docs/training.md").read_text().replace("\\\n", " ").split()
    )
    for name, options in RECIPES.items():
        for option in options.split(" --"):
            assert f"--{option.removeprefix('--')}" in said, (name, option)


def test_every_file_in_benchmarks_has_its_command(pages):
    said = (ROOT / "benchmarks/README.md").read_text()
    for path in (ROOT / "benchmarks").iterdir():
        assert path.name == "README.md" or f"`{path.name}`" in said, path.name


def test_the_seventeen_tricks_have_switches_that_exist(pages):
    assert len(pages.PUBLISHED) == 17
    tree = ast.parse((ROOT / "src/h5feed/train/config.py").read_text())
    fields = {n.target.id for n in ast.walk(tree) if isinstance(n, ast.AnnAssign)}
    for trick in (*pages.PUBLISHED, *pages.OURS):
        for switch in re.findall(r"--([\w-]+)", trick.switch):
            assert switch.replace("-", "_") in fields, switch


def test_tricks_that_ablations_know_have_figures_or_a_reason(pages):
    from h5feed.bench.tricks import CHECKPOINTING, TRICKS

    known = {trick.name for trick in (*TRICKS, CHECKPOINTING)}
    measured = {trick.measured for trick in (*pages.PUBLISHED, *pages.OURS)} - {None}
    assert measured <= known
    assert known - measured == {"pinned memory"}  # with the workers, in one row
    found = from_dict(Ablation, json.loads((ROOT / "benchmarks/ablate.json").read_text()))
    lines = pages.tricks_table([found]).splitlines()
    row = next(line for line in lines if "Automatic mixed precision" in line)
    ratios = {row.name: row.ratio for row in found.rows}
    assert f"{ratios['+ AMP, bf16']:.2f}× ({ratios['all but AMP, bf16']:.2f}×)" in row
    assert any("– (needs a GPU)" in line for line in lines if "autotuner" in line)


ROW = Row(name="the plain loop", group="cumulative", tricks=(), rates=(100.0, 120.0))
ABLATION = Ablation(title="a title", rows=(ROW,), images=900, batch_size=4, machine="a machine")


@pytest.fixture
def found(tmp_path):
    path = tmp_path / "ablate.json"
    path.write_text(json.dumps(as_dict(ABLATION)))
    return str(path)


def test_the_table_is_printed_or_put_between_the_marks(pages, found, tmp_path, capsys):
    assert pages.main(["ablate", found]) == 0
    table = capsys.readouterr().out
    assert table == as_markdown(ABLATION) + "\n"
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- ablate: begin -->\nold\n<!-- ablate: end -->\nafter\n")
    assert pages.main(["ablate", found, "--into", str(page)]) == 0
    marked = f"<!-- ablate: begin -->\n{table}<!-- ablate: end -->"
    assert page.read_text() == f"before\n{marked}\nafter\n"
    assert capsys.readouterr().out == ""


def test_a_page_without_the_marks_is_left_alone(pages, found, tmp_path):
    page = tmp_path / "README.md"
    page.write_text("nothing here\n")
    with pytest.raises(SystemExit, match="lacks the lines <!-- ablate: begin -->"):
        pages.main(["ablate", found, "--into", str(page)])
    assert page.read_text() == "nothing here\n"


def test_it_draws(pages, found, tmp_path):
    pytest.importorskip("matplotlib")
    assert pages.main(["ablate", found, "--plot", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ablate"], "give a kind of table and its JSON file, or neither"),
        (["--into", "README.md"], "--into and --plot are for one table: name it, and its JSON"),
        (["loader", "a.json", "--plot", "a.png"], "loader has no plot: leave out --plot"),
    ],
)
def test_what_makes_no_table_is_refused(pages, capsys, arguments, said):
    with pytest.raises(SystemExit):
        pages.main(arguments)
    assert said in capsys.readouterr().err
