"""Bytes in and out of text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum._units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (4096, 4096),
        (0, 0),
        ("4096", 4096),
        ("12b", 12),
        ("1k", 1024),
        ("1kb", 1000),
        ("1KiB", 1024),
        ("2M", 2 * 1024**2),
        ("2MB", 2 * 1000**2),
        ("2mib", 2 * 1024**2),
        ("8GiB", 8 * 1024**3),
        ("8 GB", 8 * 1000**3),
        ("8g", 8 * 1024**3),
        ("3TiB", 3 * 1024**4),
        ("3TB", 3 * 1000**4),
        ("1PiB", 1024**5),
        ("1.5 MB", 1_500_000),
        (".5KiB", 512),
        ("  7  ", 7),
    ],
)
def test_parse(text: int | str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "8 XB", "-1", "1e9", "8GiB GiB", "1.", ".", "8,5GB", "nan", "8 i B"])
def test_parse_refuses_and_names_what_it_got(text: str) -> None:
    with pytest.raises(ValueError, match="not a number of bytes such as 8GiB") as caught:
        parse_bytes(text)
    assert str(caught.value).startswith(repr(text))


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1024**2 - 1024, "1023.00 KiB"),
        (1024**2, "1.00 MiB"),
        (5.25 * 1024**3, "5.25 GiB"),
        (2048 * 1024**4, "2048.00 TiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_format(num_bytes: float, expected: str) -> None:
    assert format_bytes(num_bytes) == expected


@given(st.integers(0, 2**60))
def test_what_is_printed_can_be_read_again(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.005)
