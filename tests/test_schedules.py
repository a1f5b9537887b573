"""The public name of schedules leads to those of planning."""

from __future__ import annotations

import autoaccum
from autoaccum import schedules
from autoaccum.planning import schedules as inner


def test_every_name_is_that_of_planning() -> None:
    assert autoaccum.schedules is schedules
    assert {"Constant", "Linear", "Milestones", "NoiseScale", "parse", "schedule_of"} <= set(schedules.__all__)
    for name in schedules.__all__:
        assert getattr(schedules, name) is getattr(inner, name)


def test_what_is_made_of_a_text_is_of_the_public_classes() -> None:
    assert isinstance(schedules.parse("64, 1000:256"), schedules.Milestones)
    assert isinstance(schedules.schedule_of(64), schedules.Constant)
