"""Signs that the host's memory is short although nothing failed: tasks wait for it, or a limit had to be defended.

Pressure stall information (Johannes Weiner, 2018; Linux 4.20) adds up the time in which tasks could not go on because
the kernel was busy finding memory for them: reclaiming, swapping, or reading back what it had just dropped.
"""

from __future__ import annotations

from pathlib import Path

from autoaccum.memory import clock
from autoaccum.memory.cgroups import ControlGroups
from autoaccum.memory.procfs import number, read, stalled_us

# systemd's default for telling a service to shrink: 200 ms out of 2 s. Reclaiming clean page cache for a data set that
# is read through costs far less than that, and swapping costs more.
_TOLERATED_SHARE = 0.1
"""Share of the time in which tasks may wait for memory without it being called short."""

# A stall of a few milliseconds means nothing; in a window that is as short, it would be a large part of it.
_SHORTEST_SECONDS = 1.0
"""Seconds that have to pass before the counters are judged again."""

_SCARCE_SHARE = 0.1
"""Share of a machine's or a group's memory below which what is available, or can be reclaimed, is scarce."""


class HostPressure:
    """A comparison of the kernel's counters with those of the last time.

    Args:
        proc: where procfs is mounted.
        groups: the control groups of this process.
    """

    def __init__(self, proc: Path, groups: ControlGroups) -> None:
        self._machine = str(proc / "pressure" / "memory")
        self._meminfo = str(proc / "meminfo")
        self._groups = groups
        # The moment of the last judgment, and the counters then; None before the first call, which has nothing to
        # compare with and only reads them.
        self._since: float | None = None
        self._counters: dict[str, int] = {}

    def reason(self) -> str | None:
        """Say why memory is short, judged over the time since the last judgment: a second at least.

        Returns:
            None when it is not short, when the last judgment was just now, and at the first call.
        """
        now = clock.now()
        # A call that comes too early changes nothing, so that what happened meanwhile is judged by a later one.
        if self._since is not None and now - self._since < _SHORTEST_SECONDS:
            return None
        since, before = self._since, self._counters
        self._since, self._counters = now, self._read()
        if since is None:
            return None
        # A counter that was not there the last time, of a group that the process was moved to, has not risen yet.
        risen = {name: counter - before.get(name, counter) for name, counter in self._counters.items()}
        microseconds = (now - since) * 1e6

        # Whoever is to blame, those who waited were this process or its neighbours in the same group.
        own = risen.get(self._groups.pressure_file() or "", 0) / microseconds
        if own > _TOLERATED_SHARE:
            return f"processes of this control group waited for memory {own:.0%} of the time"
        # That others wait is no business of ours while the machine has enough: they are at a limit of their own.
        waited = risen.get(self._machine, 0) / microseconds
        if waited > _TOLERATED_SHARE and (available := self._available_share()) < _SCARCE_SHARE:
            return f"processes waited for memory {waited:.0%} of the time, with {available:.0%} of it available"
        for group in self._groups.all():
            # A group that reads files fills up to its limit, and reaches it again and again: it is short only when
            # there is no page cache left to drop.
            times = risen.get(group.folder, 0)
            if times > 0 and group.reclaimable_share() < _SCARCE_SHARE:
                return f"the control group's memory limit was reached {times} time{'' if times == 1 else 's'}"
        return None

    def _read(self) -> dict[str, int]:
        """Return what only rises: microseconds of waiting by file, and how often limits were reached by folder."""
        files = (self._machine, self._groups.pressure_file())
        found = {file: stalled_us(read(file)) for file in files if file is not None}
        found |= {group.folder: group.times_reached() for group in self._groups.all()}
        return {name: counter for name, counter in found.items() if counter is not None}

    def _available_share(self) -> float:
        """Return the share of the machine's memory that is available; 1.0, which is never scarce, if not told."""
        meminfo = read(self._meminfo)
        available, total = number(meminfo, "MemAvailable"), number(meminfo, "MemTotal")
        return available / total if available is not None and total else 1.0
