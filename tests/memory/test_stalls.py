from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autoaccum.memory.cgroups import ControlGroups
from autoaccum.memory.clock import ManualClock
from autoaccum.memory.stalls import HostPressure
from autoaccum.testing import manual_clock

OWN = "processes of this control group waited for memory {} of the time"


class Host:
    """A made-up host whose process is in the group /user/job, and a clock."""

    def __init__(self, root: Path, clock: ManualClock) -> None:
        self._clock = clock
        self.proc, self.mount = root / "proc", root / "cgroup"
        (self.proc / "pressure").mkdir(parents=True)
        (self.proc / "self").mkdir()
        (self.mount / "user" / "job").mkdir(parents=True)
        (self.proc / "self" / "cgroup").write_text("0::/user/job\n")
        self.available(50)
        self._pressure = HostPressure(self.proc, ControlGroups(self.proc / "self", self.mount))

    def available(self, percent: int) -> None:
        (self.proc / "meminfo").write_text(f"MemTotal:    20000 kB\nMemAvailable:    {percent * 200} kB\n")

    def waited(self, milliseconds: int, where: str = "") -> None:
        path = self.mount / where / "memory.pressure" if where else self.proc / "pressure" / "memory"
        some, full = milliseconds * 1000, milliseconds * 500
        path.write_text(f"some avg10=99.00 avg60=99.00 avg300=9.00 total={some}\nfull avg10=9.00 total={full}\n")

    def group(self, where: str, *, high: int = 0, at_max: int = 0, cache: int = 0) -> None:
        folder = self.mount / where
        (folder / "memory.max").write_text("1000\n")
        (folder / "memory.current").write_text("1000\n")
        (folder / "memory.stat").write_text(f"anon {1000 - cache}\ninactive_file {cache}\n")
        (folder / "memory.events.local").write_text(f"low 0\nhigh {high}\nmax {at_max}\noom 0\n")

    def why(self, after: float = 0.0) -> str | None:
        self._clock.advance(after)
        return self._pressure.reason()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with manual_clock(100.0) as clock:
        yield Host(tmp_path, clock)


class TestOwnGroup:
    def test_it_is_strained_when_it_waits_for_more_than_a_tenth_of_the_time(self, host: Host) -> None:
        host.waited(3000, "user/job")
        assert host.why() is None, "from before the first call"
        host.waited(4200, "user/job")
        assert host.why(after=10) == OWN.format("12%")
        host.waited(5100, "user/job")
        assert host.why(after=10) is None
        host.waited(6600, "user/job")
        assert host.why(after=2) == OWN.format("75%")

    def test_a_second_is_the_least_that_is_judged_and_nothing_in_it_is_lost(self, host: Host) -> None:
        host.waited(0, "user/job")
        assert host.why() is None
        host.waited(15, "user/job")
        assert host.why(after=0.02) is None
        host.waited(150, "user/job")
        assert host.why(after=0.9) is None
        assert host.why(after=0.08) == OWN.format("15%")
        assert host.why(after=1) is None

    def test_other_groups_are_not_this_one(self, host: Host) -> None:
        for milliseconds in (0, 900):
            host.waited(milliseconds, "user")
            host.waited(0, "user/job")
            assert host.why(after=1) is None

    def test_a_process_that_is_moved_starts_again(self, host: Host) -> None:
        (host.mount / "other").mkdir()
        host.waited(0, "user/job")
        host.waited(90_000, "other")
        assert host.why() is None
        (host.proc / "self" / "cgroup").write_text("0::/other\n")
        assert host.why(after=1) is None
        host.waited(90_500, "other")
        assert host.why(after=1) == OWN.format("50%")


class TestMachine:
    def test_others_that_wait_matter_only_while_the_machine_itself_is_short(self, host: Host) -> None:
        host.waited(0)
        assert host.why() is None
        host.waited(500)
        assert host.why(after=1) is None
        host.available(9)
        assert host.why(after=1) is None, "nobody waited"
        host.waited(1000)
        assert host.why(after=1) == "processes waited for memory 50% of the time, with 9% of it available"
        host.waited(1090)
        assert host.why(after=1) is None

    def test_without_knowing_what_is_available_it_is_not_judged(self, host: Host) -> None:
        (host.proc / "meminfo").unlink()
        host.waited(0)
        assert host.why() is None
        host.waited(900)
        assert host.why(after=1) is None


class TestLimits:
    @pytest.mark.parametrize("where", ["user/job", "user"])
    def test_a_limit_that_was_reached_without_cache_to_drop(self, host: Host, where: str) -> None:
        host.group(where, high=3, at_max=4)
        assert host.why() is None
        assert host.why(after=1) is None
        host.group(where, high=4, at_max=6, cache=99)
        assert host.why(after=1) == "the control group's memory limit was reached 3 times"
        assert host.why(after=1) is None
        host.group(where, high=5, at_max=6)
        assert host.why(after=1) == "the control group's memory limit was reached 1 time"

    def test_filling_it_with_page_cache_is_no_strain(self, host: Host) -> None:
        host.group("user/job", cache=100)
        assert host.why() is None
        host.group("user/job", at_max=500, cache=100)
        assert host.why(after=1) is None


def test_nothing_to_read_is_no_strain(tmp_path: Path) -> None:
    nowhere = HostPressure(tmp_path / "proc", ControlGroups(tmp_path / "proc" / "self", tmp_path / "cgroup"))
    with manual_clock() as clock:
        assert nowhere.reason() is None
        clock.advance(5.0)
        assert nowhere.reason() is None
