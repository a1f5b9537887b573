"""How often the kernel has killed for lack of memory: what a process that was killed cannot say itself."""

from __future__ import annotations

from pathlib import Path

from autoaccum.memory.cgroups import ControlGroups
from autoaccum.memory.procfs import number, read


class OomKills:
    """The kernel's counts, of the whole machine and of this process's control groups; they only rise.

    Args:
        proc: where procfs is mounted.
        mount: where the control groups are mounted.
    """

    def __init__(self, proc: Path = Path("/proc"), mount: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._groups = ControlGroups(proc / "self", mount)

    def counts(self) -> dict[str, int]:
        """Return the counts by the name of what they are of: the machine's boot, or the folder of a group."""
        # The machine's count starts again with each boot: it must not be compared with one from before.
        boot = read(str(self._proc / "sys/kernel/random/boot_id")).decode().strip()
        found: dict[str, int] = {}
        machine_kills = number(read(str(self._proc / "vmstat")), "oom_kill")
        if machine_kills is not None:  # Linux 4.13 and later
            found[f"boot {boot}"] = machine_kills
        for group in self._groups.all():
            for name in ("memory.events", "memory.oom_control"):  # of version 2, of version 1
                kills = number(read(f"{group.folder}/{name}"), "oom_kill")
                if kills is not None:
                    found[group.folder] = kills
        return found


def have_risen(before: dict[str, int], now: dict[str, int]) -> bool:
    """Return whether any count that was there before is larger now.

    A name that is missing now says nothing: the process may have been started again in another group.
    """
    return any(now.get(name, 0) > count for name, count in before.items())
