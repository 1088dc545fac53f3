"""The campaign counts what fails, repeats it by seed, and notices readers that are broken."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[2] / "tools/campaign"

# All in one process: importing what the campaign forks from takes seconds.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from unittest import mock

sys.path.insert(0, sys.argv[1])
import run
from cases import PROGRAMS, Wrong
from run import FAMILIES
from h5feed import H5Dataset, H5Loader
from h5feed.store import gate

room = Path(sys.argv[2])

def campaign(name, families, *arguments):
    with (room / f"{name}.txt").open("w") as file, mock.patch("sys.stdout", file):
        keep, facts = room / f"{name}-kept", room / f"{name}.json"
        status = run.main(["--keep", str(keep), "--json", str(facts), *arguments], families)
    (room / f"{name}.status").write_text(str(status))

def right(case):
    pass

def sometimes_wrong(case):
    if case.random.random() < 0.5:
        (case.folder / "proof").write_text("kept")
        raise Wrong(f"one is not {case.random.randrange(10**9)}")

def raises(case):
    raise KeyError("whatever")

def hangs(case):
    time.sleep(3600)

def crashes(case):
    os.kill(os.getpid(), signal.SIGSEGV)

def command_hangs(case):
    case.run("show-h5", "x.h5", before=lambda: time.sleep(3600))

def command_raises(case):
    with mock.patch.dict(PROGRAMS, {"show-h5": lambda words: [][0]}):
        case.run("show-h5", "x.h5")

def command_whispers(case):
    with mock.patch.dict(PROGRAMS, {"show-h5": lambda words: 1}):
        case.run("show-h5", "x.h5")

campaign("counted", {"right": (right, 1), "wrong": (sometimes_wrong, 1)}, "--cases", "8")
campaign("again", {"wrong": (sometimes_wrong, 1)}, "--cases", "3", "--seed", "5")
kinds = [raises, crashes, command_raises, command_whispers]
campaign("kinds", {kind.__name__: (kind, 1) for kind in kinds}, "--cases", "1")
slow = {"hangs": (hangs, 1), "command_hangs": (command_hangs, 1)}
campaign("slow", slow, "--cases", "1", "--deadline", "2")

def break_and_run(name, family, cases, owner, attribute, broken):
    with mock.patch.object(owner, attribute, broken):
        campaign(name, {family: FAMILIES[family]}, "--cases", str(cases))

get, load = H5Dataset.__getitem__, H5Loader.load_state_dict

def shifted(self, index):
    image, _ = get(self, index)
    return image, get(self, (index + 1) % len(self))[1]

class Agreeable(str):
    __hash__ = str.__hash__
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False

def forgetful(self, state):
    load(self, {**state, "consumed": max(0, state["consumed"] - 1)})

break_and_run("labels", "pixels", 3, H5Dataset, "__getitem__", shifted)
break_and_run("state", "resumed", 3, H5Loader, "load_state_dict", forgetful)
break_and_run("seal", "metadata", 12, gate, "fingerprint", lambda *_: Agreeable())
"""


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    room = tmp_path_factory.mktemp("campaign")
    subprocess.run([sys.executable, "-c", SCRIPT, CAMPAIGN, room], check=True, timeout=250)
    return room


def families(room, name):
    return json.loads((room / f"{name}.json").read_text())["families"]


def status(room, name):
    return int((room / f"{name}.status").read_text())


def test_cases_and_failures_are_counted(room):
    found = families(room, "counted")
    assert found["right"]["cases"] == found["wrong"]["cases"] == 8
    assert found["right"]["failures"] == []
    assert 0 < len(found["wrong"]["failures"]) < 8
    assert status(room, "counted") == 1


def test_a_seed_repeats_its_case_alone(room):
    first = {f["seed"]: f["failure"] for f in families(room, "counted")["wrong"]["failures"]}
    again = {f["seed"]: f["failure"] for f in families(room, "again")["wrong"]["failures"]}
    assert again == {seed: text for seed, text in first.items() if 5 <= seed < 8}


def test_what_fails_is_kept_with_the_command_that_repeats_it(room):
    said = (room / "counted.txt").read_text()
    for failure in families(room, "counted")["wrong"]["failures"]:
        kept = room / "counted-kept" / f"wrong-{failure['seed']}"
        assert (kept / "proof").read_text() == "kept"
        assert failure["failure"] in (kept / "said.txt").read_text()
        assert f"run.py --only wrong --seed {failure['seed']} --cases 1" in said


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("kinds", "raises", "shows a traceback: KeyError: 'whatever'"),
        ("kinds", "crashes", "dies of SIGSEGV"),
        ("kinds", "command_raises", "show-h5 shows a traceback"),
        ("kinds", "command_whispers", "show-h5 fails with status 1 and says nothing"),
        ("slow", "hangs", "hangs"),
        ("slow", "command_hangs", "a command hangs"),
    ],
)
def test_each_way_to_fail_is_told_apart(room, name, kind, text):
    (failure,) = families(room, name)[kind]["failures"]
    assert text in failure["failure"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("labels", "was not touched, and is not what it was"),
        ("state", "samples resumed otherwise than in one go"),
        ("seal", "changed, and the file opens without a word"),
    ],
)
def test_a_broken_reader_is_caught(room, name, text):
    (found,) = families(room, name).values()
    assert any(text in failure["failure"] for failure in found["failures"])
