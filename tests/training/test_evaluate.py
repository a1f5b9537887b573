"""A model on data that it is not trained on: the same whatever the micro-batches, and as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import autoaccum
from autoaccum.errors import ArgumentError, ArgumentTypeError, EmptyDatasetError, NothingFitsError
from autoaccum.events import StepReport
from autoaccum.testing import oom_at, simulated_memory
from tests.models import classes, mlp, noisy, wide


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(-1) == targets).float()


def of(model: nn.Module) -> list[Any]:
    """Return all of a model that an evaluation is to leave."""
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    modes = torch.tensor([module.training for module in model.modules()])
    return [*(tensor.detach().clone() for tensor in tensors), modes, torch.default_generator.get_state()]


def same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(a.equal(b) for a, b in zip(first, second, strict=True))


class TestEvaluate:
    def test_it_is_the_loss_and_the_metrics_of_the_whole(self) -> None:
        model, (inputs, targets) = noisy(), classes(37)
        targets[:9] = -100
        expected = cross_entropy(model.eval()(inputs), targets).item()
        model.train()
        for most in (None, 5, 1):
            found = autoaccum.evaluate(
                model, (inputs, targets), loss_fn=cross_entropy, metrics={"accuracy": accuracy}, max_micro_batch=most
            )
            assert found.loss == pytest.approx(expected, rel=1e-5)
            model.eval()
            assert found.metrics["accuracy"] == pytest.approx(accuracy(model(inputs), targets).mean().item())
            model.train()
            assert (found.num_samples, found.micro_batch <= (most or 37)) == (37, True)

    def test_as_fit_validates(self) -> None:
        model, seen = mlp(), []
        result = autoaccum.fit(
            model, classes(20), effective_batch=8, loss_fn=cross_entropy, validation_data=classes(30, seed=4),
            progress=False, device="cpu", callbacks=[seen.append],
        )  # fmt: skip
        told = [event.loss for event in result.events if type(event).__name__ == "Validated"][-1]
        assert autoaccum.evaluate(model, classes(30, seed=4), loss_fn=cross_entropy).loss == pytest.approx(
            told, rel=1e-6
        )

    @pytest.mark.filterwarnings("ignore::autoaccum.AutoaccumWarning")  # of BatchNorm over micro-batches
    def test_within_a_callback_it_leaves_the_run_as_it_is(self) -> None:
        def fit(*callbacks: Any) -> list[Any]:
            model = noisy()
            autoaccum.fit(
                model, classes(24), effective_batch=8, micro_batch=4, loss_fn=cross_entropy, progress=False,
                device="cpu", verify=False, callbacks=callbacks,
            )  # fmt: skip
            return of(model)

        losses: list[float] = []

        def measure(record: Any, trainer: Any) -> None:
            if isinstance(record, StepReport):
                losses.append(autoaccum.evaluate(trainer.model, classes(9), loss_fn=cross_entropy).loss)
                autoaccum.predict(trainer.model, classes(9))

        assert same(fit(), fit(measure))
        assert len(losses) == 3

    def test_a_sum_is_divided_by_what_all_of_the_data_count(self) -> None:
        """Where some micro-batches count none, too."""
        model, (inputs, targets) = mlp().eval(), classes(20)
        summed = cross_entropy(model(inputs), targets, reduction="sum").item()
        for most in (None, 3, 1):
            found = autoaccum.evaluate(
                model, (inputs, targets), max_micro_batch=most, reduction="sum",
                loss_fn=lambda outputs, targets: cross_entropy(outputs, targets, reduction="sum"),
                num_items=lambda batch: (batch[1] == 1).sum(),
            )  # fmt: skip
            assert found.loss == pytest.approx(summed / int((targets == 1).sum()), rel=1e-5)

    def test_generators_of_the_users_own_are_left_as_they_are(self) -> None:
        """Whatever validates, probes or checks: training draws what it would have drawn without."""
        generator = torch.Generator()

        def step(model: Any, batch: Any) -> torch.Tensor:
            inputs, targets = batch
            return cross_entropy(model(inputs + torch.randn(inputs.shape, generator=generator)), targets)

        def losses(**options: Any) -> list[float]:
            generator.manual_seed(1)
            result = autoaccum.fit(
                mlp(), classes(24), effective_batch=8, epochs=2, training_step=step, micro_batch=4, progress=False,
                device="cpu", **options,
            )  # fmt: skip
            return [window.loss for window in result.history]

        assert losses(validation_data=classes(9, seed=4)) == losses()
        state = generator.get_state()
        for call in (autoaccum.evaluate, autoaccum.check, autoaccum.probe):
            options = {"max_micro_batch": 8, "device": "cpu"} if call is autoaccum.probe else {}
            call(mlp(), classes(20), training_step=step, **options)  # type: ignore[operator]
            assert generator.get_state().equal(state), call.__name__
        found = [autoaccum.evaluate(mlp(), classes(20), training_step=step).loss for _ in range(2)]
        assert found[0] == found[1]
        assert generator.get_state().equal(state)

    def test_it_shows_a_few_facts(self) -> None:
        found = autoaccum.evaluate(mlp(), classes(6), loss_fn=cross_entropy, metrics={"accuracy": accuracy})
        assert repr(found).startswith(
            f"Evaluation(loss={found.loss:.6g}, accuracy={found.metrics['accuracy']:.6g}, num"
        )
        assert "<th>num_samples</th><td>6</td>" in found._repr_html_()


Call = Callable[[nn.Module, Any], Any]
CALLS: list[Call] = [
    lambda model, data: autoaccum.evaluate(model, data, loss_fn=cross_entropy, max_micro_batch=8).loss,
    lambda model, data: autoaccum.predict(model, data, max_micro_batch=8),
]


@pytest.mark.parametrize("call", CALLS)
class TestBoth:
    def test_they_leave_no_trace(self, call: Call) -> None:
        model, data = noisy(), classes(20)
        model[1].eval()  # type: ignore[index]
        cross_entropy(model(data[0]), data[1]).backward()
        before = of(model)
        call(model, data)
        assert same(of(model), before)

    def test_memory_that_runs_out_anywhere_is_made_good(self, call: Call) -> None:
        model, data = noisy(), classes(20)
        with oom_at(None) as count:
            expected = call(model, data)
        before, backed_off = of(model), 0
        for number in range(1, count.operations + 1, 7):
            with oom_at(number) as fault:
                try:
                    found = call(model, data)
                except NothingFitsError:  # it was a single sample that had run out of memory
                    continue
            torch.testing.assert_close(found, expected)
            backed_off += fault.operations != count.operations
            assert same(of(model), before), number
        assert backed_off > 2

    def test_they_keep_to_what_fits(self, call: Call) -> None:
        model, data = wide(), classes(64)
        with simulated_memory(400_000) as memory:
            call(model, data)
            assert memory.peak <= 400_000

    def test_what_does_not_fit_at_all_is_told(self, call: Call) -> None:
        model = wide()
        held = sum(p.numel() * p.element_size() for p in model.parameters())
        with simulated_memory(held + 2000), pytest.raises(NothingFitsError):
            call(model, classes(8))

    def test_what_is_no_model_or_no_data_is_refused(self, call: Call) -> None:
        with pytest.raises(ArgumentTypeError, match="^model="):
            call(3, classes(8))  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="lazy layers"):
            call(nn.LazyLinear(3), classes(8))
        with pytest.raises(EmptyDatasetError):
            call(mlp(), TensorDataset(torch.zeros(0, 8), torch.zeros(0)))


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "argument"),
        [
            ({"max_micro_batch": 0}, "max_micro_batch"),
            ({"precision": "half"}, "precision"),
            ({"metrics": 3}, "metrics"),
        ],
    )
    def test_arguments_that_are_none_are_named(self, options: Any, argument: str) -> None:
        with pytest.raises(ArgumentError) as caught:
            autoaccum.evaluate(mlp(), classes(6), loss_fn=cross_entropy, **options)
        assert caught.value.argument == argument
