"""What all tests share: one thread, so that numbers do not depend on the machine, the device, and what saves time.

``pytest --device standin`` loads an accelerator made of host memory (tests/standin) and runs the tests that can touch
one: those that are marked ``gpu``, which are skipped where there is none, and those that are marked ``device``, which
run on the CPU else. Each has to have run something there, or fails. ``pytest --device cuda`` runs the same on a GPU, but
for those that look at what only the stand-in tells.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tests.machine  # noqa: F401  # isort: skip
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import standin
from tests.machine import nothing_joined, nothing_measured

TEST_DEVICE = "TEST_DEVICE"
"""Name of the environment's variable by which ``tests/devices.py`` knows the device, in processes of tests too."""

torch.set_num_threads(1)
# A shell has what it starts in the background ignore Ctrl-C, and then Python does not catch it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Nothing here is timed: a busy machine is no failure.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# torch.manual_seed formats the whole stack for each kind of device that is not there, 3 ms under pytest, and keeps it,
# to say later who has seeded the device.
for kind in (torch.cuda, torch.xpu, torch.mtia):
    if not kind.is_available():
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


collect_ignore = ["standin/site"]
"""What torch loads by itself, and only where it was built."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=["cpu", "standin", "cuda"], default="cpu", help="what runs the tests of devices"
    )
    parser.addoption("--at-least", type=int, default=0, help="fail when fewer tests ran on the device")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.pop(TEST_DEVICE, None)
    if config.getoption("--device") == "cpu":
        return
    if config.getoption("--device") == "cuda":
        os.environ[TEST_DEVICE] = "cuda:0"
        if not torch.cuda.is_available():
            pytest.exit("There is no GPU that PyTorch finds.", returncode=1)
        return
    reason = standin.missing()
    if reason is not None:
        # Who asks for so many tests at least would take none for success.
        pytest.exit(f"SKIPPED: {reason}.", returncode=1 if config.getoption("--at-least") else 0)
    # Processes of one test share the device; test runs side by side, of which each worker is one, do not.
    os.environ["STANDIN_LEDGER"] = str(os.getpid())
    os.environ[TEST_DEVICE] = "standin:0"
    standin.load()


def pytest_unconfigure() -> None:
    for path in Path("/dev/shm").glob(f"standin-*-{os.getpid()}"):
        path.unlink(missing_ok=True)


_RAN_THERE = "ran on the device"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if item.config.getoption("--device") == "cpu":
        return (yield)
    # What a GPU was asked for it does not tell.
    touches = standin.touches if item.config.getoption("--device") == "standin" else itertools.count().__next__
    before = touches()
    yield
    mark = item.get_closest_marker("device")
    # What is run by processes that a test starts is counted in those.
    if touches() == before and not (mark and mark.kwargs.get("elsewhere")):
        pytest.fail("it ran nothing on the device: it has no place among the tests that touch one")
    item.user_properties.append((_RAN_THERE, True))


def _ran_there(config: pytest.Config) -> int | None:
    """Return how many tests ran on the device; None in a worker, which sees but some of the reports."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or config.getoption("--device") == "cpu":
        return None
    reports = [report for kind in ("passed", "failed") for report in reporter.stats.get(kind, ())]
    return sum(report.when == "call" and _RAN_THERE in dict(report.user_properties) for report in reports)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    ran = _ran_there(session.config)
    if ran is not None and ran < session.config.getoption("--at-least"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    ran, wanted = _ran_there(config), config.getoption("--at-least")
    if ran is not None:
        too_few = f", and not {wanted} at least" if ran < wanted else ""
        terminalreporter.write_line(f"{ran} tests ran on the device{too_few}")


def _touching(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield those that run on the device: of a parametrized test with ``device(every=3)`` the first and each third."""
    met: Counter[str] = Counter()
    for item in items:
        mark, name = item.get_closest_marker("device"), item.nodeid.partition("[")[0]
        if item.get_closest_marker("gpu") or (mark and met[name] % mark.kwargs.get("every", 1) == 0):
            yield item
        met[name] += 1


def _leave_to_slow_runs(items: list[pytest.Item]) -> None:
    """Mark all but every so-manieth test of a table ``slow``: each row and each column of it has some that run."""
    met: Counter[str] = Counter()
    for item in items:
        mark, name = item.get_closest_marker("every"), item.nodeid.partition("[")[0]
        if mark and met[name] % mark.args[0]:
            item.add_marker(pytest.mark.slow)
        met[name] += 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _measure_nothing(items)
    if config.getoption("--device") == "cpu":
        _leave_to_slow_runs(items)
    for item in items:
        if item.get_closest_marker("weighted"):
            item.fixturenames.insert(0, "weighted")  # type: ignore[attr-defined]
    if config.getoption("--device") != "cpu" and not os.environ.get("ALL_TESTS"):
        touching = list(_touching(items))
        config.hook.pytest_deselected(items=[item for item in items if item not in touching])
        items[:] = touching
    if not torch.accelerator.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an accelerator: see pytest --device standin"))


@pytest.fixture
def made_there() -> Iterator[None]:
    """Make tensors and layers on the device where nothing else is said."""
    from tests.devices import DEVICE  # which is known once it is loaded

    with torch.device(DEVICE) if DEVICE != "cpu" else contextlib.nullcontext():
        yield


UNMEASURED = (
    "tests/laws/test_laws.py",
    "tests/laws/test_laws_everywhere.py",
    "tests/laws/test_laws_faults.py",
    "tests/laws/test_laws_lengths.py",
    "tests/laws/test_laws_memory_saving.py",
    "tests/laws/test_laws_schedules.py",
    "tests/record/",
    "tests/step/",
)
"""Tests that count every operation of a run, or every byte, or compare with a version that measured nothing: in them a
run does not measure its exactness. ``tests/laws/test_laws_verification.py`` has the same faults within a measurement."""


@pytest.fixture
def weighted() -> Iterator[None]:
    """Let runs weigh micro-batches where they would join them."""
    with nothing_joined():
        yield


def _measure_nothing(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(item.config.rootpath).as_posix()
        if path.startswith(UNMEASURED) and "measured" not in item.keywords:
            item.fixturenames.insert(0, "unmeasured")  # type: ignore[attr-defined]  # a mark comes too late


@pytest.fixture
def unmeasured() -> Iterator[None]:
    """Let no run measure its exactness."""
    with nothing_measured():
        yield
