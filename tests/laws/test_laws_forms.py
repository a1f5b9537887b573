"""Laws 1 and 2 for batches of any form: cut by ``split``, ``batch_dim``, ``collate_fn``, or as they are read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import Dataset

import autoaccum
from autoaccum import Accumulator, splits
from autoaccum.events import Verified
from autoaccum.testing import oom_at, simulated_memory
from tests.devices import DEVICE, there
from tests.faults import Operations
from tests.graphs import DynamicBatch, graphs

COUNT = 7
F64 = torch.float64


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=F64)


class Net(nn.Module):
    """Layers for all of the forms below."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.lstm = nn.LSTM(3, 4)
        self.nodes = nn.Linear(3, 4)
        self.words = nn.Embedding(9, 4)
        self.dropout = nn.Dropout(0.0)
        self.out = nn.Sequential(self.dropout, nn.Linear(4, 2))


@dataclass
class Form:
    """A form of batch, with the step that takes it; steps write to their batch, which is theirs to edit."""

    batch: Any
    step: Callable[[Any, Any], torch.Tensor]
    given: dict[str, Any] = field(default_factory=dict)
    whole: Callable[[Any], Any] = lambda batch: batch
    """(batch) -> what the step is called with to see all of it"""


def boxes(model: Any, batch: Any) -> torch.Tensor:
    images, targets = batch
    features = [model.conv(image.mul_(0.5)[None]).mean((0, 2, 3)) for image in images]
    wanted = torch.stack([target["center"] for target in targets])
    return mse_loss(model.out(torch.stack(features)), wanted)


def dicts(model: Any, batch: Any) -> torch.Tensor:
    return boxes(model, ([one["image"] for one in batch], batch))


def last_step(model: Any, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return mse_loss(model.out(model.lstm(inputs.mul_(0.5))[0][-1]), labels)


def every_step(model: Any, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return mse_loss(model.out(model.lstm(inputs.mul_(0.5))[0]), labels)


def packed(model: Any, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    inputs.data.mul_(0.5)
    _, (hidden, _) = model.lstm(inputs)
    return mse_loss(model.out(hidden[0]), labels)


def packed_tokens(model: Any, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return mse_loss(model.out(model.lstm(inputs)[0].data), labels.data)


def of_graphs(model: Any, batch: Any) -> torch.Tensor:
    batch.x.mul_(0.5)
    sums = torch.zeros(batch.num_graphs, 4, dtype=F64, device=DEVICE).index_add(
        0, batch.batch, model.nodes(batch.x).tanh()
    )
    return mse_loss(model.out(sums), batch.y)


def of_graph_list(model: Any, batch: Any) -> torch.Tensor:
    return of_graphs(model, DynamicBatch.from_data_list(batch))


def vision(model: Any, batch: Any) -> torch.Tensor:
    patches = model.nodes(batch["pixel_values"].mul_(0.5)).tanh()
    images = patches.split(batch["image_grid_thw"].prod(-1).tolist())
    seen, first = [], 0
    for count in batch["num_images"].tolist():
        own = [image.sum(0) for image in images[first : first + count]]
        seen.append(torch.stack(own).sum(0) if own else torch.zeros(4, dtype=F64, device=DEVICE))
        first += count
    return mse_loss(model.out(model.words(batch["input_ids"]).mean(1) + torch.stack(seen)), batch["labels"])


def padded_mean(model: Any, batch: Any) -> torch.Tensor:
    there = (batch != 0).any(-1)
    outputs = model.out(model.nodes(batch.mul_(0.5)).tanh()).square().mean(-1)
    return (outputs * there).sum() / there.sum()


def halves(batch: Any, start: int, size: int) -> Any:
    """What a user writes."""
    return batch.rows[start : start + size]


@dataclass
class Record:
    """A batch that is no tree of tensors."""

    rows: torch.Tensor

    def __len__(self) -> int:
        return len(self.rows)


def of_rows(model: Any, rows: torch.Tensor) -> torch.Tensor:
    return model.out(model.nodes(rows.mul_(0.5)).tanh()).square().mean()


IMAGES = [drawn(3, 5 + index, 6) for index in range(COUNT)]
TARGETS = [{"center": drawn(2) + index, "boxes": drawn(index % 3, 4)} for index in range(COUNT)]
SEQUENCES = [drawn(1 + 2 * index % 5, 3) for index in range(COUNT)]
GRIDS = torch.tensor([[1, 2, 2], [1, 1, 3], [1, 2, 1], [1, 1, 1], [1, 3, 1]])
VISION = {
    "input_ids": torch.arange(COUNT * 4).reshape(COUNT, 4) % 9,
    "labels": drawn(COUNT, 2),
    "num_images": torch.tensor([2, 0, 1, 1, 0, 1, 0]),
    "image_grid_thw": GRIDS,
    "pixel_values": drawn(int(GRIDS.prod(1).sum()), 3),
}
PACKED = pack_sequence(SEQUENCES, enforce_sorted=False)
PACKED_LABELS = pack_sequence([drawn(len(one), 2) for one in SEQUENCES], enforce_sorted=False)
LABELS = drawn(COUNT, 2)

FORMS: dict[str, Form] = {
    "a list of images beside a list of targets": Form((IMAGES, TARGETS), boxes),
    "tuples of them, as zip makes them": Form((tuple(IMAGES), tuple(TARGETS)), boxes, {"split": splits.samples}),
    "a list of dicts": Form([target | {"image": i} for i, target in zip(IMAGES, TARGETS, strict=True)], dicts),
    "a list of dicts, said": Form(
        [target | {"image": i} for i, target in zip(IMAGES, TARGETS, strict=True)], dicts, {"split": splits.samples}
    ),
    "time-first inputs beside labels": Form((drawn(5, COUNT, 3), LABELS), last_step, {"batch_dim": 1}),
    "time-first, both": Form((drawn(5, COUNT, 3), drawn(5, COUNT, 2)), every_step, {"batch_dim": 1}),
    "time-first, dims of each": Form((drawn(COUNT, COUNT, 3), LABELS), last_step, {"batch_dim": (1, 0)}),
    "packed sequences": Form((PACKED, LABELS), packed, {"split": splits.packed}),
    "packed sequences, and packed labels": Form((PACKED, PACKED_LABELS), packed_tokens),
    "a batch of graphs": Form(DynamicBatch.from_data_list(graphs(COUNT)), of_graphs, {"split": splits.graphs}),
    "a list of graphs": Form(graphs(COUNT), of_graph_list),
    "images of all texts in one tensor": Form(
        VISION, vision, {"split": splits.flattened(image_grid_thw="num_images", pixel_values="image_grid_thw")}
    ),
    "a function of the user's": Form(Record(drawn(COUNT, 3)), of_rows, {"split": halves}, lambda batch: batch.rows),
    "samples, collated": Form(
        SEQUENCES,
        padded_mean,
        {"collate_fn": lambda samples: pad_sequence(samples, batch_first=True)},
        lambda batch: pad_sequence(batch, batch_first=True),
    ),
}
every_form = pytest.mark.parametrize("form", list(FORMS))


def net() -> Net:
    torch.manual_seed(3)
    return there(Net().double())  # type: ignore[no-any-return]


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def of_whole(form: Form) -> torch.Tensor:
    """The gradient of the whole batch, by hand."""
    model = net()
    form.step(model, there(form.whole(deepcopy(form.batch)))).backward()
    return gradient(model)


def is_exact(found: torch.Tensor, form: Form) -> bool:
    wanted = of_whole(form)
    return bool((found - wanted).norm() / wanted.norm() < 1e-12)


@pytest.mark.device
@every_form
def test_the_gradient_of_an_accumulator_is_that_of_the_whole_batch(form: str) -> None:
    it, model = FORMS[form], net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, training_step=it.step, micro_batch=3, strict=True, **it.given)
    before = of_whole(it)
    accumulator.backward(it.batch)
    assert accumulator.micro_batches == (3, 2, 2)
    assert is_exact(gradient(model), it)
    assert torch.equal(of_whole(it), before), "the caller's batch is as it was"
    # It was measured, and not only left undoubted: on cuts of its own.
    (verified,) = [event for event in accumulator.events if isinstance(event, Verified)]
    assert verified.error < 1e-12
    assert len(verified.cuts) == 3


@pytest.mark.device(every=5)
@every_form
def test_oom_leaves_no_mark(form: str) -> None:
    """Steps that write to what they are given, and draw, are run again on the batch as it was, with the same draws."""
    it = FORMS[form]

    def run(size: int, faults: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
        model = net()
        model.dropout.p = 0.5
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulator = Accumulator(
            model, optimizer, training_step=it.step, micro_batch=size, verify=False, patience=0, **it.given
        )
        torch.manual_seed(4)
        with faults:
            accumulator.backward(it.batch)
        return gradient(model), accumulator.micro_batches

    operations = Operations()
    run(4, operations)
    count = len(operations.names)
    replayed = 0
    for fault in range(count // 4, count, count // 9):
        found, sizes = run(4, oom_at(fault))
        wanted, again = run(max(sizes), nullcontext())
        assert sizes == again
        replayed += sizes != (4, 3)
        assert torch.equal(found, wanted), f"operation {fault}"
    assert replayed > 3


def test_a_limit_is_kept_with_samples_of_different_sizes() -> None:
    images = [torch.randn(3, 16 + index % 5, 16) for index in range(96)]
    targets = [{"center": torch.randn(2)} for _ in images]
    model = net().float()
    with simulated_memory("1MiB") as device:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulator = Accumulator(model, optimizer, training_step=boxes, verify=False)
        for _ in range(6):
            accumulator.step((images, targets))
    assert device.peak <= device.limit
    assert 2 < max(accumulator.micro_batches) < 96


STREAMS = [name for name, form in FORMS.items() if "collate_fn" not in form.given]


class TestBatchesOfAStream:
    @pytest.mark.device(every=2)
    @pytest.mark.parametrize("form", STREAMS)
    def test_windows_across_batches_have_the_gradient_of_their_samples(self, form: str) -> None:
        """Two batches of 7 are one window of 14: the mean of both gradients."""
        it, model = FORMS[form], net()
        result = autoaccum.fit(
            model,
            [deepcopy(it.batch), deepcopy(it.batch)],
            effective_batch=2 * COUNT,
            training_step=it.step,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            micro_batch=4,
            strict=True,
            progress=False,
            cache=False,
            device=DEVICE,
            **it.given,
        )
        (report,) = result.history
        assert sum(report.micro_batches) == 2 * COUNT
        moved = [p - q for p, q in zip(net().parameters(), model.parameters(), strict=True)]
        wanted = net()
        it.step(wanted, there(it.whole(deepcopy(it.batch)))).backward()
        # Of tokens a batch has as many in both, so that the mean over both is that over one.
        for found, p in zip(moved, wanted.parameters(), strict=True):
            assert torch.allclose(found, torch.zeros_like(p) if p.grad is None else p.grad, rtol=1e-9, atol=1e-13)

    @pytest.mark.device(every=3)
    @pytest.mark.parametrize("form", STREAMS)
    def test_a_probe_repeats_it_and_a_check_passes(self, form: str) -> None:
        it = FORMS[form]
        given: dict[str, Any] = {"training_step": it.step, "device": DEVICE, **it.given}
        report = autoaccum.probe(net(), [it.batch], effective_batch=3 * COUNT, **given)
        assert report.max_micro_batch == 3 * COUNT
        found = autoaccum.check(net(), it.batch, **given)
        assert found.passed
        assert found.error is not None
        assert found.error < 1e-12

    @pytest.mark.device
    def test_a_validation_has_the_loss_of_the_whole(self) -> None:
        for name in ("a list of images beside a list of targets", "time-first, both", "a batch of graphs"):
            it, model = FORMS[name], net()
            result = autoaccum.fit(
                model,
                [it.batch],
                effective_batch=COUNT,
                training_step=it.step,
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
                validation_data=[it.batch],
                max_micro_batch=2,
                progress=False,
                cache=False,
                device=DEVICE,
                **it.given,
            )
            (validated,) = [event for event in result.events if isinstance(event, autoaccum.events.Validated)]
            assert validated.loss == pytest.approx(it.step(net(), there(deepcopy(it.batch))).item(), rel=1e-12)


class Detection(Dataset[Any]):
    """Images of different sizes, three of them as wide as they have channels."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return IMAGES[index], TARGETS[index]


@pytest.mark.device(every=2)
@pytest.mark.parametrize(
    "collate_fn", [lambda samples: tuple(zip(*samples, strict=True)), lambda samples: list(zip(*samples, strict=True))]
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_set_with_the_collate_fn_of_detection(collate_fn: Any, num_workers: int) -> None:
    model = net()
    given: dict[str, Any] = {"training_step": boxes, "device": DEVICE, "collate_fn": collate_fn}
    result = autoaccum.fit(
        model,
        Detection(),
        effective_batch=COUNT,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        micro_batch=3,
        validation_data=Detection(),
        metrics={"size": lambda model, batch: torch.tensor([float(image.shape[1]) for image in batch[0]])},
        num_workers=num_workers,
        strict=True,
        progress=False,
        cache=False,
        **given,
    )
    assert result.history[0].micro_batches == (3, 2, 2)
    wanted = net()
    boxes(wanted, there(deepcopy((IMAGES, TARGETS)))).backward()
    for start, p, q in zip(wanted.parameters(), wanted.parameters(), model.parameters(), strict=True):
        assert torch.allclose(start - q, torch.zeros_like(p) if p.grad is None else p.grad, rtol=1e-9, atol=1e-13)
    (validated,) = [event for event in result.events if isinstance(event, autoaccum.events.Validated)]
    assert validated.metrics == {"size": 8.0}
    if not num_workers:
        assert autoaccum.probe(net(), Detection(), effective_batch=COUNT, **given).max_micro_batch == COUNT
        assert autoaccum.check(net(), Detection(), **given).passed
