"""The ready callbacks have one public home."""

from __future__ import annotations

import autoaccum
from autoaccum.training.averaging import EMA
from autoaccum.training.plateaus import EarlyStopping, KeepBest, ReduceOnPlateau


def test_they_are_where_the_package_names_them() -> None:
    found = autoaccum.callbacks
    assert [getattr(found, name) for name in found.__all__] == [EMA, EarlyStopping, KeepBest, ReduceOnPlateau]
