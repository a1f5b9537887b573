"""The mark of the window that is being run: what the next process concludes from it."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from autoaccum.runs.window_mark import WindowMark
from tests.runs.machine import Machine, begun
from tests.runs.test_files import IRREGULAR

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a procfs")


class TestWindowMark:
    def test_a_window_that_the_kernel_ended(self, tmp_path: Path, machine: Machine) -> None:
        mark = begun(tmp_path)
        assert mark.died_of_memory is None
        mark.enter(64, 10)
        machine.kills(4)
        mark = WindowMark(tmp_path)
        assert mark.died_of_memory == (64, 10)
        mark.close()
        assert begun(tmp_path).died_of_memory == (64, 10), "nothing was begun in between"
        assert begun(tmp_path).died_of_memory is None, "that was the process before the last"

    def test_another_end(self, tmp_path: Path, machine: Machine) -> None:
        begun(tmp_path).enter(64, 10)
        assert WindowMark(tmp_path).died_of_memory is None, "the kernel killed nobody"
        mark = begun(tmp_path)
        mark.enter(64, 10)
        mark.leave()
        machine.kills(5)
        assert WindowMark(tmp_path).died_of_memory is None, "not inside a window"
        mark = begun(tmp_path)
        mark.enter(64, 10)
        mark.close()
        machine.kills(6)
        assert WindowMark(tmp_path).died_of_memory is None, "an error, which was told"
        begun(tmp_path).enter(64, 10)
        machine.boot("second")
        machine.kills(9)
        assert WindowMark(tmp_path).died_of_memory is None, "another boot, whose count says nothing"

    @pytest.mark.parametrize("kind", IRREGULAR)
    def test_what_is_no_file_holds_nothing_up(self, kind: str, tmp_path: Path, machine: Machine) -> None:
        begun(tmp_path).enter(64, 10)
        machine.kills(9)
        (tmp_path / "kills.json").unlink()
        IRREGULAR[kind](tmp_path / "kills.json")
        assert WindowMark(tmp_path).died_of_memory is None, "nothing is known of before"
        (tmp_path / "window").unlink()
        IRREGULAR[kind](tmp_path / "window")
        with pytest.raises(OSError):  # noqa: PT011 (of several kinds)
            WindowMark(tmp_path)

    @pytest.mark.parametrize(
        "mark", [(1, 0, 10), (1, 64, 0), (1, -1, 10), (1, 2**62, 10), (1, 64, 2**63 - 1), (7, 64, 10)]
    )
    def test_marks_that_are_none(self, mark: tuple[int, int, int], tmp_path: Path, machine: Machine) -> None:
        begun(tmp_path)
        machine.kills(9)
        (tmp_path / "window").write_bytes(struct.pack("<3q", *mark))
        assert WindowMark(tmp_path).died_of_memory is None
        (tmp_path / "window").write_bytes(struct.pack("<3q", 1, 64, 10))
        assert WindowMark(tmp_path).died_of_memory == (64, 10)

    @pytest.mark.parametrize(
        "content",
        ["", "{", "[]", "3", "null", '{"a": NaN}', '{"a": 1e99}', '{"a": 1%s}' % ("0" * 5000), "[" * 100_000, "\udcff"],
    )  # fmt: skip
    def test_files_that_are_torn(self, content: str, tmp_path: Path, machine: Machine) -> None:
        begun(tmp_path).enter(64, 10)
        (tmp_path / "kills.json").write_text(content, errors="surrogateescape")
        machine.kills(9)
        assert WindowMark(tmp_path).died_of_memory is None
        (tmp_path / "window").write_bytes(b"\x01")
        assert WindowMark(tmp_path).died_of_memory is None

    def test_it_is_in_the_file_at_once(self, tmp_path: Path, machine: Machine) -> None:
        mark = begun(tmp_path)
        mark.enter(64, 10)
        assert struct.unpack("<3q", (tmp_path / "window").read_bytes()) == (1, 64, 10)
        mark.leave()
        assert (tmp_path / "window").read_bytes() == bytes(24)
