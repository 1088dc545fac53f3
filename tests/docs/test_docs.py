"""Every code block of the pages runs, top to bottom, as its reader would type it.

A page starts in a folder with `images` (class folders), `train.h5` and `val.h5` packed from it,
`scenes` and `masks`. Shell blocks run in this process: only h5feed's own commands may stand there.
What cannot run here says why: `<!-- not run: reason -->` stands in the line before its block.
"""

import re
import shlex
import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch

import h5feed

ROOT = Path(__file__).parents[2]
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", *DOCS]
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+) -->\n+)?^(?P<indent> *)```(?P<language>\w*)[^\n]*\n"
    r"(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
COMMANDS = {
    f"{name}-h5": f"h5feed.cli.{name}"
    for name in ("pack", "merge", "show", "check", "bench", "train")
}
LONGEST = 300  # lines: what somebody reads


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    samples = ROOT / "data_samples"
    shutil.copytree(samples / "images", folder / "images")
    shutil.copytree(samples / "images/plants", folder / "scenes")
    shutil.copytree(samples / "masks/plants", folder / "masks")
    for name in ("train.h5", "val.h5"):
        h5feed.pack(folder / "images", folder / name, size="64", num_workers=0)
    return folder


def blocks(page):
    text = (ROOT / page).read_text()
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("code")) + 1
        indent = len(found["indent"])
        code = "\n".join(row[indent:] for row in found["code"].split("\n"))
        yield line, found["language"], code, found["reason"]


def run_shell(code):
    for line in re.sub(r"\\\n", " ", code).splitlines():
        name, *args = shlex.split(line, comments=True) or [""]
        if name:
            assert name in COMMANDS, f"{name}: no command of h5feed's: say why it is not run"
            assert import_module(COMMANDS[name]).main(args) == 0, line


@pytest.mark.parametrize("page", PAGES)
def test_code_runs(page, prepared, tmp_path, monkeypatch):
    work = tmp_path / "work"
    shutil.copytree(prepared, work)
    monkeypatch.chdir(work)
    seeds = torch.random.get_rng_state()
    names = {"__name__": "docs"}
    for line, language, code, reason in blocks(page):
        if reason is None and language == "python":
            exec(compile("\n" * line + code, page, "exec"), names)
        elif reason is None and language == "sh":
            run_shell(code)
        else:
            assert reason or language in ("text", "console", "mermaid", "toml"), (page, line)
    torch.random.set_rng_state(seeds)


@pytest.mark.parametrize("page", PAGES)
def test_no_page_is_too_long(page):
    assert (ROOT / page).read_text().count("\n") <= LONGEST


def test_a_broken_block_is_found(prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="no command of h5feed's"):
        run_shell("rm -r images")
    with pytest.raises(AssertionError, match="nothing"):
        run_shell("show-h5 nothing.h5")


REFERENCE = {
    "api/h5feed.md": "h5feed",
    "api/augment.md": "h5feed.augment",
    "api/train.md": "h5feed.train",
}


@pytest.mark.parametrize("page", REFERENCE)
def test_every_public_name_stands_in_the_reference(page):
    module = import_module(REFERENCE[page])
    told = re.findall(r"^::: (\S+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    assert {f"{module.__name__}.{name}" for name in module.__all__} - set(told) <= {
        "h5feed.augment"  # has a page of its own
    }


def test_the_readme_s_links_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 150
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_page_can_be_found():
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(f"docs/{page}" for page in listed) == DOCS
