"""What groups limit is tested with the memory that they limit, in test_cpu.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoaccum.memory.cgroups import ControlGroup, ControlGroups


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")
    return folder


def groups_of(root: Path, *lines: str) -> ControlGroups:
    write(root / "self", cgroup="\n".join(lines))
    return ControlGroups(root / "self", root / "mount")


def group(folder: Path) -> ControlGroup:
    return ControlGroup(
        folder=str(folder), limit_file="memory.max", usage_file="memory.current", reclaimable="inactive_file"
    )


class TestGroup:
    def test_it_leaves_free_what_its_limit_does_and_the_cache_it_can_drop(self, tmp_path: Path) -> None:
        one = group(write(tmp_path, memory__max=100, memory__current=70, memory__stat="inactive_file 15"))
        assert one.free(enough=1000) == 45
        assert one.free(enough=40) == 45
        assert one.free(enough=20) == 30, "at least enough, so that its statistics need not be read"

    @pytest.mark.parametrize("limit", ["max", 9223372036854771712, ""])
    def test_without_a_limit_it_leaves_enough(self, tmp_path: Path, limit: object) -> None:
        assert group(write(tmp_path, memory__max=limit, memory__current=70)).free(enough=1000) == 1000

    def test_the_share_of_its_usage_that_can_be_dropped(self, tmp_path: Path) -> None:
        one = group(write(tmp_path, memory__current=60))
        assert one.reclaimable_share() == 0
        write(tmp_path, memory__stat="inactive_file 15")
        assert one.reclaimable_share() == 0.25

    def test_the_times_it_was_at_either_limit_of_its_own(self, tmp_path: Path) -> None:
        one = group(tmp_path)
        write(tmp_path, memory__events="low 0\nhigh 500\nmax 700\noom 0")  # those of the groups below, too
        assert one.times_reached() is None
        write(tmp_path, memory__events__local="low 9\nhigh 5\nmax 7\noom 11")
        assert one.times_reached() == 12


class TestPressureFile:
    def test_it_is_the_group_s_own_and_no_ancestor_s(self, tmp_path: Path) -> None:
        own = write(tmp_path / "mount/user/job", memory__pressure="")
        write(tmp_path / "mount/user", memory__pressure="")
        assert groups_of(tmp_path, "0::/user/job").pressure_file() == str(own / "memory.pressure")

    def test_beside_version_1_it_is_in_version_2_s_mount(self, tmp_path: Path) -> None:
        own = write(tmp_path / "mount/unified/job", memory__pressure="")
        groups = groups_of(tmp_path, "4:memory:/elsewhere", "0::/job")
        assert groups.pressure_file() == str(own / "memory.pressure")

    @pytest.mark.parametrize("path", ["/", "/kubepods/pod1/abc"])
    def test_a_mounted_root_with_a_limit_is_the_container_s_group(self, tmp_path: Path, path: str) -> None:
        root = write(tmp_path / "mount", memory__pressure="", memory__max="max")
        assert groups_of(tmp_path, f"0::{path}").pressure_file() == str(root / "memory.pressure")

    def test_the_root_of_all_groups_is_the_machine_and_not_a_group_of_ours(self, tmp_path: Path) -> None:
        write(tmp_path / "mount", memory__pressure="")
        assert groups_of(tmp_path, "0::/").pressure_file() is None

    def test_none_without_pressure_stall_information(self, tmp_path: Path) -> None:
        write(tmp_path / "mount/job", memory__max=100)
        assert groups_of(tmp_path, "0::/job").pressure_file() is None
        assert ControlGroups(tmp_path / "none", tmp_path / "mount").pressure_file() is None


def test_only_groups_that_can_have_a_limit_are_asked(tmp_path: Path) -> None:
    own = write(tmp_path / "mount/user/job", memory__max=100)
    write(tmp_path / "mount/user", memory__pressure="")
    assert [one.folder for one in groups_of(tmp_path, "0::/user/job").all()] == [str(own)]
