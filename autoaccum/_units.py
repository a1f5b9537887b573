"""Bytes as people write and read them.

>>> parse_bytes("8GiB"), parse_bytes("1.5 MB"), parse_bytes(4096)
(8589934592, 1500000, 4096)
>>> format_bytes(8 * 2**30), format_bytes(1536), format_bytes(12)
('8.00 GiB', '1.50 KiB', '12 B')
"""

from __future__ import annotations

import re

# Bytes of each unit, by its name in lower case.
_FACTORS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _FACTORS[_letter] = _FACTORS[f"{_letter}ib"] = 1024**_power  # "8G" means GiB, as in Docker and systemd
    _FACTORS[f"{_letter}b"] = 1000**_power


def parse_bytes(text: int | str) -> int:
    """Read bytes from an int or a text such as ``"8GiB"``, ``"500 MB"`` or ``"2G"`` (K, M, G alone are powers of 1024).

    Raises:
        ValueError: the text is not a number with one of those units.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _FACTORS:
        raise ValueError(f"{text!r} is not a number of bytes such as 8GiB, 500MB or 4096")
    return round(float(match[1]) * _FACTORS[match[2].lower()])


def format_bytes(num_bytes: float) -> str:
    """Format bytes for people, with a binary unit and three digits or so."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
