"""The mark of the window that is being run: what the next process concludes from it."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from autoaccum.runs.window_mark import OomKills, WindowMark, have_risen
from tests.runs.machine import Machine, begun

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a procfs")


class TestWindowMark:
    def test_a_window_that_the_kernel_ended(self, tmp_path: Path, machine: Machine) -> None:
        mark = begun(tmp_path)
        assert mark.died_of_memory is None
        mark.enter(64, 10)
        machine.kills(4)
        mark = WindowMark(tmp_path)
        assert mark.died_of_memory == (64, 10)
        mark.close()
        assert begun(tmp_path).died_of_memory == (64, 10), "nothing was begun in between"
        assert begun(tmp_path).died_of_memory is None, "that was the process before the last"

    def test_another_end(self, tmp_path: Path, machine: Machine) -> None:
        begun(tmp_path).enter(64, 10)
        assert WindowMark(tmp_path).died_of_memory is None, "the kernel killed nobody"
        mark = begun(tmp_path)
        mark.enter(64, 10)
        mark.leave()
        machine.kills(5)
        assert WindowMark(tmp_path).died_of_memory is None, "not inside a window"
        mark = begun(tmp_path)
        mark.enter(64, 10)
        mark.close()
        machine.kills(6)
        assert WindowMark(tmp_path).died_of_memory is None, "an error, which was told"
        begun(tmp_path).enter(64, 10)
        machine.boot("second")
        machine.kills(9)
        assert WindowMark(tmp_path).died_of_memory is None, "another boot, whose count says nothing"

    @pytest.mark.parametrize(
        "mark", [(1, 0, 10), (1, 64, 0), (1, -1, 10), (1, 2**62, 10), (1, 64, 2**63 - 1), (7, 64, 10)]
    )
    def test_marks_that_are_none(self, mark: tuple[int, int, int], tmp_path: Path, machine: Machine) -> None:
        begun(tmp_path)
        machine.kills(9)
        (tmp_path / "window").write_bytes(struct.pack("<3q", *mark))
        assert WindowMark(tmp_path).died_of_memory is None
        (tmp_path / "window").write_bytes(struct.pack("<3q", 1, 64, 10))
        assert WindowMark(tmp_path).died_of_memory == (64, 10)

    @pytest.mark.parametrize(
        "content",
        ["", "{", "[]", "3", "null", '{"a": NaN}', '{"a": 1e99}', '{"a": 1%s}' % ("0" * 5000), "[" * 100_000, "\udcff"],
    )  # fmt: skip
    def test_files_that_are_torn(self, content: str, tmp_path: Path, machine: Machine) -> None:
        begun(tmp_path).enter(64, 10)
        (tmp_path / "kills.json").write_text(content, errors="surrogateescape")
        machine.kills(9)
        assert WindowMark(tmp_path).died_of_memory is None
        (tmp_path / "window").write_bytes(b"\x01")
        assert WindowMark(tmp_path).died_of_memory is None

    def test_it_is_in_the_file_at_once(self, tmp_path: Path, machine: Machine) -> None:
        mark = begun(tmp_path)
        mark.enter(64, 10)
        assert struct.unpack("<3q", (tmp_path / "window").read_bytes()) == (1, 64, 10)
        mark.leave()
        assert (tmp_path / "window").read_bytes() == bytes(24)


# The kernel's counts of its kills, read from a procfs and control groups made of files.


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{content}\n")


def counted(root: Path, kills: int | None, *groups: str) -> OomKills:
    write(root / "proc/sys/kernel/random/boot_id", "b0")
    write(root / "proc/vmstat", "pgfault 12\n" + ("" if kills is None else f"oom_kill {kills}"))
    write(root / "proc/self/cgroup", "\n".join(groups))
    return OomKills(root / "proc", root / "groups")


def test_of_the_machine_under_the_name_of_its_boot(tmp_path: Path) -> None:
    assert counted(tmp_path, 3).counts() == {"boot b0": 3}
    assert counted(tmp_path, None).counts() == {}, "kernels before 4.13 do not count"


def test_of_the_groups_of_version_2_and_those_above(tmp_path: Path) -> None:
    folder = tmp_path / "groups"
    for name, kills in (("user/job", 2), ("user", 5)):
        write(folder / name / "memory.max", 100)
        write(folder / name / "memory.events", f"low 0\nhigh 7\nmax 9\noom 4\noom_kill {kills}\noom_group_kill 8")
    counts = counted(tmp_path, 1, "0::/user/job").counts()
    assert counts == {"boot b0": 1, str(folder / "user/job"): 2, str(folder / "user"): 5}


def test_of_the_groups_of_version_1(tmp_path: Path) -> None:
    folder = tmp_path / "groups/memory/job"
    write(folder / "memory.limit_in_bytes", 100)
    write(folder / "memory.oom_control", "oom_kill_disable 1\nunder_oom 1\noom_kill 6")
    assert counted(tmp_path, 1, "4:memory:/job").counts() == {"boot b0": 1, str(folder): 6}
    write(folder / "memory.oom_control", "oom_kill_disable 1\nunder_oom 1")
    assert counted(tmp_path, 1, "4:memory:/job").counts() == {"boot b0": 1}, "kernels before 4.13 do not count"


def test_a_system_without_any(tmp_path: Path) -> None:
    assert OomKills(tmp_path / "none", tmp_path / "nor here").counts() == {}


def test_this_machine_counts_and_a_count_of_its_own_never_falls() -> None:
    before = OomKills().counts()
    assert not have_risen(OomKills().counts(), before)
    assert all(count >= 0 for count in before.values())


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"boot a": 1}, {"boot a": 1}, False),
        ({"boot a": 1}, {"boot a": 2}, True),
        ({"boot a": 1, "group": 0}, {"boot a": 1, "group": 1}, True),
        ({"boot a": 1}, {"boot b": 7}, False),
        ({"boot a": 5, "group": 5}, {"boot b": 0, "group": 0}, False),
        ({}, {"boot a": 7}, False),
        ({"group": 3}, {}, False),
    ],
)
def test_have_risen(before: dict[str, int], now: dict[str, int], expected: bool) -> None:
    """Only a count that was there before: another boot or another group begins anew."""
    assert have_risen(before, now) is expected
