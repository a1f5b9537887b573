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
    limits = ("memory.max", "memory.high")
    return ControlGroup(
        folder=str(folder), limit_files=limits, usage_file="memory.current", reclaimable="inactive_file"
    )


class TestGroup:
    def test_it_leaves_free_what_its_limit_does_and_the_cache_it_can_drop(self, tmp_path: Path) -> None:
        one = group(write(tmp_path, memory__max=100, memory__current=70, memory__stat="inactive_file 15"))
        assert one.free(enough=1000) == 45
        assert one.free(enough=40) == 45
        assert one.free(enough=20) == 30, "at least enough, so that its statistics need not be read"

    @pytest.mark.parametrize(("most", "high"), [(100, 80), ("max", 80), (80, "max"), (80, 100)])
    def test_the_lower_of_two_limits_counts(self, tmp_path: Path, most: object, high: object) -> None:
        """Processes are slowed down above "high", long before "max"."""
        one = group(write(tmp_path, memory__max=most, memory__high=high, memory__current=70, memory__stat=""))
        assert (one.limit(), one.free(enough=1000)) == (80, 10)

    def test_a_group_is_asked_for_both(self, tmp_path: Path) -> None:
        write(tmp_path / "mount/job", memory__max="max", memory__high=90)
        (one,) = groups_of(tmp_path, "0::/job").all()
        assert one.limit() == 90

    @pytest.mark.parametrize("limit", ["max", 9223372036854771712, ""])
    def test_without_a_limit_it_leaves_enough(self, tmp_path: Path, limit: object) -> None:
        assert group(write(tmp_path, memory__max=limit, memory__current=70)).free(enough=1000) == 1000


def test_only_groups_that_can_have_a_limit_are_asked(tmp_path: Path) -> None:
    own = write(tmp_path / "mount/user/job", memory__max=100)
    write(tmp_path / "mount/user", memory__pressure="")
    assert [one.folder for one in groups_of(tmp_path, "0::/user/job").all()] == [str(own)]
