"""Effective batches that change while training: the public name of ``autoaccum.planning.schedules``."""

from __future__ import annotations

from autoaccum.planning.schedules import (
    GROW,
    REPORTS,
    SHRINK,
    SMOOTHING,
    SUFFIXES,
    By,
    Constant,
    Function,
    Geometric,
    Linear,
    Milestones,
    NoiseScale,
    Progress,
    Schedule,
    parse,
    schedule_of,
)

__all__ = [
    "GROW",
    "REPORTS",
    "SHRINK",
    "SMOOTHING",
    "SUFFIXES",
    "By",
    "Constant",
    "Function",
    "Geometric",
    "Linear",
    "Milestones",
    "NoiseScale",
    "Progress",
    "Schedule",
    "parse",
    "schedule_of",
]
