"""What tests and doctests share: no memory of past runs, nothing in the working tree, a clock that training moves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from autoaccum.memory.clock import ManualClock, using

SECONDS_A_MICRO_BATCH = 1 / 1024
"""Whatever its size: so no plan is faster than that of the largest micro-batches that fit."""
SECONDS_A_STEP = 1 / 32
"""More than any memory's ``reading_seconds``: it is looked at before every window, however fast the machine is."""

_numbers = count()

# Not --doctest-ignore-import-errors, with which pytest takes a file of tests that cannot be imported for an empty one.
_OF_TRAINERS = ["autoaccum/integrations/tr*.py", "tests/integrations/*trainer*.py"]
_NEEDS = {
    "transformers": _OF_TRAINERS,
    "accelerate": _OF_TRAINERS,
    "lightning": ["autoaccum/integrations/lightning*.py", "tests/integrations/lightning_runs.py"],
}
collect_ignore_glob = [one for name, files in _NEEDS.items() if find_spec(name) is None for one in files]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return two workers, or none for tests that are named one by one: to start them takes longer than such tests."""
    return 0 if all("::" in argument for argument in config.args) else 2


class WorkClock(ManualClock):
    """A clock that training moves, and nothing else: each backward pass, and each step of an optimizer.

    To wait by it is to wait: tests do so for other threads and processes, whose clock is the machine's.
    """

    def sleep(self, seconds: float) -> None:
        """Return after so many of the machine's seconds."""
        time.sleep(seconds)


@pytest.fixture(scope="session")
def _pasts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("past")


@pytest.fixture(autouse=True)
def _no_past(monkeypatch: pytest.MonkeyPatch, _pasts: Path) -> None:
    """A test, its child processes too, begins from nothing and leaves nothing."""
    own = _pasts / str(next(_numbers))
    own.mkdir()
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", str(own / "autoaccum"))
    monkeypatch.setenv("AUTOACCUM_RUNS_DIR", str(own / "runs"))  # of what the command line keeps by default


@pytest.fixture(autouse=True)
def work_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkClock]:
    """What a test asserts cannot depend on how busy the machine is; child processes have the machine's clock."""
    clock = WorkClock(stamp=time.time())
    if request.node.get_closest_marker("machine_clock"):
        yield clock
        return
    backward = torch.autograd.backward

    def timed(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        clock.advance(SECONDS_A_MICRO_BATCH)

    monkeypatch.setattr(torch.autograd, "backward", timed)
    steps = register_optimizer_step_post_hook(lambda *_: clock.advance(SECONDS_A_STEP))
    with using(clock):
        yield clock
    steps.remove()
