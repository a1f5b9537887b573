"""Tracebacks show the user's own frames, and those of this package only where it has failed itself."""

from __future__ import annotations

import subprocess
import sys
import traceback
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.errors import ArgumentError, DataError
from autoaccum.training import trainer
from autoaccum.training.frames import without_own_frames

DATA = (torch.randn(8, 4), torch.arange(8) % 3)
OPTIONS: dict[str, Any] = {"effective_batch": 4, "loss_fn": cross_entropy, "progress": False}
WRAPPER = without_own_frames.__module__


class Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def own_frames(error: BaseException) -> list[str]:
    found = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [name for name in found if name.startswith("autoaccum")]


def functions(error: BaseException) -> list[str]:
    return [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]


def stepped(model: nn.Module) -> None:
    autoaccum.Accumulator(model, torch.optim.SGD(model.parameters()), loss_fn=cross_entropy).step(DATA)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: autoaccum.fit(model, DATA, **OPTIONS),
        lambda model: autoaccum.Trainer(model, DATA, **OPTIONS).fit(),
        stepped,
    ],
    ids=["fit", "Trainer", "Accumulator"],
)
def test_of_an_error_in_a_users_forward_only_the_entry_is_left(call: Any) -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        call(Wrong())
    assert set(own_frames(caught.value)) == {WRAPPER}
    assert functions(caught.value).count("forward") == 2, "the model's, and the layer's in which it was raised"
    assert [note for note in caught.value.__notes__ if "python -X dev" in note] == [caught.value.__notes__[-1]]


def test_what_an_error_was_raised_from_is_cut_as_well() -> None:
    def failing(model: nn.Module, batch: Any) -> torch.Tensor:
        try:
            return autoaccum.fit(model, DATA, **{**OPTIONS, "effective_batch": 0})  # type: ignore[return-value]
        except ArgumentError as error:
            raise ValueError("of the user's") from error

    with pytest.raises(ValueError, match="of the user's") as caught:
        autoaccum.fit(nn.Linear(4, 3), DATA, **{**OPTIONS, "loss_fn": None}, training_step=failing)
    assert set(own_frames(caught.value)) == {WRAPPER}
    assert isinstance(caught.value.__cause__, ArgumentError)
    assert not set(own_frames(caught.value.__cause__)) - {WRAPPER}


def test_an_answer_to_a_mistake_has_no_frames_of_ours_and_says_nothing_of_them() -> None:
    with pytest.raises(DataError) as caught:
        autoaccum.fit(nn.Linear(4, 3), torch.zeros(4, 4), **OPTIONS)
    assert set(own_frames(caught.value)) == {WRAPPER}
    assert not any("-X dev" in note for note in getattr(caught.value, "__notes__", ()))


def test_an_error_of_ours_keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        return {}["missing"]  # as if it were ours

    ours = type(broken)(broken.__code__, vars(trainer), "broken")
    monkeypatch.setattr(trainer.Trainer, "_train", ours)
    with pytest.raises(KeyError) as caught:
        autoaccum.fit(nn.Linear(4, 3), DATA, **OPTIONS)
    assert {"fit", "_fit", "_run", "broken"} <= set(functions(caught.value))


def test_in_development_mode_they_stay() -> None:
    code = (
        "import torch, autoaccum\n"
        "def wrong(model, batch): raise ValueError('mine')\n"
        "autoaccum.fit(torch.nn.Linear(2, 2), torch.zeros(4, 2), effective_batch=2, training_step=wrong, progress=False)\n"
    )
    told = {
        mode: subprocess.run([sys.executable, *mode, "-c", code], capture_output=True, text=True, check=False).stderr
        for mode in ((), ("-X", "dev"))
    }
    assert all("ValueError: mine" in text for text in told.values())
    assert "step.py" not in told[()]
    assert "step.py" in told["-X", "dev"]


def test_errors_in_a_circle_come_out() -> None:
    @without_own_frames
    def run() -> None:
        one, other = ValueError("one"), ValueError("other")
        one.__context__, other.__context__ = other, one
        raise one

    with pytest.raises(ValueError, match="one"):
        run()
