"""Goes on with what an earlier version has left on the disk, and compares with how that version went on."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest

from tests.record import record
from tests.record.configurations import ARTEFACTS

_found: dict[str, Any] = {}

# By one worker, which goes on with it once.
NAMES = [pytest.param(name, marks=pytest.mark.xdist_group(f"artefact {name}")) for name in ARTEFACTS]


def found(name: str, folder: Path) -> Any:
    """Return what going on comes to, which is done once."""
    if name not in _found:
        record.unpack(name, folder / name)
        _found[name] = record.run(ARTEFACTS[name].resume, folder / name)
    return _found[name]


def check(section: str, name: str, folder: Path) -> None:
    """Fail with the first differences, if there are any."""
    written = record.read(record.DATA / "environment.json")
    if written["machine"] != platform.machine():
        pytest.skip("what was found out about memory is taken up by the same kind of processor only")
    if name == "cache" and not record.is_same_torch():
        pytest.skip("a cache is of one version of torch")
    record.check(record.read(record.ARTEFACTS / f"{name}.json")[section], found(name, folder)[section], name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where they are copied to."""
    return tmp_path_factory.mktemp("artefacts")


@pytest.mark.parametrize("name", NAMES)
def test_going_on(name: str, folder: Path) -> None:
    check("outcomes", name, folder)


@pytest.mark.parametrize("name", NAMES)
def test_messages(name: str, folder: Path) -> None:
    check("messages", name, folder)


@pytest.mark.parametrize("name", NAMES)
def test_they_name_no_machine(name: str, tmp_path: Path) -> None:
    """Paths in them would be those of one machine."""
    record.unpack(name, tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    for path in files:
        content = path.read_bytes()
        assert not any(b"/" + folder + b"/" in content for folder in (b"tmp", b"home", b"root", b"work", b"Users")), (
            path
        )
