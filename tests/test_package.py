"""The package as a whole: its public surface, what it imports, and which way."""

import ast
import importlib
import re
import subprocess
import sys
from collections import defaultdict
from importlib.metadata import requires
from pathlib import Path

import pytest

import h5feed

SRC = Path(h5feed.__file__).parent
OPTIONAL = [
    "matplotlib", "torchvision", "nvidia", "ray", "lightning", "rich", "psutil", "timm", "pyarrow",
    "datasets", "pycocotools",
]  # fmt: skip
# Which rooms a room may import: only what lies to the left in the data's way.
MAY_IMPORT = {
    "store": set(),
    "augment": set(),
    "packing": {"store"},
    "feed": {"store", "augment"},
    "interop": {"store", "augment", "packing", "feed"},
    "train": {"store", "augment", "feed", "interop"},
    "bench": {"store", "augment", "packing", "feed", "interop", "train"},
    "cli": {"store", "augment", "packing", "feed", "interop", "train", "bench"},
}


def test_public_names():
    assert sorted(h5feed.__all__) == h5feed.__all__
    assert set(h5feed.__all__) >= {"pack", "H5Dataset", "make_dataloader", "H5FormatError"}
    for name in h5feed.__all__:
        value = getattr(h5feed, name)
        assert value.__doc__, name
    assert callable(h5feed.pack)
    assert h5feed.packing.pack is h5feed.pack


def test_import_needs_no_optional_library():
    code = (
        "import sys\n"
        f"for name in {OPTIONAL}: sys.modules[name] = None\n"
        "import h5feed, h5feed.cli.pack, h5feed.cli.show, h5feed.cli.check\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_brings_in_no_optional_library():
    code = f"import h5feed, sys; print([n for n in {OPTIONAL} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_what_fills_batches_needs_no_torch():
    code = "import h5feed.feed.rows, h5feed.augment, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_packing_s_help_needs_no_torch():
    code = "import h5feed, h5feed.cli.pack, h5feed.cli.check, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", ["pack", "show", "check", "bench", "train"])
def test_every_command_says_its_version(name, capsys):
    command = importlib.import_module(f"h5feed.cli.{name}")
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{name}-h5 {h5feed.__version__}\n"


@pytest.mark.parametrize("name", ["find-lr", "find-batch", "ablate", "export"])
def test_every_tool_of_train_h5_says_its_version(name, capsys):
    from h5feed.cli.train import main

    assert main([name, "--version"]) == 0
    assert capsys.readouterr().out == f"train-h5 {name} {h5feed.__version__}\n"


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'h5feed' has no attribute 'no_such'"):
        h5feed.no_such  # noqa: B018


def imported_rooms(path):
    """(room, line) of every import of another part of h5feed in a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "h5feed" and len(parts) > 1 and parts[1] in MAY_IMPORT:
                yield parts[1], node.lineno


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_only_what_lies_before_them(room):
    modules = list((SRC / room).rglob("*.py"))
    assert modules
    for path in modules:
        for other, line in imported_rooms(path):
            assert other == room or other in MAY_IMPORT[room], f"{path}:{line} imports {other}"


# One concept in two rooms; commands have the names of what they run.
SAME_CONCEPT = {
    "device": {"augment", "feed"},
    "fields": {"store", "packing", "feed"},
    "iterator": {"feed", "interop"},
    "loader": {"feed", "interop"},
    "options": {"packing", "feed"},
    "places": {"packing", "augment"},
    "system": {"", "bench"},
    "tricks": {"train", "bench"},
    "workers": {"packing", "feed"},
}


def test_a_module_name_stands_for_one_thing():
    rooms = defaultdict(list)
    for path in SRC.rglob("*.py"):
        room = path.relative_to(SRC).parts[0] if path.parent != SRC else ""
        if path.stem != "__init__" and room != "cli":
            rooms[path.stem].append(room)
    for name, found in rooms.items():
        known = SAME_CONCEPT.get(name, set())
        assert len(found) == 1 or set(found) <= known, f"{name}.py in {found}"


def test_no_two_classes_share_a_name():
    places = defaultdict(list)
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(SRC)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("word", ["picture"])
def test_one_word_for_one_thing(word):
    """An image is an image, in code, help and errors."""
    for path in SRC.rglob("*.py"):
        lines = path.read_text().lower().splitlines()
        found = [number for number, line in enumerate(lines, 1) if word in line]
        assert not found, f"{path}, lines {found}: say image, or plot"


def test_the_files_that_contributing_names_are_there():
    text = (SRC.parents[1] / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", text)
    assert len(named) > 30
    assert [name for name in named if not (SRC / name).exists()] == []


def test_only_the_store_imports_h5py():
    users = {
        path.relative_to(SRC).parts[0]
        for path in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Import) and any(a.name.startswith("h5py") for a in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("h5py"))
    }
    assert users <= {"store", "bench"}, users


def test_a_missing_library_is_one_sentence_that_names_the_extra():
    from h5feed.optional import require

    with pytest.raises(ImportError) as caught:
        require("no_such_library.part", "dali")
    assert str(caught.value) == (
        'no_such_library is not installed, and this needs it: pip install "h5feed[dali]"'
    )


def test_without_dali_one_sentence_names_the_extra():
    code = """
import sys
sys.modules["nvidia"] = None
import h5feed
try:
    import h5feed.interop.dali
except ImportError as ex:
    print(ex)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        'nvidia is not installed, and this needs it: pip install "h5feed[dali]"\n'
    )


DISTRIBUTIONS = {
    "nvidia": "nvidia-dali-cuda120",  # modules that are named otherwise
    "safetensors": "timm",  # brings it
}


def named_extras():
    """(library, extra) of every call of `require` in the package, and of every `saved_figure`."""
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if called == "require" and path.name != "plotting.py":
                module, extra = node.args
                if isinstance(module, ast.Constant):  # else one of several that the extra allows
                    yield module.value.partition(".")[0], extra.value
            if called == "saved_figure":  # plotting.py hands its `extra` on
                yield "matplotlib", next(k.value.value for k in node.keywords if k.arg == "extra")


def test_an_extra_brings_what_names_it():
    brought = {
        (re.split(r"[^\w-]", line)[0], extra)
        for line in requires("h5feed")
        for extra in re.findall(r'extra == "(\w+)"', line)
    }
    wanted = set(named_extras())
    assert len(wanted) > 5
    for library, extra in wanted:
        assert (DISTRIBUTIONS.get(library, library), extra) in brought
