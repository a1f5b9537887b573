"""Callbacks that are ready to be passed to ``fit(callbacks=[...])``: the public name of those in ``training``."""

from __future__ import annotations

from autoaccum.training.averaging import EMA
from autoaccum.training.plateaus import EarlyStopping, KeepBest, ReduceOnPlateau

__all__ = ["EMA", "EarlyStopping", "KeepBest", "ReduceOnPlateau"]
