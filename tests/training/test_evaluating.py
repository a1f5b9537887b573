"""A model on data that it is not trained on: the same whatever the micro-batches, and as if nothing had happened."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from autoaccum.errors import ArgumentError, ArgumentTypeError, DataError, EmptyDatasetError, NothingFitsError
from autoaccum.events import StepReport
from autoaccum.testing import oom_at, simulated_memory
from tests.models import classes, mlp, noisy, wide


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(-1) == targets).float()


class Words(nn.Module):
    """A model of padded texts, as those of transformers: it takes a mapping, and returns one with a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(30, 4, padding_idx=0), nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.head(self.embedding(ids).sum(1))
        return {"loss": None if labels is None else cross_entropy(logits, labels), "logits": logits}


class Texts:
    """Samples of different lengths."""

    def __init__(self, count: int = 23) -> None:
        generator = random.Random(0)
        self.samples = [[generator.randrange(1, 30) for _ in range(generator.randrange(1, 12))] for _ in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> list[int]:
        return self.samples[index]


def padded(samples: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, samples))
    ids = torch.tensor([sample + [0] * (longest - len(sample)) for sample in samples])
    return {"ids": ids, "labels": torch.tensor([len(sample) % 3 for sample in samples])}


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

    def test_within_a_callback_it_leaves_the_run_as_it_is(self) -> None:
        def fit(*callbacks: Any) -> list[Any]:
            model = noisy()
            autoaccum.fit(
                model, classes(24), effective_batch=8, micro_batch=4, loss_fn=cross_entropy, progress=False,
                device="cpu", verify=False, batch_norm="frozen", callbacks=callbacks,
            )  # fmt: skip
            return of(model)

        losses: list[float] = []

        def measure(record: Any, trainer: Any) -> None:
            if isinstance(record, StepReport):
                losses.append(autoaccum.evaluate(trainer.model, classes(9), loss_fn=cross_entropy).loss)
                autoaccum.predict(trainer.model, classes(9))

        assert same(fit(), fit(measure))
        assert len(losses) == 3

    def test_it_shows_a_few_facts(self) -> None:
        found = autoaccum.evaluate(mlp(), classes(6), loss_fn=cross_entropy, metrics={"accuracy": accuracy})
        assert repr(found).startswith(
            f"Evaluation(loss={found.loss:.6g}, accuracy={found.metrics['accuracy']:.6g}, num"
        )
        assert "<th>num_samples</th><td>6</td>" in found._repr_html_()


class TestPredict:
    @pytest.mark.parametrize("most", [None, 5, 1])
    def test_it_is_what_the_model_returns_for_all(self, most: int | None) -> None:
        model, (inputs, targets) = noisy(), classes(37)
        expected = model.eval()(inputs)
        model.train()
        data: list[Any] = [
            (inputs, targets),
            inputs,
            TensorDataset(inputs, targets),
            [(inputs[:30], targets[:30]), (inputs[30:], targets[30:])],
        ]
        data += [
            DataLoader(TensorDataset(inputs), batch_size=4, collate_fn=lambda rows: torch.stack([r[0] for r in rows]))
        ]
        for one in data:
            found = autoaccum.predict(model, one, max_micro_batch=most)
            torch.testing.assert_close(found, expected)
            assert not found.requires_grad

    def test_samples_of_different_lengths_come_back_in_their_order(self) -> None:
        model, texts = Words(), Texts()
        expected = torch.cat([model(padded([sample])["ids"])["logits"] for sample in texts.samples])
        found = autoaccum.predict(model, texts, collate_fn=padded, max_micro_batch=4)
        assert list(found) == ["logits"], "a loss is none of a sample"
        torch.testing.assert_close(found["logits"], expected.detach())

    def test_any_outputs_that_have_rows(self) -> None:
        model, (inputs, _) = mlp(), classes(11)

        def forward(model: Any, batch: torch.Tensor) -> Any:
            outputs = model(batch)
            return {"best": outputs.argmax(-1), "rows": [row[: 1 + int(row.argmax())] for row in outputs], "kind": "a"}

        found = autoaccum.predict(model, inputs, forward=forward, max_micro_batch=4)
        expected = model(inputs)
        assert found["best"].equal(expected.argmax(-1))
        assert [len(row) for row in found["rows"]] == (1 + expected.argmax(-1)).tolist()
        assert found["kind"] == "a"

    def test_a_model_of_two_inputs(self) -> None:
        model = nn.Bilinear(3, 2, 4)
        first, second = torch.randn(9, 3), torch.randn(9, 2)
        torch.testing.assert_close(autoaccum.predict(model, (first, second)), model(first, second).detach())


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
    def test_outputs_that_are_of_no_sample(self) -> None:
        with pytest.raises(ArgumentError, match=r"one row per sample, 1 in a micro-batch of 1.*samples first"):
            autoaccum.predict(mlp(), classes(6), forward=lambda model, batch: torch.zeros(3, 2))

    def test_outputs_of_different_shapes(self) -> None:
        with pytest.raises(DataError, match="cannot be joined.*a list with one entry per sample"):
            autoaccum.predict(mlp(), classes(6)[0], forward=lambda model, batch: torch.zeros(len(batch), len(batch)))

    def test_an_order_that_is_drawn(self) -> None:
        loader = DataLoader(TensorDataset(*classes(6)), shuffle=True)
        with pytest.raises(ArgumentError, match="a DataLoader with shuffle=True.*pass one with shuffle=False"):
            autoaccum.predict(mlp(), loader)

    def test_a_forward_that_cannot_be_called(self) -> None:
        with pytest.raises(ArgumentTypeError, match=r"^forward=.*\(model, batch\) -> outputs"):
            autoaccum.predict(mlp(), classes(6), forward=lambda batch: batch)  # type: ignore[arg-type, misc]

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
