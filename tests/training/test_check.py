"""``check``: what it measures, and law 5: no trace."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import autoaccum
from autoaccum import errors
from autoaccum.events import Notice
from tests.devices import DEVICE, there
from tests.models import classes, mlp, noisy
from tests.training.checks import DOUBLE, assert_same, check, everything, linear


class TestWhatIsMeasured:
    def test_a_mean(self) -> None:
        report = check(mlp(DOUBLE))
        assert report.passed is True
        assert report.hypothesis == "items"
        assert report.error is not None
        assert report.error < 1e-14 < report.tolerance == 1e-6
        assert report.samples == 6
        assert [cut.sizes for cut in report.cuts] == [(1, 2, 3), (3, 2, 1), (2, 2, 2)]
        assert max(cut.error for cut in report.cuts) == report.error == report.hypotheses["items"]
        assert list(report.hypotheses) == ["items"], "a run measures the first that passes, and so does this"
        assert set(report.tensors) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        assert list(report.tensors.values()) == sorted(report.tensors.values(), reverse=True)
        assert report.tensor == next(iter(report.tensors))
        assert report.notice is None
        assert report.seconds > 0

    def test_ignored_targets_are_a_mean_over_items(self) -> None:
        inputs, targets = classes(12, DOUBLE)
        targets[::3] = -100
        report = check(mlp(DOUBLE), (inputs, targets))
        assert (report.passed, report.hypothesis) == (True, "items")

    def test_a_sum_is_no_mean(self) -> None:
        report = check(mlp(DOUBLE), loss_fn=lambda outputs, targets: cross_entropy(outputs, targets, reduction="sum"))
        assert (report.passed, report.hypothesis) == (True, "sum")

    def test_a_mean_that_looks_like_a_sum_is_measured_to_be_one(self) -> None:
        """Its graph shows a sum times a number that no count explains; of the two one passes."""
        report = check(
            mlp(DOUBLE),
            loss_fn=lambda outputs, targets: cross_entropy(outputs, targets, reduction="sum") / len(targets),
        )
        assert (report.passed, report.hypothesis) == (True, "items")

    def test_losses_by_name_are_measured_as_a_run_measures_them(self) -> None:
        """A detector's: all entries over the count of a few, which is kept from 0, beside a mean over these."""
        inputs, _ = classes(12, DOUBLE)
        flags = torch.zeros(12, 3, dtype=DOUBLE)
        flags[::2] = torch.tensor([1.0, 1.0, 0.0])

        def step(model: Any, batch: Any) -> dict[str, torch.Tensor]:
            outputs, flags = model(batch[0]), batch[1]
            number = flags.sum().clamp(min=1)
            all_of_them = binary_cross_entropy_with_logits(outputs, flags, reduction="sum") / number
            return {"all": all_of_them, "some": (outputs.abs() * flags).sum() / number}

        report = check(mlp(DOUBLE), (inputs, flags), loss_fn=None, training_step=step)
        assert (report.passed, report.accumulate) == (True, "joined")
        assert report.error is not None
        assert report.error < 1e-14

    @pytest.mark.weighted
    def test_what_the_user_counts(self) -> None:
        weights = torch.rand(12, dtype=DOUBLE) + 0.5
        inputs, targets = classes(12, DOUBLE)

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            losses = cross_entropy(model(batch[0]), batch[1], reduction="none")
            return (losses * batch[2]).sum() / batch[2].sum().item() ** 1.5  # which no graph shows

        batch = inputs, targets, weights
        report = check(mlp(DOUBLE), batch, training_step=step)
        assert report.passed is False
        counted = check(mlp(DOUBLE), batch, training_step=step, num_items=lambda batch: batch[2].sum() ** 1.5)
        assert counted.passed is False, "the weight of a whole is not the sum of that of its parts"
        assert counted.notice is not None
        assert counted.notice.cause.startswith(
            "The loss is neither a mean over what num_items counts, nor over samples"
        )
        counted = check(
            mlp(DOUBLE),
            batch,
            training_step=lambda model, batch: step(model, batch) * batch[2].sum().item() ** 0.5,
            num_items=lambda batch: batch[2].sum(),
        )
        assert (counted.passed, counted.hypothesis) == (True, "num_items")

    @pytest.mark.weighted
    def test_the_errors_are_those_of_the_gradients(self) -> None:
        """By hand: of the square of a mean, whose gradient is linear in no way."""
        inputs, targets = classes(6, DOUBLE)
        model = linear(bias=False)

        def loss_of(rows: slice) -> torch.Tensor:
            return model(inputs[rows]).sum(dim=1).mean() ** 2

        def gradient(loss: torch.Tensor) -> torch.Tensor:
            return torch.autograd.grad(loss, model.weight)[0]

        whole = gradient(loss_of(slice(0, 6)))
        parts = [(slice(0, 1), 1), (slice(1, 3), 2), (slice(3, 6), 3)]
        cut = sum((gradient(loss_of(rows)) * size / 6 for rows, size in parts), torch.zeros_like(whole))
        expected = float((cut - whole).norm() / whole.norm())
        report = check(model, (inputs, targets), training_step=lambda m, b: m(b[0]).sum(dim=1).mean() ** 2)
        assert report.passed is False
        assert report.hypotheses.keys() == {"items", "sum"}
        assert report.hypothesis == "items"
        assert report.cuts[0].error == pytest.approx(expected, rel=1e-9)

    def test_float32_has_another_tolerance(self) -> None:
        report = check(mlp(), classes(12))
        assert report.passed
        assert report.tolerance == 2e-5

    def test_dropout_is_exact(self) -> None:
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3)).double()
        assert check(model).passed

    def test_two_samples_will_do(self) -> None:
        report = check(mlp(DOUBLE), classes(2, DOUBLE))
        assert report.passed
        assert {cut.sizes for cut in report.cuts} == {(1, 1)}

    @pytest.mark.weighted
    def test_a_model_in_eval_mode_is_measured_in_training_mode_as_fit_would_train_it(self) -> None:
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        assert check(model.eval()).passed is False
        assert not any(module.training for module in model.modules())
        model.train()
        model[1].eval()
        assert check(model).passed

    def test_a_compiled_model_is_measured_eagerly_and_its_tensors_have_their_own_names(self) -> None:
        model = mlp(DOUBLE)

        def backend(*graph: Any) -> Any:
            pytest.fail("it was compiled")

        report = check(torch.compile(model, backend=backend))  # type: ignore[arg-type]
        assert report.passed
        assert "0.weight" in report.tensors


class Counting(nn.Module):
    """Everything that a forward may change: attributes, containers, parameters, buffers, random states."""

    def __init__(self, large: bool) -> None:
        super().__init__()
        self.net = noisy().double()
        # Beyond 16 MiB parameters are not copied in a run, unless a forward was seen to write to them.
        self.average = nn.Parameter(torch.zeros(2**21 + 5 if large else 5, dtype=DOUBLE), requires_grad=False)
        self.calls = 0
        self.log: list[float] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(random.random() + np.random.rand())
        self.average.data += 1
        if self.calls == 1:
            self.register_buffer("late", torch.ones(2))
        return torch.as_tensor(self.net(inputs))


class TestNoTrace:
    """Law 5."""

    @pytest.mark.parametrize("large", [False, True])
    @pytest.mark.parametrize("has_gradients", [False, True])
    def test_everything_is_as_it_was(self, large: bool, has_gradients: bool) -> None:
        model = Counting(large)
        model.net[5].eval()
        if has_gradients:
            cross_entropy(model.net(classes(8, DOUBLE)[0]), classes(8)[1]).backward()
        identities = [id(t) for t in (*model.parameters(), *model.buffers())]
        gradients = [id(p.grad) for p in model.parameters()]
        versions = [p.grad._version for p in model.parameters() if p.grad is not None]
        before = everything(model)
        check(model)
        assert_same(everything(model), before)
        assert (model.calls, model.log) == (0, [])
        assert [id(t) for t in (*model.parameters(), *model.buffers())] == identities
        assert [id(p.grad) for p in model.parameters()] == gradients
        assert [p.grad._version for p in model.parameters() if p.grad is not None] == versions

    def test_after_an_error_too(self) -> None:
        model = Counting(large=False)
        before = everything(model)

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            loss = cross_entropy(model(batch[0]), batch[1])
            if len(batch[0]) == 6:
                raise errors.StopTraining
            return loss

        with pytest.raises(errors.StopTraining):
            check(model, training_step=step)
        assert_same(everything(model), before)
        assert (model.calls, model.log) == (0, [])

    @pytest.mark.parametrize(
        ("num_items", "is_used"),
        [(lambda batch: (batch[1] != -100).sum(), True), (lambda batch: len(batch[1]), False), (None, True)],
    )
    def test_a_count_that_is_wrong_has_micro_batches_joined(self, num_items: Any, is_used: bool) -> None:
        inputs, targets = classes(12, DOUBLE)
        targets[::3] = -100
        report = check(mlp(DOUBLE), (inputs, targets), num_items=num_items)
        assert report.passed
        assert report.notice is None
        assert report.accumulate == ("weighted" if is_used else "joined")
        assert is_used or "neither a mean over what num_items counts" in str(report.reason)

    def test_a_list_of_batches_is_read_as_training_reads_it(self) -> None:
        inputs, targets = classes(24, DOUBLE)
        report = check(mlp(DOUBLE), [(inputs[at : at + 8], targets[at : at + 8]) for at in (0, 8, 16)])
        assert (report.passed, report.samples) == (True, 6)

    @pytest.mark.parametrize("is_frozen", [False, True])
    def test_a_model_that_the_loss_does_not_depend_on_is_told(self, is_frozen: bool) -> None:
        model, other = mlp(DOUBLE).requires_grad_(not is_frozen), linear()

        def step(_: nn.Module, batch: Any) -> torch.Tensor:
            return cross_entropy(other(batch[0]), batch[1])

        report = check(model, training_step=step)
        assert report.passed
        assert (report.notice is None) is is_frozen
        if report.notice is not None:
            told = (
                "Nothing of the model, a Sequential, has a gradient, but Linear that a function holds which is passed"
            )
            assert report.notice.cause == told

    def test_an_error_names_the_samples(self) -> None:
        inputs, targets = classes(12, DOUBLE)
        with pytest.raises(IndexError, match="Target 9") as raised:
            check(mlp(DOUBLE), (inputs, targets + 9))
        note = (
            "autoaccum was running 6 samples that are checked, of shapes (6, 8) of float64, (6,) with values 9 to 11."
        )
        assert raised.value.__notes__ == [note]

    def test_what_a_function_holds(self) -> None:
        head = nn.Linear(3, 3, dtype=DOUBLE)
        scale = torch.ones(1, dtype=DOUBLE, requires_grad=True)
        scale.grad = kept = torch.full((1,), 3.0, dtype=DOUBLE)
        queue = torch.zeros(4)
        seen: list[int] = []
        count = 0

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            nonlocal count
            count += 1
            seen.append(count)
            queue.add_(1)
            return cross_entropy(head(model(batch[0])) * scale, batch[1])

        assert check(mlp(DOUBLE), training_step=step).passed
        assert (count, seen) == (0, [])
        assert not queue.any()
        assert head.weight.grad is None
        assert scale.grad is kept
        assert kept.item() == 3.0

    def test_training_goes_on_as_if_nothing_had_been(self) -> None:
        def train(checking: bool) -> list[torch.Tensor]:
            model = noisy()
            optimizer = torch.optim.AdamW(model.parameters())
            torch.manual_seed(7)
            for step in range(4):
                optimizer.zero_grad()
                cross_entropy(model(classes(8, seed=step)[0]), classes(8, seed=step)[1]).backward()
                if checking:  # between backward and step, where gradients count
                    check(model, classes(8, seed=step))
                optimizer.step()
            return [*model.parameters(), *model.buffers()]

        assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))

    def test_within_no_grad(self) -> None:
        with torch.no_grad():
            assert check(mlp(DOUBLE)).passed
            assert not torch.is_grad_enabled()

    def test_the_data_are_read_in_peace(self) -> None:
        class Batches:
            """What a dataset that draws as it is read does to random states."""

            def __iter__(self) -> Iterator[Any]:
                for _ in range(5):
                    torch.rand(3), random.random(), np.random.rand()
                    yield classes(4, DOUBLE)

        model = mlp(DOUBLE)
        before = everything(model)
        assert check(model, Batches()).passed
        assert_same(everything(model), before)


def test_a_collate_fn_keeps_its_own_generator() -> None:
    """It draws for each batch that is looked at, and goes on as if there had been none."""
    generator = torch.Generator().manual_seed(3)

    def collate(samples: list[Any]) -> Any:
        inputs, labels = torch.utils.data.default_collate(samples)
        return inputs * (torch.rand(inputs.shape, generator=generator) > 0.3), labels

    data = torch.utils.data.TensorDataset(*classes(12))
    before = generator.get_state()
    report = autoaccum.check(mlp(), data, loss_fn=cross_entropy, collate_fn=collate, device="cpu")
    assert report.passed
    assert torch.equal(generator.get_state(), before)


class Masked(Dataset[torch.Tensor]):
    """Sequences of 8 to 40 tokens."""

    def __init__(self) -> None:
        self.sequences = [torch.arange(8 + 5 * i % 33) * (i + 3) % 47 + 1 for i in range(64)]

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sequences[index]

    def collate(self, sequences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Pad them, and hide other tokens each time, as is done for masked language models."""
        targets = pad_sequence(sequences, batch_first=True, padding_value=-100)
        hidden = (torch.rand(targets.shape) < 0.15) & (targets != -100)
        inputs = torch.where(targets == -100, 0, targets).masked_fill(hidden, 49)
        return inputs, targets.masked_fill(~hidden, -100)


class Filler(nn.Module):
    """Fills in tokens; with ``is_pooled`` each output sees the mean of its row, padding included."""

    def __init__(self, is_pooled: bool) -> None:
        super().__init__()
        self.embedding, self.out, self.is_pooled = nn.Embedding(50, 8), nn.Linear(8, 50), is_pooled

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.embedding(ids)
        return self.out(found + found.mean(1, keepdim=True) if self.is_pooled else found).transpose(1, 2)


@pytest.mark.weighted
@pytest.mark.parametrize("is_pooled", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_a_collate_fn_that_hides_other_tokens_each_time_is_no_padding(is_pooled: bool, strict: bool) -> None:
    """Whole and parts are compared under the same masks; a model that sees the padding is found out all the same."""
    torch.manual_seed(0)
    data = Masked()
    report = autoaccum.check(Filler(is_pooled), data, loss_fn=cross_entropy, collate_fn=data.collate, device="cpu")
    assert report.passed is not is_pooled
    assert report.error is not None
    assert (report.error > 1e-3) == is_pooled
    told = (
        pytest.raises(errors.AutoaccumError, match="off the whole") if strict else pytest.warns(match="off the whole")
    )
    with told if is_pooled else nullcontext():
        autoaccum.fit(
            Filler(is_pooled), data, effective_batch=32, micro_batch=8, loss_fn=cross_entropy, collate_fn=data.collate,
            device="cpu", progress=False, cache=False, strict=strict,
        )  # fmt: skip


def test_a_collate_fn_that_cuts_to_a_length_that_it_draws_is_no_padding() -> None:
    """A part may be cut shorter than the whole, or longer, and by chance as long."""
    data = Masked()

    def crop(sequences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        most = int(torch.randint(3, 30, ()))
        return pad_sequence([ids[:most] for ids in sequences], batch_first=True), pad_sequence(
            [ids[:most] for ids in sequences], batch_first=True, padding_value=-100
        )

    for seed in range(4):
        torch.manual_seed(seed)
        autoaccum.fit(  # of which a warning is an error here
            Filler(is_pooled=False), data, effective_batch=32, micro_batch=8, loss_fn=cross_entropy, collate_fn=crop,
            device="cpu", progress=False, cache=False, seed=seed, epochs=3,
        )  # fmt: skip


def mixed_up(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix each sample with another one of the batch, as MixUp does."""
    inputs, targets = torch.utils.data.default_collate(samples)
    weight, order = torch.rand(()), torch.randperm(len(samples))
    labels = nn.functional.one_hot(targets, 3).to(inputs.dtype)
    return weight * inputs + (1 - weight) * inputs[order], weight * labels + (1 - weight) * labels[order]


def noisy_and_sorted(samples: list[Any]) -> Any:
    inputs, targets = torch.utils.data.default_collate(sorted(samples, key=lambda sample: float(sample[0].sum())))
    return inputs + torch.rand(()), targets


@pytest.mark.weighted
@pytest.mark.parametrize(("collate", "is_mixed"), [(mixed_up, True), (noisy_and_sorted, False)])
def test_a_collate_fn_that_mixes_samples_is_told_from_one_that_changes_each(collate: Any, is_mixed: bool) -> None:
    """It mixes those of a micro-batch, and none where that is one sample: another loss than the window's."""
    data = torch.utils.data.TensorDataset(*classes(64))
    torch.manual_seed(0)
    report = autoaccum.check(mlp(), data, loss_fn=cross_entropy, collate_fn=collate, device="cpu")
    assert report.passed is not is_mixed
    told = pytest.warns(
        errors.AutoaccumWarning, match="The collate_fn mixes the samples of a batch.*accumulate='joined'"
    )
    with told if is_mixed else nullcontext():
        autoaccum.fit(
            mlp(), data, effective_batch=32, micro_batch=8, loss_fn=cross_entropy, collate_fn=collate, device="cpu",
            progress=False, cache=False,
        )  # fmt: skip


@pytest.mark.parametrize("is_masked", [True, False])
def test_losses_that_divide_by_counts_that_are_kept_from_0_are_joined(is_masked: bool) -> None:
    """A mean over masked entries, and a sum over all there is that is divided by how many are masked."""
    torch.manual_seed(0)
    inputs, found = torch.randn(32, 4, dtype=torch.float64), torch.zeros(32, 3, dtype=torch.float64)
    found[::4, 0] = 1.0

    def step(model: Any, batch: Any) -> torch.Tensor:
        losses = binary_cross_entropy_with_logits(model(batch[0]), batch[1], reduction="none")
        return (losses * batch[1] if is_masked else losses).sum() / batch[1].sum().clamp(min=1)

    report = autoaccum.check(nn.Linear(4, 3).double(), (inputs, found), training_step=step)
    assert (report.passed, report.accumulate, report.notice) == (True, "joined", None)
    assert report.error is not None
    assert report.error < 1e-12


def test_a_count_that_only_some_parts_keep_from_0_is_found() -> None:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    inputs = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    found = (torch.rand(12, 3, generator=generator) < 0.2).double()

    def step(model: Any, batch: Any) -> torch.Tensor:
        losses = binary_cross_entropy_with_logits(model(batch[0]), batch[1], reduction="sum")
        return losses / batch[1].sum().clamp(min=1)

    report = autoaccum.check(nn.Linear(4, 3).double(), (inputs, found), training_step=step, accumulate="weighted")
    assert report.passed is False
    assert report.notice is not None
    assert "accumulate='joined'" in report.notice.cure
    joined = autoaccum.check(nn.Linear(4, 3).double(), (inputs, found), training_step=step)
    assert (joined.passed, joined.accumulate) == (True, "joined")


@pytest.mark.weighted
@pytest.mark.filterwarnings("ignore::autoaccum.AutoaccumWarning")
@pytest.mark.device(every=2)
@pytest.mark.parametrize(
    ("loss", "reduction"), [(cross_entropy, "sum"), (partial(cross_entropy, reduction="sum"), "mean")]
)
def test_what_the_user_says_of_a_loss_is_held_against_what_it_is(loss: Any, reduction: Any) -> None:
    """A check passed what a run was told of: it took the loss for what it is, whatever was said of it."""
    model, data = there((mlp(torch.float64), classes(24, torch.float64)))
    report = autoaccum.check(model, data, loss_fn=loss, reduction=reduction)
    told = "The loss is not the mean, or the sum, that reduction says: windows that are cut get a gradient"
    assert not report.passed
    assert report.notice is not None
    assert report.notice.cause.startswith(told)
    result = autoaccum.fit(
        model, data, effective_batch=24, micro_batch=6, loss_fn=loss, reduction=reduction, device=DEVICE, progress=False
    )
    assert [event.cause.startswith(told) for event in result.events if isinstance(event, Notice)] == [True]
    other = "sum" if reduction == "mean" else "mean"
    assert autoaccum.check(model, data, loss_fn=loss, reduction=other).passed
