"""Regular files are opened, and nothing else: no link, no pipe to wait for, no device."""

from __future__ import annotations

import os
import socket
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from autoaccum.runs.files import open_regular, read_small, sync_directory

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs links and pipes")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(path.parent)  # the path of a socket has a limit
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


IRREGULAR: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "socket": _socket,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link": lambda path: path.symlink_to(__file__),
    "dangling link": lambda path: path.symlink_to(path.with_name("nowhere")),
}
"""What may lie in the place of a file."""


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT])
def test_what_is_no_file_is_refused_at_once(kind: str, flags: int, tmp_path: Path) -> None:
    IRREGULAR[kind](tmp_path / "a")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):  # noqa: PT011 (of several kinds)
        open_regular(tmp_path / "a", flags)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not (tmp_path / "nowhere").exists()


def test_a_link_that_a_user_has_named_is_followed_to_a_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(__file__)
    os.close(open_regular(tmp_path / "link", os.O_RDONLY, links=True))
    (tmp_path / "other").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "other", os.O_RDONLY, links=True)


def test_files_are_read_up_to_a_size(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_small(tmp_path / "a", most=5) == b"12345"
    with pytest.raises(OSError, match="too large"):
        read_small(tmp_path / "a", most=4)


def test_a_file_is_read_to_its_end(tmp_path: Path) -> None:
    content = os.urandom(3 * 2**16 + 1)
    (tmp_path / "a").write_bytes(content)
    assert read_small(tmp_path / "a") == content


def test_no_more_memory_is_asked_for_than_the_file_has(tmp_path: Path) -> None:
    """Where hardly any is left, as below a limit that a run has filled, 16 MiB for a few lines are not to be had."""
    (tmp_path / "a").write_bytes(b"12345")
    tracemalloc.start()
    try:
        assert read_small(tmp_path / "a") == b"12345"
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_names_of_a_directory_that_is_gone_are_not_on_the_disk(tmp_path: Path) -> None:
    sync_directory(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_directory(tmp_path / "gone")
