"""The kernel's counts of its kills, read from a procfs and control groups made of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoaccum.memory.kills import OomKills, have_risen


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{content}\n")


def machine(root: Path, kills: int | None, *groups: str) -> OomKills:
    write(root / "proc/sys/kernel/random/boot_id", "b0")
    write(root / "proc/vmstat", "pgfault 12\n" + ("" if kills is None else f"oom_kill {kills}"))
    write(root / "proc/self/cgroup", "\n".join(groups))
    return OomKills(root / "proc", root / "groups")


def test_of_the_machine_under_the_name_of_its_boot(tmp_path: Path) -> None:
    assert machine(tmp_path, 3).counts() == {"boot b0": 3}
    assert machine(tmp_path, None).counts() == {}, "kernels before 4.13 do not count"


def test_of_the_groups_of_version_2_and_those_above(tmp_path: Path) -> None:
    folder = tmp_path / "groups"
    for name, kills in (("user/job", 2), ("user", 5)):
        write(folder / name / "memory.max", 100)
        write(folder / name / "memory.events", f"low 0\nhigh 7\nmax 9\noom 4\noom_kill {kills}\noom_group_kill 8")
    counts = machine(tmp_path, 1, "0::/user/job").counts()
    assert counts == {"boot b0": 1, str(folder / "user/job"): 2, str(folder / "user"): 5}


def test_of_the_groups_of_version_1(tmp_path: Path) -> None:
    folder = tmp_path / "groups/memory/job"
    write(folder / "memory.limit_in_bytes", 100)
    write(folder / "memory.oom_control", "oom_kill_disable 1\nunder_oom 1\noom_kill 6")
    assert machine(tmp_path, 1, "4:memory:/job").counts() == {"boot b0": 1, str(folder): 6}
    write(folder / "memory.oom_control", "oom_kill_disable 1\nunder_oom 1")
    assert machine(tmp_path, 1, "4:memory:/job").counts() == {"boot b0": 1}, "kernels before 4.13 do not count"


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
