"""What a step asks of an examiner is what the examiner has."""

from __future__ import annotations

import inspect

from autoaccum.verification.examiner import Examination, Examiner
from autoaccum.window import examination


def test_examiners_are_what_a_step_asks_for() -> None:
    for name, asked in vars(examination.Examiner).items():
        if not name.startswith("_") and inspect.isfunction(asked):
            assert list(inspect.signature(getattr(Examiner, name)).parameters) == list(
                inspect.signature(asked).parameters
            )
    found = Examination()
    assert (found.events, found.again, found.smallest) == ((), False, 1)
