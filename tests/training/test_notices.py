"""The words of a run for what its user should know."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autoaccum.training.notices import NOISE_OF_SORTED, already_finished, no_noise, other_steps


def with_scheduler(scheduler: object) -> Any:
    return SimpleNamespace(lr_scheduler=scheduler)


def test_each_says_its_numbers_and_what_to_do() -> None:
    assert str(other_steps(7, 9)).startswith("The run took 7 steps instead of the 9 that were foreseen. ")
    finished = str(already_finished(Path("runs/a"), 12, with_scheduler(None), True))
    assert finished.endswith(" Allow a larger budget to go on, or choose another run_dir to begin anew.")
    bounded = str(already_finished(Path("runs/a"), 12, with_scheduler(object()), True))
    assert bounded.endswith(
        " Its lr_scheduler was made for so many steps and has ended: choose another run_dir to begin anew."
    )
    assert finished.startswith("The run in runs/a is finished: it has taken its 12 steps. Nothing is trained. ")
    assert "choose another run_dir" in finished
    stopped = already_finished(Path("runs/a"), 12, with_scheduler(object()), False)
    assert stopped.cause == "The run in runs/a was stopped by a callback, after 12 steps"
    assert stopped.cure.startswith("Let the callback allow more, as EarlyStopping with a larger patience does")
    assert "half of an effective batch of 4 samples or more" in no_noise(3, smallest=2).cure
    assert no_noise(3, smallest=1).cause.startswith("Window 3 was one micro-batch")
    assert NOISE_OF_SORTED.cure == "Pad all samples to one length where the noise scale matters"


def test_two_windows_without_noise_are_one_thing_to_say() -> None:
    """They are told apart by their consequence, which names no number."""
    assert no_noise(3, smallest=1).consequence == no_noise(9, smallest=2).consequence
