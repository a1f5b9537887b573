"""Walks through one steady window: which files of ours a run enters for it, in order, and which functions there.

``python docs/walk.py`` prints the walk; ``--write`` puts it into ``docs/design.md``.

The run is a small model with cross entropy, on the CPU, in micro-batches, in the midst of an epoch. It is followed
with a ``micro_batch`` that was passed, and with one that was searched for, long after the search has settled. The clock
stands still while a window is run, so that nothing depends on how fast the machine is: the look at the memory that is
taken up to 50 times a second comes in the windows before, and is followed in a walk of its own.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # walks through the package beside it

import torch  # noqa: E402

import autoaccum  # noqa: E402
from autoaccum.events import StepReport  # noqa: E402
from autoaccum.testing import manual_clock  # noqa: E402

PACKAGE = Path(autoaccum.__file__).parent
PAGE = ROOT / "docs" / "design.md"
BEGIN, END = "<!-- walk: written by docs/walk.py -->\n", "<!-- end of the walk -->\n"

EARLY = 125
"""The window that is followed where sizes were passed: none whose forwards are looked at, as every tenth one is."""
SETTLED = 125
"""The window that is followed after a search: timing a dozen plans four times each is over by then."""
LONG_ENOUGH = 1.0
"""Seconds after which a run looks at its memory again before a window."""

Walk = dict[str, list[str]]
"""The functions that were entered, by their files, both in the order in which they were entered first."""


def follow(window: int, *, looks: bool = False, **arguments: Any) -> Walk:
    """Train up to a window, and return the walk from the report of the window before it to its own.

    Args:
        window: the number of the window, the first being 1.
        looks: whether it begins with a look at the memory.
        arguments: for the run, beside those that all walks share.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    data = torch.randn(512, 8), torch.randint(4, (512,))  # 8 windows an epoch
    walk: Walk = {}

    def enter(frame: FrameType) -> None:
        path = Path(frame.f_code.co_filename)
        name = frame.f_code.co_qualname.split(".<")[0]  # what is defined inside a function is part of it
        # A run of yours reads the real clock; and what makes tracebacks short was entered once, before all windows.
        if path.is_relative_to(PACKAGE) and not name.startswith("ManualClock."):
            names = walk.setdefault(path.relative_to(PACKAGE).as_posix(), [])
            if name not in names and not name.startswith("<"):
                names.append(name)

    with manual_clock() as clock:

        def callback(record: Any) -> None:
            if isinstance(record, StepReport) and record.step == window:
                sys.setprofile(None)
            elif isinstance(record, StepReport):
                if looks or record.step < window - 1:
                    clock.advance(LONG_ENOUGH)
                if record.step == window - 1:
                    for frame in reversed(list(callers())):  # the loop itself was entered long ago
                        enter(frame)
                    sys.setprofile(lambda frame, event, _: enter(frame) if event == "call" else None)

        trainer = autoaccum.Trainer(
            model,
            data,
            effective_batch=64,
            loss_fn=torch.nn.functional.cross_entropy,
            steps=window,
            device="cpu",
            progress=False,
            cache=False,
            callbacks=[callback],
            **arguments,
        )
        try:
            trainer.fit()
        finally:
            sys.setprofile(None)
    return walk


def callers() -> Iterator[FrameType]:
    """Yield the frames that are on the stack, the newest first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def steady() -> Walk:
    """Return the walk of a steady window, with a size that was passed or searched: whichever enters more files."""
    passed, searched = follow(EARLY, micro_batch=16), follow(SETTLED, max_micro_batch=16)
    return searched if len(searched) > len(passed) else passed


def text() -> str:
    """Return the walk as a list in Markdown, and what it goes through besides at times."""
    walk = steady()
    lines = [f"{index}. `{file}`: {', '.join(names)}" for index, (file, names) in enumerate(walk.items(), 1)]
    looking = follow(SETTLED, max_micro_batch=16, looks=True)
    with tempfile.TemporaryDirectory() as folder:
        recording = follow(EARLY, micro_batch=16, run_dir=folder)
    for found, when in (
        (looking, "Up to 50 times a second a window begins with a look at the memory, which goes through"),
        (recording, "With a `run_dir` a window goes through"),
    ):
        more = [f"`{file}`" for file in found if file not in walk]
        lines += ["", f"{when} {', '.join(more)} too."]
    return "\n".join(lines) + "\n"


def listed(page: str) -> list[str]:
    """Return the files that a page lists between the marks, in order."""
    between = page.split(BEGIN)[1].split(END)[0]
    return [line.split("`")[1] for line in between.splitlines() if line[:1].isdigit()]


def main() -> None:
    """Print the walk, or write it into the page."""
    if "--write" not in sys.argv:
        print(text(), end="")
        return
    head, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(head + BEGIN + text() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
