"""Packing on Ray: a cluster of several raylets on this machine, and what nodes may differ in.

A real cluster takes a dozen processes, and half a minute or more to start where the machine is
busy, so its tests run where H5FEED_TEST_RAY=1 asks for them. All that is h5feed's own runs with
a stand-in, whose tasks run where they are handed out.
"""

import os
import shutil
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from h5feed.cli.pack import main
from h5feed.errors import PackError, UsageError
from h5feed.interop import ray as door
from h5feed.packing import PackOptions
from packing.folders import bytes_of, make_birds, make_folder, make_image, names, pack_set

OPTIONS = PackOptions(size="32", shards="5")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "set"


# --- a stand-in for Ray: a task runs at `.remote`, and its result or error waits for `get`


class RayError(Exception):
    def __init__(self, text="", cause=None):
        super().__init__(text)
        self.cause = cause


class StandIn(ModuleType):
    """As much of Ray as packing uses; `told` may change what a task is told."""

    def __init__(self):
        super().__init__("ray")
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.told = lambda shared, number: shared
        self.most, self.results, self.cancelled, self.options = 0, {}, [], None

    def is_initialized(self):
        return False

    def init(self, address, **_):
        if address != "auto":
            raise ConnectionError(f"nothing at {address}.\nmore")

    def shutdown(self):
        self.results.clear()

    def cluster_resources(self):
        return {"CPU": 1.0}

    def remote(self, function):
        def run(shared, number):
            key = object()
            try:
                self.results[key] = function(self.told(shared, number), number)
            except RayError as ex:
                self.results[key] = ex
            except Exception as ex:
                self.results[key] = RayError("a traceback", ex)
            self.most = max(self.most, len(self.results))
            return key

        def options(**given):
            self.options = given
            return SimpleNamespace(remote=run)

        return SimpleNamespace(options=options)

    def wait(self, tasks, *, num_returns, timeout=None):
        return tasks[-num_returns:], tasks[:-num_returns]  # the last ones first

    def get(self, task):
        result = self.results.pop(task)
        if isinstance(result, Exception):
            raise result
        return result

    def cancel(self, task):
        self.cancelled.append(task)


@pytest.fixture
def ray(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    return stand_in


def refused(kind, *args, **options):
    with pytest.raises(kind) as caught:
        door.pack(*args, **options)
    return str(caught.value)


def test_tasks_make_the_bytes_of_one_machine(ray, folder, out, tmp_path, monkeypatch):
    pack_set(folder, tmp_path / "alone", shards=20)
    monkeypatch.chdir(tmp_path)
    options = replace(OPTIONS, shards="20")
    summary = door.pack(folder.name, out.name, options)
    assert (summary.items, summary.shards, summary.missing, summary.out) == (24, 20, (), "set")
    assert bytes_of(out) == bytes_of(tmp_path / "alone")
    assert (ray.most, ray.options) == (8, {"num_cpus": 1, "max_retries": 3})


def test_the_command_packs_on_ray(ray, folder, out, capfd):
    assert main([str(folder), str(out), "--size", "32", "--shards", "5", "--ray"]) == 0
    assert capfd.readouterr().out.startswith(f"{out}: 24 images in 5 shards, 2 classes, ")
    assert main([str(folder), str(out), "--shards", "5", "--resume", "--ray", "there:1"]) == 1
    assert capfd.readouterr().err == (
        "pack-h5: no Ray cluster is found at address='there:1' (nothing at there:1): start one "
        "with ray start --head, or give the address of one\n"
    )


def test_appended_shards_and_those_that_are_missing(ray, folder, out, tmp_path):
    alone, birds = tmp_path / "alone", make_birds(tmp_path / "more")
    pack_set(folder, alone)
    pack_set(birds, alone, append=True, shards=2)
    door.pack(folder, out, OPTIONS)
    (out / "shard-00003-of-00005.h5").unlink()
    assert door.pack(folder, out, replace(OPTIONS, resume=True)).resumed > 0
    door.pack(birds, out, replace(OPTIONS, append=True, shards="2"))
    assert bytes_of(out) == bytes_of(alone)


def test_a_node_that_does_not_see_out(ray, folder, out, tmp_path):
    ray.told = lambda shared, number: replace(shared, out=tmp_path)
    said = refused(PackError, folder, out, OPTIONS)
    assert f" does not see the folder OUT {tmp_path} in which this run packs: it has" in said
    assert said.endswith("to be shared by all nodes, under one path; nothing was kept")
    assert not out.exists()


def test_a_node_that_sees_another_source(ray, folder, out, tmp_path):
    other = make_folder(tmp_path / "other", per_class=13)
    ray.told = lambda shared, number: replace(shared, source=str(other))
    said = refused(PackError, folder, out, OPTIONS)
    assert f"does not see SRC {other} as this machine does (its list of 26 images differs" in said
    ray.told = lambda shared, number: replace(shared, source=str(tmp_path / "no"))
    assert "as this machine does (SRC" in refused(PackError, folder, out, OPTIONS)
    ray.told = lambda shared, number: replace(shared, versions=shared.versions | {"numpy": "1.0"})
    assert ", not 1.0, which would make other bytes: " in refused(PackError, folder, out, OPTIONS)


def test_what_is_whole_is_kept_when_a_task_fails(ray, folder, out):
    def lost(shared, number):
        if number == 1:
            raise RayError("The node died.\nIts log")
        return shared

    ray.told = lost
    said = refused(PackError, folder, out, OPTIONS, retries=1)
    assert said == (
        "shard-00001-of-00005.h5: its task ended 2 times without a result (RayError: The node "
        f"died); 3 of 5 shards are kept in {out}: the same command with --resume makes the others"
    )
    assert len(ray.cancelled) == 1
    assert not [name for name in os.listdir(out) if name.startswith(".")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shards": None}, "Ray packs sets, a task a shard: give shards as well, such as 256MB"),
        ({"part": "1/2"}, "part=1/2 with Ray, which deals all shards: leave part out"),
        ({"num_workers": 2}, "num_workers=2 with Ray, whose tasks take a CPU each: leave it out"),
    ],
)
def test_options_that_are_not_for_ray(folder, out, options, said):
    assert refused(UsageError, folder, out, replace(OPTIONS, **options)) == said


def test_sources_that_are_not_for_ray(folder, out):
    said = refused(UsageError, [(0, 1)], out, OPTIONS)
    assert said.startswith("source is a list, and the nodes of a Ray cluster open SRC themselves: ")
    said = refused(UsageError, folder, out, OPTIONS, retries=-1)
    assert said == "retries=-1 is too small: give 0 or more"


def test_without_ray_one_sentence_names_the_extra(folder, out, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    said = refused(ImportError, folder, out, OPTIONS)
    assert said == 'ray is not installed, and this needs it: pip install "h5feed[ray]"'


# --- a real cluster


@pytest.fixture(scope="module")
def cluster():
    """A head without CPUs, and two nodes of one CPU each."""
    if os.environ.get("H5FEED_TEST_RAY") != "1":
        pytest.skip("starts a cluster, which is slow on a busy machine: H5FEED_TEST_RAY=1 asks")
    pytest.importorskip("ray", reason="Ray is not installed")
    from ray._private import ray_constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)  # all on the loopback device
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # the same, in other processes
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # other programs' memory ends no task
        patch.setenv("RAY_worker_register_timeout_seconds", "240")
        from ray.cluster_utils import Cluster

        temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets need a short path
        made = Cluster()
        place = {
            "node_ip_address": "127.0.0.1",
            "include_dashboard": False,
            "object_store_memory": 80 << 20,
            "plasma_directory": temporary,
            "temp_dir": temporary,
        }
        try:
            for cpus in (0, 1, 1):
                made.add_node(wait=False, num_cpus=cpus, **place)
            yield made
        finally:
            made.shutdown()
            shutil.rmtree(temporary, ignore_errors=True)


def test_a_node_killed_in_the_middle_costs_its_shard_s_time_only(
    cluster, folder, out, tmp_path, monkeypatch
):
    """Shard 2 is held where it is begun first, until that node is killed."""
    pack_set(folder, tmp_path / "alone")
    begun, held_on, claim = (str(tmp_path / name) for name in ("begun", "node", "claim"))

    def held(shared, number):  # nested: so it is sent as it is, and not by its name
        import ray

        from h5feed.interop.ray import _pack_shard

        with open(begun, "a") as log:
            log.write(f"{number}\n")
        if number == 2:
            try:
                os.mkdir(claim)
            except FileExistsError:
                pass
            else:
                with open(held_on + ".new", "w") as file:
                    file.write(ray.get_runtime_context().get_node_id())
                os.rename(held_on + ".new", held_on)
                threading.Event().wait()
        return _pack_shard(shared, number)

    over, killed = threading.Event(), []

    def kill():
        while not os.path.exists(held_on) and not over.wait(0.05):
            pass
        for node in list(cluster.worker_nodes):
            if os.path.exists(held_on) and node.node_id == Path(held_on).read_text():
                killed.append(node.node_id)
                cluster.remove_node(node, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    monkeypatch.setattr(door, "_pack_shard", held)
    try:
        summary = door.pack(folder, out, OPTIONS, address=cluster.address)
    finally:
        over.set()
        killer.join()
    assert len(killed) == 1
    assert (summary.items, summary.shards) == (24, 5)
    assert sorted(Path(begun).read_text().split()) == ["0", "1", "2", "2", "3", "4"]
    shards = {name: digest for name, digest in bytes_of(out).items() if ".partial" not in name}
    assert shards == bytes_of(tmp_path / "alone")


def test_what_a_real_task_raises_is_one_sentence(cluster, tmp_path, out, capfd):
    folder = make_folder(tmp_path / "images", broken=(3,))
    given = [str(folder), str(out), "--size", "32", "--shards", "5", "--max-skipped", "0"]
    assert main([*given, "--ray", cluster.address]) == 1
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("pack-h5: ")
    assert "003.jpg" in said
    assert "Traceback" not in said
    make_image(folder / "cats" / "003.jpg", 51, 55, 3)
    assert main([*given, "--resume", "--ray", cluster.address]) == 0
    assert names(out)[0] == "index.h5"
