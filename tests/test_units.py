"""Bytes in and out of text."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoaccum._units import LONGEST_SHOWN, format_bytes, parse_bytes, shown


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


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


class Long:
    def __repr__(self) -> str:
        return "x" * 10**6


def test_a_long_text_is_cut() -> None:
    numbers = list(range(10**6))
    for value in ("a" * 10**6, b"a" * 10**6, Long(), [Long()] * 9, numbers, dict.fromkeys(numbers), 10**9000):
        assert 0 < len(shown(value)) <= LONGEST_SHOWN


def test_what_has_no_text_is_shown_by_its_type() -> None:
    assert "Mute" in shown(Mute())
    assert "Mute" in shown([1, Mute()])


def test_of_large_arrays_the_shape_is_shown() -> None:
    inputs, labels = torch.randn(64, 8), np.arange(64)
    assert shown((inputs, labels)) == "(<Tensor of shape (64, 8)>, <ndarray of shape (64,)>)"
    assert shown([torch.tensor([1, 2])]) == "[tensor([1, 2])]"


@pytest.mark.parametrize("value", [3, 0.1, "a", None, (1, 2), [(8, 8), (8,)], {"a": [1]}, True, len])
def test_short_values_are_shown_as_they_are(value: object) -> None:
    assert shown(value) == repr(value)
