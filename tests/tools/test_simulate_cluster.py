import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from h5feed import H5Dataset, H5Loader
from loaders import write_kind

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import simulate_cluster

        yield simulate_cluster
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.fixture
def small(tool):
    """Four machines of two ranks, and 100 shards of 50 items."""
    return tool.Cluster(
        nodes=4,
        ranks=2,
        batch=8,
        items=4990,
        item_bytes=tool.SHARD // 50,
        classes=10,
        streams=16,
        window=2,
    )


def test_it_walks_in_the_order_of_h5loader(tool, tmp_path, monkeypatch):
    ds = H5Dataset([write_kind(tmp_path / f"{n}.h5", "raw", count=n) for n in (4, 4, 3)])
    cluster = tool.Cluster(
        nodes=2, ranks=1, batch=2, items=11, item_bytes=tool.SHARD // 4, streams=4, window=1
    )
    walked = tool.walk(cluster, epoch=3)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    for rank in range(2):
        with H5Loader(
            ds,
            2,
            shuffle="shards",
            streams=4,
            window=1,
            rank=rank,
            world_size=2,
            with_index=True,
        ) as loader:
            loader.set_epoch(3)
            real = torch.cat([indices for *_, indices in loader]).tolist()
        assert walked.sample[walked.node == rank].tolist() == real
    assert walked.padding == 1


def test_what_machines_read(tool, small):
    found = tool.reading(small)
    assert (found["lost"], found["repeated"], found["padding"]) == (0, 0, 2)
    assert found["whole"]
    assert 1 <= found["times_read"] <= 1.031
    assert found["held_shards"] <= 4 * (2 * 2 + 1)
    full = tool.reading(replace(small, shuffle=True))
    assert (full["times_read"], full["lost"], full["repeated"]) == (4, 0, 0)
    assert full["held_shards"] == 100


def test_a_long_epoch_is_sampled_and_the_table_says_so(tool, small, monkeypatch):
    monkeypatch.setattr(tool, "LONGEST", 4000)
    monkeypatch.setattr(tool, "CALLS", 160)
    found = tool.reading(small)
    assert (found["whole"], found["lost"], found["repeated"]) == (False, None, 0)
    assert found["walked"] == 160 * 8
    assert tool.reading_table([found])[1][0][-1] == "– / 0 of 1,280 sampled"


def test_a_lost_and_a_repeated_sample_are_found(tool, small, monkeypatch):
    from h5feed.feed.order import ShardShuffle

    right = ShardShuffle.__call__
    monkeypatch.setattr(ShardShuffle, "__call__", lambda self, p: np.maximum(right(self, p), 1))
    found = tool.reading(small)
    assert (found["lost"], found["repeated"]) == (1, 1)


def test_how_well_batches_mix(tool, small):
    one = replace(small, ranks=1, batch=64, items=5000)
    full, shards = tool.mixing(replace(one, shuffle=True)), tool.mixing(one)
    assert full["again"] == pytest.approx(1, abs=0.05)
    assert full["random_entropy"] == pytest.approx(full["sorted_entropy"], rel=0.02)
    assert shards["random_entropy"] == pytest.approx(full["random_entropy"], rel=0.02)
    assert shards["sorted_entropy"] < full["sorted_entropy"]
    assert abs(shards["random_correlation"]) < 0.02 < shards["sorted_correlation"]
    assert full["again"] < shards["again"] < 1.2


@pytest.mark.parametrize("nodes", [1, 3, 32])
def test_other_machines_finish_an_epoch(tool, small, nodes):
    found = tool.resume(small, nodes)
    assert (found["lost"], found["repeated"]) == (0, 0)
    assert found["times_read"] > 1


def test_the_command_simulates_a_cluster_of_the_callers(tool, capsys):
    assert (
        tool.main(["--nodes", "2", "3", "--items", "6000", "--ranks", "1", "--streams", "4"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert lines[-2].split()[:6] == ['`"shards"`,', "4", "streams,", "window", "4", "2"]
    with pytest.raises(SystemExit):
        tool.main(["--nodes", "2", "--plot", "a.png"])


def test_the_report_is_drawn(tool, tmp_path):
    import json

    found = json.loads((ROOT / "benchmarks/clusters.json").read_text())
    tool.save_plot(found, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
