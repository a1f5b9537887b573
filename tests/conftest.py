"""What all tests share: one thread, so that numbers do not depend on the machine, the GPU mark, and what saves time."""

from __future__ import annotations

import gc
import logging
import signal

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
    if not torch.accelerator.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an accelerator"))
