"""Law 2 beyond the windows: a fault, or an end from outside, at any operation of a run."""

from __future__ import annotations

import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR
from torch.utils._python_dispatch import TorchDispatchMode

import autoaccum
from autoaccum import Accumulator
from autoaccum.data import randomness
from autoaccum.errors import AutoaccumError
from autoaccum.testing import oom_at
from autoaccum.training.result import FitResult
from tests.faults import Operations, strides
from tests.models import classes, noisy, same, state_of

CPU = torch.device("cpu")


class Counting(nn.Module):
    """Counts its calls in a buffer, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = noisy()
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls[int(self.training)] += 1
        return self.net(inputs)  # type: ignore[no-any-return]


VARIANTS: dict[str, dict[str, Any]] = {
    "in float16": {"precision": "fp16", "steps": 3},
    "with the noise measured, in a directory": {"noise_scale": True, "checkpoint_every": 2},
}


def trainer(model: nn.Module, data: Any, held_out: Any, micro_batch: Any, **options: Any) -> autoaccum.Trainer:
    return autoaccum.Trainer(
        model,
        data,
        effective_batch=6,
        micro_batch=micro_batch,
        loss_fn=cross_entropy,
        clip_norm=0.5,
        lr_scheduler=lambda optimizer, steps: LinearLR(optimizer, 1.0, 0.1, steps),
        validation_data=held_out,
        metrics={"accuracy": lambda outputs, targets: outputs.argmax(1) == targets},
        device="cpu",
        progress=False,
        cache=False,
        **options,
    )


@pytest.mark.parametrize("name", VARIANTS)
@strides(97)
def test_a_run_ends_as_if_nothing_had_been_or_in_a_typed_error(name: str, stride: int, tmp_path: Path) -> None:
    """From the construction of the trainer to the last checkpoint: no raw error, no lost sample, no half of a step."""
    options = dict(VARIANTS[name])

    def make(micro_batch: Any = 3) -> Callable[[], FitResult]:
        given = Counting(), classes(11), classes(7, seed=5), micro_batch
        if "checkpoint_every" in options:
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            options["run_dir"] = tmp_path / "run"

        return lambda: trainer(*given, **options).fit()

    clean: dict[Any, list[torch.Tensor]] = {}
    ends: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train = make()
        with Operations() as operations:
            train()
        for operation in range(min(stride, 7), len(operations.names), stride):
            train = make()
            refused: AutoaccumError | None = None
            with oom_at(operation):
                try:
                    result = train()
                except AutoaccumError as error:
                    refused = error
            if refused is not None:
                ends[type(refused).__name__] += 1
                # The step of the optimizer words its own.
                if type(refused).__name__ != "OptimizerOutOfMemoryError":
                    assert isinstance(refused.__cause__, torch.OutOfMemoryError), operation
                continue
            plans = tuple(report.micro_batches for report in result.history)
            assert [sum(plan) for plan in plans] == [6, 5, 6][: len(plans)]
            state = state_of(result)
            if plans not in clean:
                clean[plans] = state_of(make(plans)())
            assert same(state, clean[plans]), f"operation {operation} left a mark"
            ends["the same"] += 1
    print(f"{len(operations.names)} operations: {dict(ends)}")
    assert ends["the same"] > 0.8 * ends.total()
    assert set(ends) <= {"the same", "LimitBelowModelError", "MemoryLimitError", "OptimizerOutOfMemoryError"}


class EndsAt(TorchDispatchMode):
    """Raises an error in place of one operation, once."""

    def __init__(self, operation: int, error: BaseException) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = operation
        self._error = error

    def __enter__(self) -> EndsAt:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left == 0:
            raise self._error
        return func(*args, **(kwargs or {}))


class Found:
    """What an accumulator's window may change."""

    def __init__(self) -> None:
        self.model = Counting()
        self.accumulator = Accumulator(
            self.model,
            torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True),
            loss_fn=cross_entropy,
            micro_batch=3,
            precision="fp16",
        )
        torch.manual_seed(3)
        self.accumulator.step(classes(6))

    def state(self) -> list[torch.Tensor]:
        values = [*self.model.parameters(), *self.model.buffers(), randomness.get_state()[0]]
        return [value.detach().clone() for value in values]


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
@strides(97)
@pytest.mark.filterwarnings("ignore::autoaccum.AutoaccumWarning")
def test_what_ends_a_window_in_its_midst_rolls_it_back(error: BaseException, stride: int) -> None:
    """And the next step is that of a loop in which it never happened."""
    clean = Found()
    before = clean.state()
    batch = classes(6, seed=4)
    with Operations() as operations:
        clean.accumulator._run(clean.accumulator._window(batch))
    clean = Found()
    clean.accumulator.step(classes(6, seed=5))
    expected = clean.state()
    for operation in operations.every(stride, offset=2):
        found = Found()
        with pytest.raises(type(error)) as caught, EndsAt(operation, error):
            found.accumulator.step(batch)
        assert caught.value is error
        assert all(p.grad is None for p in found.model.parameters()), operation
        assert same(found.state(), before), operation
        assert not found.accumulator._step.transaction.is_open
        found.accumulator.step(classes(6, seed=5))
        assert same(found.state(), expected), operation


def test_a_callback_that_raises_in_the_midst_rolls_the_window_back() -> None:
    """Of a notice, once the gradient is complete; and of an event of the replay."""
    for event, size in (("Notice", 3), ("Replanned", 6)):
        model = noisy()

        def callback(record: Any, event: str = event) -> None:
            if type(record).__name__ == event:
                raise ValueError("mine")

        accumulator = Accumulator(
            model, torch.optim.SGD(model.parameters(), 0.1), loss_fn=cross_entropy, micro_batch=size,
            callbacks=[callback],
        )  # fmt: skip
        before = [buffer.clone() for buffer in model.buffers()]
        with pytest.raises(ValueError, match="mine"), oom_at(20 if size == 6 else None):
            accumulator.step(classes(6))
        assert all(p.grad is None for p in model.parameters())
        assert same([*model.buffers()], before)


@pytest.mark.filterwarnings("ignore::autoaccum.AutoaccumWarning")
def test_a_window_that_is_never_stepped_on_does_not_spoil_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its float16 gradient was unscaled, which the scaler must not remember."""
    found = Found()  # which seeds
    apply = found.accumulator._step.apply

    def interrupted(gradient: Any, rerun: Any = None) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(found.accumulator._step, "apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        found.accumulator.step(classes(6, seed=4))
    monkeypatch.setattr(found.accumulator._step, "apply", apply)
    found.accumulator.step(classes(6, seed=5))
    state = found.state()
    clean = Found()
    clean.accumulator._run(clean.accumulator._window(classes(6, seed=4)))
    clean.accumulator._step.transaction._renew_scaler()
    clean.accumulator.step(classes(6, seed=5))
    assert same(state, clean.state())
