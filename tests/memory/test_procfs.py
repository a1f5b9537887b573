from __future__ import annotations

from pathlib import Path

import pytest

from autoaccum.memory.procfs import number, read

STAT = b"anon 1\nkernel_file 9\nfile 2\ntotal_inactive_file 5\ninactive_file 3\nactive_file 4\n"


def test_a_file_is_read_whole_and_a_missing_one_is_empty(tmp_path: Path) -> None:
    content = b"x" * 100_000
    (tmp_path / "file").write_bytes(content)
    assert read(str(tmp_path / "file")) == content
    assert read(str(tmp_path / "none")) == b""
    assert read(str(tmp_path)) == b"", "cannot be read"


@pytest.mark.parametrize(("name", "expected"), [("file", 2), ("inactive_file", 3), ("total_inactive_file", 5)])
def test_a_number_is_found_by_its_whole_name(name: str, expected: int) -> None:
    assert number(STAT, name) == expected


def test_a_number_with_a_colon_and_a_unit() -> None:
    assert number(b"VmPeak:\t  200 kB\nVmRSS:\t     100 kB\n", "VmRSS") == 100


def test_a_number_that_is_missing_is_none() -> None:
    assert number(STAT, "inactive") is None
    assert number(b"", "anon") is None
    assert number(b"Swap: none\n", "Swap") is None
