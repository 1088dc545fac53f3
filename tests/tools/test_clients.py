"""Scripts that others write run over a packed file with one line and an import changed."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def clients():
    sys.path.insert(0, str(TOOLS))
    try:
        import clients.run

        yield clients.run
    finally:
        sys.path.remove(str(TOOLS))


@pytest.fixture(scope="module")
def material(clients, tmp_path_factory):
    return clients.make_material(tmp_path_factory.mktemp("clients"), count=32)


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Return what runs a script in this process, and gives what it reported."""
    monkeypatch.syspath_prepend(str(TOOLS / "clients" / "scripts"))
    threads = torch.get_num_threads()

    def run_here(text, given):
        script = tmp_path / "client.py"
        script.write_text(text)
        monkeypatch.setattr(sys, "argv", [str(script), *given])
        runpy.run_path(str(script), run_name="__main__")
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    yield run_here
    torch.set_num_threads(threads)


def named(clients, name):
    return next(client for client in clients.CLIENTS if client.name == name)


# Those whose packages the development environment has. The others are for the tool to run.
HERE = [
    "airbench",
    "ffcv_imagenet",
    "imagenet_main",
    "lightning_fit",
    "samplers",
    "timm_train",
    "torchvision_masks",
    "torchvision_train",
    "wrappers",
]


@pytest.mark.parametrize("name", HERE)
@pytest.mark.filterwarnings("ignore")  # of the clients' libraries
def test_a_client_gives_imagefolder_s_numbers(clients, material, run, name):
    client = named(clients, name)
    wanted = run(client.original(), clients.arguments_of(client, material, None))
    assert len(wanted["losses"]) >= 2
    assert len(set(wanted["losses"])) > 1
    for store in clients.stores_of(client):
        found = run(client.swapped(), clients.arguments_of(client, material, store))
        said = clients.compared(found, wanted)
        assert said == "identical" or (store != "original" and said.startswith("within")), store


def test_the_swap_is_a_line_for_each_dataset_and_an_import(clients):
    two = {"imagenet_main", "timm_train", "torchvision_train"}  # to train on, and to validate
    for client in clients.CLIENTS:
        lines, imports = client.changed()
        assert len(lines) == (2 if client.name in two else 1), client.name
        assert len(imports) == 1, client.name
        assert all("H5Dataset" in line for line in lines), client.name
        was, new = client.original().splitlines(), client.swapped().splitlines()
        assert len(new) - len(was) in (0, 1), client.name
        assert compile(client.swapped(), client.name, "exec")


def test_a_swap_that_does_not_fit_its_script_is_said(clients):
    other = replace(named(clients, "airbench"), line=("no_such(", "H5Dataset("))
    with pytest.raises(
        SystemExit, match=r"airbench\.py lacks 'no_such\(', which the swap replaces"
    ):
        other.swapped()


def test_other_numbers_are_told_from_the_same(clients):
    wanted = {"losses": [1.0, 2.0], "order": [0, 1]}
    assert clients.compared(wanted, wanted) == "identical"
    assert clients.compared(wanted | {"losses": [1.0, 2.001]}, wanted) == "within 1e-03"
    assert clients.compared(wanted | {"losses": [1.0, 2.5]}, wanted) == "differs by 0.5"
    for other in ({"losses": [1.0]}, {"order": [1, 0]}):
        assert clients.compared(wanted | other, wanted) == "another order"


def test_every_script_is_a_client_or_a_reader_or_shared(clients):
    scripts = {path.stem for path in (TOOLS / "clients" / "scripts").glob("*.py")}
    known = {client.name for client in clients.CLIENTS} | set(clients.READERS)
    assert scripts == known | {"shared", "mask_folder"}
