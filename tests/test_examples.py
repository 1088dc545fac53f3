"""The examples in docstrings run, and say what is printed."""

import doctest
from importlib import import_module

import pytest

from packing.folders import make_folder

MODULES = ["h5feed.disk", "h5feed.packing.options", "h5feed.packing.run"]


@pytest.fixture
def _examples_folder(tmp_path, monkeypatch):
    """The working folder of examples: `images` has two classes of twelve images each."""
    make_folder(tmp_path / "images")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_examples_folder")
@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    result = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0
