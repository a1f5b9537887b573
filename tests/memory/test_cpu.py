from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from autoaccum.memory.cpu import CpuMemory
from tests.processes import in_turn

MIB = 2**20
UNLIMITED_V1 = 9223372036854771712
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads the real /proc")


class Host:
    """A made-up host: a process of 100 MiB, and whatever limits the test writes."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.cgroup = root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()
        self.set_status(VmHWM=150, VmRSS=100, VmData=90, VmSize=400)
        self.set_groups("0::/")
        self.memory = CpuMemory(self.proc, self.cgroup)

    def set_status(self, **mebibytes: int) -> None:
        lines = [
            "Name:\tpython",
            *(f"{name}:\t{value * 1024:8d} kB" for name, value in mebibytes.items()),
            "Threads:\t1",
        ]
        (self.proc / "self" / "status").write_text("\n".join(lines) + "\n")

    def set_groups(self, *lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text("\n".join(lines) + "\n")

    def write(self, folder: str, **files: object) -> None:
        group = self.cgroup / folder
        group.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (group / name.replace("__", ".")).write_text(f"{content}\n")

    def free(self) -> float:
        """What the limit leaves, in MiB."""
        return (self.memory.limit() - self.memory.used()) / MIB


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000 * MIB, total=4000 * MIB))
    if sys.platform != "win32":
        import resource

        monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return Host(tmp_path)


def test_used_and_peak_are_the_resident_set_and_its_high_water_mark(host: Host) -> None:
    assert host.memory.used() == 100 * MIB
    assert host.memory.peak() == 150 * MIB


def test_without_any_limit_the_machine_s_available_memory_is_free(host: Host) -> None:
    assert host.memory.limit() == 1100 * MIB


def test_the_kernel_s_own_estimate_of_what_is_available_comes_first(host: Host) -> None:
    (host.proc / "meminfo").write_text(f"MemTotal:  {2000 * 1024} kB\nMemAvailable:   {700 * 1024} kB\n")
    assert host.free() == 700


def test_every_figure_is_read_again(host: Host) -> None:
    host.set_groups("0::/job")
    host.write("job", memory__max="max", memory__current=120 * MIB)
    assert host.free() == 1000
    host.write("job", memory__max=300 * MIB)
    assert host.free() == 180
    host.write("job", memory__current=150 * MIB, memory__stat=f"inactive_file {20 * MIB}")
    assert host.free() == 170
    host.set_status(VmRSS=130)
    assert host.memory.limit() == 300 * MIB


def test_a_process_that_is_moved_has_the_limits_of_its_new_group(host: Host) -> None:
    host.write("before", memory__max=300 * MIB, memory__current=120 * MIB)
    host.write("after", memory__max=200 * MIB, memory__current=120 * MIB)
    host.set_groups("0::/before")
    assert host.free() == 180
    host.set_groups("0::/after")
    assert host.free() == 80


class TestCgroupVersion2:
    def test_the_group_of_the_process_limits_it(self, host: Host) -> None:
        host.set_groups("0::/job")
        host.write("job", memory__max=300 * MIB, memory__current=120 * MIB, memory__stat="file 0")
        assert host.free() == 180

    def test_every_ancestor_limits_it_too(self, host: Host) -> None:
        host.set_groups("0::/user/job")
        host.write("user/job", memory__max=300 * MIB, memory__current=120 * MIB)
        host.write("user", memory__max=400 * MIB, memory__current=350 * MIB)
        assert host.free() == 50

    def test_a_limit_of_max_is_none(self, host: Host) -> None:
        host.set_groups("0::/job")
        host.write("job", memory__max="max", memory__current=120 * MIB)
        assert host.free() == 1000

    def test_inactive_page_cache_counts_as_free(self, host: Host) -> None:
        host.set_groups("0::/job")
        stat = f"anon {80 * MIB}\nactive_file {5 * MIB}\ninactive_file {30 * MIB}\nslab 7"
        host.write("job", memory__max=300 * MIB, memory__current=120 * MIB, memory__stat=stat)
        assert host.free() == 210

    def test_beside_version_1_it_is_found_in_its_own_mount(self, host: Host) -> None:
        host.set_groups("4:memory:/", "0::/job")
        host.write("memory", memory__limit_in_bytes=UNLIMITED_V1, memory__usage_in_bytes=5 * MIB)
        host.write("unified/job", memory__max=300 * MIB, memory__current=120 * MIB)
        assert host.free() == 180

    @pytest.mark.parametrize("path", ["/kubepods/pod1/abc", "/../other"])
    def test_a_path_that_is_not_mounted_in_the_container_means_the_mount_s_root(self, host: Host, path: str) -> None:
        host.set_groups(f"0::{path}")
        host.write("", memory__max=300 * MIB, memory__current=100 * MIB)
        host.write("../other", memory__max=10 * MIB, memory__current=0)  # not a group at all
        assert host.free() == 200


class TestCgroupVersion1:
    def test_the_group_of_the_process_limits_it(self, host: Host) -> None:
        host.set_groups("7:cpu,cpuacct:/elsewhere", "5:name=memory-hog:/elsewhere", "4:memory:/job")
        host.write("memory/job", memory__limit_in_bytes=300 * MIB, memory__usage_in_bytes=120 * MIB)
        host.write("memory/elsewhere", memory__limit_in_bytes=10 * MIB, memory__usage_in_bytes=0)
        assert host.free() == 180

    def test_every_ancestor_limits_it_too(self, host: Host) -> None:
        host.set_groups("4:memory:/user/job")
        host.write("memory/user/job", memory__limit_in_bytes=UNLIMITED_V1, memory__usage_in_bytes=120 * MIB)
        host.write("memory/user", memory__limit_in_bytes=400 * MIB, memory__usage_in_bytes=350 * MIB)
        assert host.free() == 50

    def test_its_unlimited_is_none(self, host: Host) -> None:
        host.set_groups("4:memory:/")
        host.write("memory", memory__limit_in_bytes=UNLIMITED_V1, memory__usage_in_bytes=120 * MIB)
        assert host.free() == 1000

    def test_inactive_page_cache_of_the_whole_subtree_counts_as_free(self, host: Host) -> None:
        host.set_groups("4:memory:/job")
        stat = f"inactive_file {3 * MIB}\ntotal_inactive_file {30 * MIB}"
        host.write("memory/job", memory__limit_in_bytes=300 * MIB, memory__usage_in_bytes=120 * MIB, memory__stat=stat)
        assert host.free() == 210

    def test_a_path_that_is_not_mounted_in_the_container_means_the_mount_s_root(self, host: Host) -> None:
        host.set_groups("4:memory:/docker/0123456789")
        host.write("memory", memory__limit_in_bytes=300 * MIB, memory__usage_in_bytes=100 * MIB)
        assert host.free() == 200


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits")
class TestResourceLimits:
    @pytest.mark.parametrize(("limited", "free"), [("RLIMIT_DATA", 110), ("RLIMIT_AS", 60)])
    def test_each_is_held_against_its_own_count(
        self, host: Host, monkeypatch: pytest.MonkeyPatch, limited: str, free: int
    ) -> None:
        import resource

        soft = {"RLIMIT_DATA": 200 * MIB, "RLIMIT_AS": 460 * MIB}[limited]
        which = getattr(resource, limited)
        monkeypatch.setattr(
            resource,
            "getrlimit",
            lambda asked: (soft if asked == which else resource.RLIM_INFINITY, resource.RLIM_INFINITY),
        )
        assert host.free() == free


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits")
def test_what_the_heap_keeps_for_itself_is_free(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a large micro-batch less is resident, and the kernel counts as much as before: it will be used again."""
    import resource

    asked_for = resource.RLIMIT_DATA
    soft = 200 * MIB
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda asked: (soft if asked == asked_for else resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    )
    host.set_status(VmHWM=150, VmRSS=100, RssAnon=90, VmData=90, VmSize=400)
    assert host.memory.limit() == (100 + 110) * MIB
    host.set_status(VmHWM=150, VmRSS=80, RssAnon=70, VmData=90, VmSize=400)
    assert host.memory.limit() == (80 + 130) * MIB
    later = CpuMemory(host.proc, host.cgroup)  # of the next run in the same process
    assert later.limit() == (80 + 130) * MIB


def test_the_tightest_constraint_wins(host: Host) -> None:
    host.set_groups("4:memory:/job", "0::/")
    host.write("memory/job", memory__limit_in_bytes=300 * MIB, memory__usage_in_bytes=120 * MIB)
    host.write("", memory__max=300 * MIB, memory__current=290 * MIB)
    assert host.free() == 10


def test_the_limit_is_never_below_what_is_used(host: Host) -> None:
    host.write("", memory__max=100 * MIB, memory__current=130 * MIB)
    assert host.memory.limit() == 100 * MIB


class TestPeak:
    def test_reset_asks_the_kernel(self, host: Host) -> None:
        host.memory.reset_peak()
        assert (host.proc / "self" / "clear_refs").read_text() == "5"
        host.set_status(VmHWM=110, VmRSS=105)
        assert host.memory.peak() == 110 * MIB

    def test_where_the_kernel_s_peak_cannot_be_reset_it_is_sampled(self, host: Host) -> None:
        (host.proc / "self" / "clear_refs").mkdir()  # opening it to write fails
        host.memory.reset_peak()
        assert host.memory.peak() == 100 * MIB
        host.set_status(VmHWM=150, VmRSS=120)
        assert host.memory.peak() == 120 * MIB
        host.set_status(VmHWM=150, VmRSS=110)
        assert host.memory.peak() == 120 * MIB
        host.memory.reset_peak()
        assert host.memory.peak() == 110 * MIB

    def test_the_kernel_s_peak_is_trusted_again_once_it_rises_above_the_stale_one(self, host: Host) -> None:
        (host.proc / "self" / "clear_refs").mkdir()
        host.memory.reset_peak()
        host.set_status(VmHWM=170, VmRSS=120)
        assert host.memory.peak() == 170 * MIB

    @linux_only
    def test_a_tensor_that_came_and_went_is_in_the_peak_until_it_is_reset(self) -> None:
        memory = CpuMemory()
        memory.reset_peak()
        before = memory.used()
        torch.ones(64 * MIB)
        assert memory.peak() - before > 200 * MIB
        assert memory.used() - before < 100 * MIB
        memory.reset_peak()
        assert memory.peak() - before < 100 * MIB


def test_without_procfs_psutil_answers(tmp_path: Path) -> None:
    memory = CpuMemory(tmp_path / "proc", tmp_path / "cgroup")
    rss = psutil.Process().memory_info().rss
    assert abs(memory.used() - rss) < 50 * MIB
    memory.reset_peak()
    held = torch.ones(32 * MIB)
    assert memory.peak() - rss > 100 * MIB
    del held
    assert memory.peak() - rss > 100 * MIB
    memory.reset_peak()
    assert memory.peak() - rss < 50 * MIB
    assert memory.limit() > rss
    assert memory.strained() is None


class TestRelease:
    @pytest.mark.skipif(not hasattr(os, "confstr") or sys.platform != "linux", reason="glibc only")
    def test_it_returns_the_c_library_s_free_memory_to_the_system(self) -> None:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            pytest.skip("glibc only")
        memory = CpuMemory()
        small = [torch.ones(4096) for _ in range(8192)]  # 128 MiB, below the size that is mapped on its own
        keep = small[-1].clone()  # above them on the heap, so that the heap cannot shrink by itself
        full = memory.used()
        del small
        memory.release()
        assert full - memory.used() > 64 * MIB
        assert keep.sum() == 4096


CHILD = """
import re, resource
from autoaccum.memory.cpu import CpuMemory

data = int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (data + 100 * 2**20, resource.RLIM_INFINITY))
memory = CpuMemory()
print(memory.limit() - memory.used())
"""


@linux_only
@in_turn
def test_a_real_resource_limit_is_seen() -> None:
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    assert 90 * MIB < int(child.stdout) <= 100 * MIB


def test_what_others_hold_could_be_had_up_to_the_tightest_limit_on_all(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host.memory.capacity() == 4000 * MIB
    (host.proc / "meminfo").write_text(f"MemTotal: {3000 * 1024} kB\nMemAvailable: {500 * 1024} kB\n")
    assert host.memory.capacity() == 3000 * MIB
    host.set_groups("0::/job")
    host.write("job", memory__max=2000 * MIB, memory__current=1900 * MIB)
    assert host.memory.capacity() == 2000 * MIB, "others in the group may give back what they use"
    assert host.memory.limit() == 200 * MIB
    if sys.platform != "win32":
        import resource

        monkeypatch.setattr(resource, "getrlimit", lambda which: (300 * MIB, 300 * MIB))
        assert host.memory.capacity() < 500 * MIB, "a process's own limit is given back by nobody"
        assert host.memory.capacity() >= host.memory.limit()
