"""What cannot be run in windows is refused before a sample is seen, and says what to do."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy

from autoaccum import Accumulator, errors
from autoaccum.integrations.lightning import AutoAccum
from autoaccum.integrations.lightning_checks import OPTIONS, refuse_trainer
from tests.integrations.lightning_runs import QUIET, Classifier, module_of, run, trainer_of

pytestmark = [pytest.mark.integrations, *QUIET]


class Manual(Classifier):
    """Steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OfAnIterator(Classifier):
    """Takes what it wants from the loader."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


class OwnBackward(Classifier):
    """Has a backward of its own."""

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Two(Classifier):
    """Has two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


class Elsewhere(SingleDeviceStrategy):
    """A strategy that nobody knows."""


class TestRefused:
    @pytest.mark.parametrize(
        ("kind", "argument", "cure"),
        [
            (Manual, "automatic_optimization", "autoaccum.Accumulator"),
            (OfAnIterator, "training_step", "takes a batch"),
            (OwnBackward, "backward", "on_after_backward"),
        ],
    )
    def test_modules(self, kind: type, argument: str, cure: str) -> None:
        with pytest.raises(errors.ArgumentError, match=cure) as caught:
            run(module_of(kind), 4, AutoAccum(16))
        assert caught.value.argument == argument

    @pytest.mark.parametrize(
        ("options", "argument", "cure"),
        [
            (
                {"accumulate_grad_batches": 4},
                "accumulate_grad_batches",
                r"pass AutoAccum\(effective_batch=\.\.\.\), 4 times",
            ),
            ({"strategy": Elsewhere("cpu")}, "strategy", "autoaccum.fit"),
        ],
    )
    def test_trainers(self, options: Any, argument: str, cure: str) -> None:
        with pytest.raises(errors.ArgumentError, match=cure) as caught:
            run(module_of(Classifier), 4, AutoAccum(16), **options)
        assert caught.value.argument == argument

    @pytest.mark.parametrize("other", [GradientAccumulationScheduler({0: 1, 4: 2}), BatchSizeFinder()])
    def test_callbacks_that_change_the_batch(self, other: Any) -> None:
        with pytest.raises(errors.ConflictingArgumentsError, match="Leave it out") as caught:
            refuse_trainer(trainer_of([AutoAccum(16), other]))
        assert caught.value.value == type(other).__name__

    def test_several_optimizers(self) -> None:
        # Lightning itself refuses them where it optimizes, later than it makes them.
        with pytest.raises((errors.ArgumentError, RuntimeError), match="optimizer"):
            run(module_of(Two), 4, AutoAccum(16))


class TestOptions:
    def test_are_those_of_the_accumulator_that_nobody_else_has(self) -> None:
        arguments = set(inspect.signature(Accumulator).parameters)
        assert set(OPTIONS) < arguments
        assert {"micro_batch", "memory_limit", "num_items", "strict", "callbacks"} <= set(OPTIONS)
        assert not {"loss_fn", "training_step", "precision", "clip_norm", "collate_fn"} & set(OPTIONS)
