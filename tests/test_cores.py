import os

import pytest

from h5feed.cores import available_cores


@pytest.fixture
def cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return 8


def test_the_affinity_mask_counts(cores, tmp_path):
    assert available_cores(tmp_path) == 8


@pytest.mark.parametrize(
    ("text", "granted"),
    [
        ("max 100000", 8),
        ("250000 100000", 3),
        ("50000 100000", 1),
        ("1600000 100000", 8),
        ("nonsense", 8),
    ],
)
def test_a_container_s_quota_counts(cores, tmp_path, text, granted):
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert available_cores(tmp_path) == granted


@pytest.mark.parametrize(("quota", "granted"), [("-1", 8), ("400000", 4)])
def test_an_old_cgroup_s_quota_counts(cores, tmp_path, quota, granted):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(quota + "\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert available_cores(tmp_path) == granted


def test_without_affinity_masks_the_machine_s_cores_count(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert available_cores(tmp_path) == 6
