"""Compares what the library does with what was recorded: every bit, every event, every word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.record import record
from tests.record.configurations import ALL

_found: dict[str, Any] = {}

# By one worker, which runs it once.
NAMES = [pytest.param(name, marks=pytest.mark.xdist_group(f"record of {name}")) for name in ALL]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where configurations have their directories."""
    return tmp_path_factory.mktemp("record")


def found(name: str, places: Path) -> Any:
    """Return what a configuration comes to, which is run once."""
    if name not in _found:
        _found[name] = record.run(ALL[name], places / name)
    return _found[name]


def check(section: str, name: str, places: Path) -> None:
    """Fail with the first differences, if there are any."""
    expected = record.read(record.DATA / f"{name}.json")[section]
    record.check(expected, found(name, places)[section], name)


@pytest.mark.parametrize("name", NAMES)
def test_record(name: str, places: Path) -> None:
    check("outcomes", name, places)


@pytest.mark.parametrize("name", NAMES)
def test_messages(name: str, places: Path) -> None:
    check("messages", name, places)


def test_each_configuration_is_recorded() -> None:
    written = {path.stem for path in record.DATA.glob("*.json")} - {"environment"}
    assert written == set(ALL)


def test_differences_are_found() -> None:
    """The smallest there are, and by name."""
    report = [1, 0, 8, 8, [4, 4], *["0x1.0000000000001p+0"] * 4, 5, 6, 0, None, None, None]
    before = {"run": {"heard": [report]}}
    after = {"run": {"heard": [[*report[:5], "0x1.0000000000002p+0", *report[6:]]]}}
    (line,) = record.differences(before, after, exactly=True)
    assert line.startswith("/run/heard/0/loss: 1.0000000000000002 (0x1.0000000000001p+0) became")
    assert not list(record.differences(before, after, exactly=False))
    for smaller in ([4, 3, 1], [4]):
        changed = {"run": {"heard": [[*report[:4], smaller, *report[5:]]]}}
        assert list(record.differences(before, changed, exactly=False))
    assert list(record.differences(["#0123"], ["#0124"], exactly=True))
    assert list(record.differences(["0x1.0p+0"], ["0x1.01p+0"], exactly=False))
