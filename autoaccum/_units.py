"""Bytes as people write and read them, and values as errors show them.

>>> parse_bytes("8GiB"), parse_bytes("1.5 MB"), parse_bytes(4096)
(8589934592, 1500000, 4096)
>>> format_bytes(8 * 2**30), format_bytes(1536), format_bytes(12)
('8.00 GiB', '1.50 KiB', '12 B')
>>> shown([1, "a"]), len(shown("a" * 10**6)) <= LONGEST_SHOWN
("[1, 'a']", True)
"""

from __future__ import annotations

import math
import re
from reprlib import Repr
from typing import Any

LONGEST_SHOWN = 400
"""Show a value in at most so many characters."""

_FEW_NUMBERS = 16
"""Show so many numbers of a tensor or an array; of one that has more they say nothing."""

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
    # Beyond the digits of a float there is no such memory.
    if match is None or match[2].lower() not in _FACTORS or len(match[1]) > 300:
        raise ValueError(f"{shown(text)} is not a number of bytes such as 8GiB, 500MB or 4096")
    return round(float(match[1]) * _FACTORS[match[2].lower()])


def format_bytes(num_bytes: float) -> str:
    """Format bytes for people, with a binary unit and three digits or so."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


class _Texts(Repr):
    """What makes texts of values: of arrays with many numbers their shape, whatever the package that they are of."""

    def repr_instance(self, x: Any, level: int) -> str:
        shape = getattr(x, "shape", None)
        if isinstance(shape, tuple) and hasattr(x, "dtype") and math.prod(shape) > _FEW_NUMBERS:
            return f"<{type(x).__name__} of shape {tuple(shape)}>"
        return super().repr_instance(x, level)


# A container is shown by its first entries, so that the text of one with millions is never made.
_texts = _Texts()
_texts.maxlist = _texts.maxtuple = _texts.maxdict = _texts.maxset = _texts.maxfrozenset = _texts.maxdeque = 50
_texts.maxarray = 50
_texts.maxstring = _texts.maxlong = _texts.maxother = LONGEST_SHOWN
_texts.maxlevel = 8


def kind_of(value: object) -> str:
    """Return the name of a value's type, with its article.

    >>> kind_of(3), kind_of({})
    ('an int', 'a dict')
    """
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def shown(value: object) -> str:
    """Return a value's repr for an error, cut where it is long; where it has none, its type."""
    # The error says what the user passed. That this has no text of its own must not take the error's place.
    try:
        text = _texts.repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    if len(text) <= LONGEST_SHOWN:
        return text
    # The end shows too, which closes a text or a list.
    return f"{text[: LONGEST_SHOWN - 100]}...{text[-97:]}"
