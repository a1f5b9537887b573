"""The mark of tests that limit the memory of processes, put them into control groups, or kill them."""

from __future__ import annotations

import pytest

in_turn = pytest.mark.xdist_group("processes")
"""One worker runs them all, one after the other: together they would take each other's memory and time."""
