import errno
import os

import cv2
import pytest
import torch

from h5feed.system import (
    available_cores,
    available_memory,
    held_memory,
    is_out_of_memory,
    total_memory,
)

V2 = ("0::{}\n", "30 23 0:26 {} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n")
V1 = (
    "5:memory:{0}\n4:cpu,cpuacct:{0}\n0::/\n",
    "31 29 0:27 {0} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 29 0:28 {0} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "33 29 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
)


@pytest.fixture
def cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return 8


def system(root, version, files, *, group="/", top="/"):
    """Make /proc and /sys/fs/cgroup of a process in `group`, where `top` is what is mounted."""
    said = {
        "proc/self/cgroup": version[0].format(group),
        "proc/self/mountinfo": "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + version[1].format(top),
        "proc/meminfo": "MemTotal:    9000 kB\nMemFree: 10 kB\nMemAvailable:   4000 kB\n",
    }
    for name, text in (said | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


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
def test_a_containers_quota_counts(cores, tmp_path, text, granted):
    files = {"sys/fs/cgroup/cpu.max": text + "\n"}
    assert available_cores(system(tmp_path, V2, files)) == granted


@pytest.mark.parametrize(("quota", "granted"), [("-1", 8), ("400000", 4)])
def test_an_old_cgroups_quota_counts(cores, tmp_path, quota, granted):
    files = {
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": quota + "\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    assert available_cores(system(tmp_path, V1, files)) == granted
    # Docker without a namespace of its own: the path is the host's, and mounted from there.
    mounted = system(tmp_path, V1, files, group="/docker/7f", top="/docker/7f")
    assert available_cores(mounted) == granted
    # A path above or beside what is mounted: the mount is all there is to see.
    assert available_cores(system(tmp_path, V1, files, group="/x", top="/y")) == granted


@pytest.mark.parametrize("at", ["", "user.slice", "user.slice/job"])
def test_the_least_of_nested_quotas_counts(cores, tmp_path, at):
    files = {
        f"sys/fs/cgroup/{part}/cpu.max": "300000 100000" if part == at else "max 100000"
        for part in ("", "user.slice", "user.slice/job")
    }
    files["sys/fs/cgroup/other/cpu.max"] = "100000 100000"
    assert available_cores(system(tmp_path, V2, files, group="/user.slice/job")) == 3


def test_without_affinity_masks_the_machine_s_cores_count(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert available_cores(tmp_path) == 6


def test_memory_is_the_machines_without_a_limit(tmp_path):
    assert available_memory(tmp_path) is None
    files = {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "1000\n"}
    system(tmp_path, V2, files)
    assert available_memory(tmp_path) == 4000 * 1024
    assert total_memory(tmp_path) == 9000 * 1024
    if os.path.exists("/proc/meminfo"):
        assert 0 < available_memory() < total_memory()


@pytest.mark.parametrize(
    ("version", "folder", "names", "prefix"),
    [
        (V2, "sys/fs/cgroup", ("memory.max", "memory.current"), ""),
        (
            V1,
            "sys/fs/cgroup/memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "total_",
        ),
    ],
)
def test_a_cgroups_memory_counts_less_what_it_could_give_up(
    tmp_path, version, folder, names, prefix
):
    limit, used = names
    files = {
        f"{folder}/{limit}": "9223372036854771712\n",
        f"{folder}/{used}": "9000\n",
        f"{folder}/job/{limit}": "3000\n",
        f"{folder}/job/{used}": "2500\n",
        f"{folder}/job/memory.stat": (
            f"anon 1500\n{prefix}inactive_file 500\n{prefix}active_file 200\nother 1\n"
        ),
    }
    root = system(tmp_path, version, files, group="/job")
    assert available_memory(root) == 3000 - 2500 + 700
    assert total_memory(root) == 3000
    (root / folder / "job" / used).write_text("5000\n")
    assert available_memory(root) == 0


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError("out of memory error when reading image file"), True),
        (ValueError("Insufficient memory (case 4)"), True),
        (cv2.error("(-4:Insufficient memory) Failed to allocate 5 bytes"), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("shapes do not match"), False),
        (OSError(errno.ENOENT, "No such file", "out of memory.jpg"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, is_one):
    assert is_out_of_memory(error) is is_one


def test_what_this_process_holds_is_read_where_the_system_tells(tmp_path):
    assert held_memory(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("VmHWM:\t  300 kB\nVmRSS:\t  200 kB\n")
    assert held_memory(tmp_path) == 200 * 1024
    assert held_memory(tmp_path, peak=True) == 300 * 1024
