"""What all tests share: one thread, so that numbers do not depend on the machine, the GPU mark, and what saves time."""

from __future__ import annotations

import gc
import logging
import signal
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
# A shell has what it starts in the background ignore Ctrl-C, and then Python does not catch it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Nothing here is timed: a busy machine is no failure.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

if not torch.accelerator.is_available():
    # torch.manual_seed formats the whole stack for each kind of device that is not there, 3 ms under pytest, and keeps
    # it, to say later who has seeded the device.
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        kind.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
# pytest puts its handlers on each logger that does not propagate, six times a test; torch has some fifty of them.
for logger in logging.root.manager.loggerDict.values():
    if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
        logger.propagate = True


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> None:
    """Recovery collects garbage: it need not look at torch's hundreds of thousands of objects, nor at pytest's."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _measure_nothing(items)
    if not torch.accelerator.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an accelerator"))


UNMEASURED = (
    "tests/laws/test_laws.py",
    "tests/laws/test_laws_everywhere.py",
    "tests/laws/test_laws_faults.py",
    "tests/laws/test_laws_lengths.py",
    "tests/laws/test_laws_schedules.py",
    "tests/record/",
    "tests/window/",
)
"""Tests that count every operation of a run, or every byte, or compare with a version that measured nothing: in them a
run does not measure its exactness. ``tests/laws/test_laws_verification.py`` has the same faults within a measurement."""


def _measure_nothing(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(item.config.rootpath).as_posix()
        if path.startswith(UNMEASURED) and "measured" not in item.keywords:
            item.fixturenames.insert(0, "unmeasured")  # type: ignore[attr-defined]  # a mark comes too late


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no run measure its exactness, as with ``verify=False``."""
    from autoaccum.verification.examiner import Examiner

    original = Examiner.__init__

    def made(self: Examiner, *args: Any, **options: Any) -> None:
        original(self, *args, **{**options, "verify": False})

    monkeypatch.setattr(Examiner, "__init__", made)
