"""Tracebacks show the user's own frames, and those of this package only where it has failed itself."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.errors import DataError
from autoaccum.training import trainer
from autoaccum.training.frames import without_own_frames

DATA = (torch.randn(8, 4), torch.arange(8) % 3)
OPTIONS: dict[str, Any] = {"effective_batch": 4, "loss_fn": cross_entropy, "progress": False}


class Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


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
def test_of_an_error_in_a_users_forward_none_of_ours_is_left(call: Any) -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        call(Wrong())
    assert own_frames(caught.value) == []
    assert functions(caught.value).count("forward") == 2, "the model's, and the layer's in which it was raised"


def test_causes_are_left_as_they_are() -> None:
    def failing(model: nn.Module, batch: Any) -> torch.Tensor:
        try:
            raise KeyError("cause")
        except KeyError as error:
            raise ValueError("of the user's") from error

    with pytest.raises(ValueError, match="of the user's") as caught:
        autoaccum.fit(nn.Linear(4, 3), DATA, **{**OPTIONS, "loss_fn": None}, training_step=failing)
    assert own_frames(caught.value) == []
    assert isinstance(caught.value.__cause__, KeyError)
    assert functions(caught.value.__cause__) == ["failing"]


def test_an_error_in_a_function_of_torch_that_was_passed_is_the_users_too() -> None:
    with pytest.raises(IndexError, match="out of bounds") as caught:
        autoaccum.fit(nn.Linear(4, 3), (DATA[0], DATA[1] + 7), **OPTIONS)
    assert own_frames(caught.value) == []


class Frozen(Exception):
    """Lets nothing be set, as a frozen dataclass does."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)

    def add_note(self, note: str) -> None:
        raise RuntimeError(note)


def test_an_error_that_lets_nothing_be_set_comes_out_as_it_is() -> None:
    @without_own_frames
    def run() -> None:
        raise Frozen("mine")

    with pytest.raises(Frozen, match="mine"):
        run()

    def failing(model: nn.Module, batch: Any) -> torch.Tensor:
        raise ValueError("of the user's") from Frozen("cause")

    with pytest.raises(ValueError, match="of the user's"):
        autoaccum.fit(nn.Linear(4, 3), DATA, **{**OPTIONS, "loss_fn": None}, training_step=failing)


def test_what_our_functions_held_is_not_kept_with_the_error() -> None:
    model = Wrong()
    model_alive = weakref.ref(model)
    error: BaseException
    try:
        autoaccum.fit(model, DATA, **OPTIONS)
    except RuntimeError as raised:
        error = raised
    del model
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    assert model_alive() is None
    assert "cannot be multiplied" in str(error)


def test_an_answer_to_a_mistake_has_no_frames_of_ours() -> None:
    with pytest.raises(DataError) as caught:
        autoaccum.fit(nn.Linear(4, 3), torch.zeros(4, 4), **OPTIONS)
    assert own_frames(caught.value) == []


@pytest.mark.parametrize("where", ["in ours", "in the standard library", "in torch"])
def test_an_error_of_ours_keeps_all(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        if where == "in the standard library":
            return copy.deepcopy(sys)
        return torch.ones(2) @ torch.ones(3) if where == "in torch" else dict[str, int]()["missing"]

    # As if it were ours.
    made: Any = type(broken)
    ours = made(broken.__code__, {**vars(trainer), "copy": copy, "sys": sys}, "broken", None, broken.__closure__)
    monkeypatch.setattr(trainer.Trainer, "_train", ours)
    with pytest.raises((KeyError, TypeError, RuntimeError)) as caught:
        autoaccum.fit(nn.Linear(4, 3), DATA, **OPTIONS)
    assert {"fit", "_fit", "_run", "broken"} <= set(functions(caught.value))


def test_in_development_mode_they_stay() -> None:
    code = (
        "import torch, autoaccum\n"
        "def wrong(model, batch): raise ValueError('mine')\n"
        "data = torch.zeros(4, 2)\n"
        "autoaccum.fit(torch.nn.Linear(2, 2), data, effective_batch=2, training_step=wrong, progress=False)\n"
    )
    told = {
        mode: subprocess.run([sys.executable, *mode, "-c", code], capture_output=True, text=True, check=False).stderr
        for mode in ((), ("-X", "dev"))
    }
    assert all("ValueError: mine" in text for text in told.values())
    assert "step.py" not in told[()]
    assert "step.py" in told["-X", "dev"]


def test_of_a_second_ctrl_c_none_of_ours_is_left() -> None:
    def pressed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        autoaccum.fit(nn.Linear(4, 3), DATA, **{**OPTIONS, "loss_fn": pressed})
    assert own_frames(caught.value) == []
    assert functions(caught.value)[-1] == "pressed"
