"""A machine whose kernel kills for lack of memory, and the mark of a window that it may find."""

from __future__ import annotations

from pathlib import Path

from autoaccum.runs.window_mark import WindowMark


class Machine:
    """A procfs with a count of kills, and no control groups."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/sys/kernel/random").mkdir(parents=True)
        (root / "proc/self").mkdir()
        (root / "proc/self/cgroup").write_text("")
        self.boot("first")
        self.kills(3)

    def boot(self, name: str) -> None:
        (self.root / "proc/sys/kernel/random/boot_id").write_text(f"{name}\n")

    def kills(self, count: int) -> None:
        (self.root / "proc/vmstat").write_text(f"pgfault 7\noom_kill {count}\n")


def begun(folder: Path) -> WindowMark:
    mark = WindowMark(folder)
    mark.begin()
    return mark
