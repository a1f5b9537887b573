"""Laws 1, 2, 3 and 8 of docs/laws.md for losses of several terms: joined, or weighed one by one as the user counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoaccum
from autoaccum.errors import ArgumentError, ArgumentTypeError, AutoaccumWarning, OptimizerOutOfMemoryError
from autoaccum.events import Joined, Notice, OutOfMemory, Verified
from autoaccum.testing import oom_at
from tests.devices import DEVICE, there
from tests.faults import Operations, strides
from tests.models import same, state_of

SAMPLES = 12
PLANS = ([1] * 12, [2] * 6, [3] * 4, [4] * 3, [6, 6], [7, 5], [5, 5, 2], [8, 3, 1], [11, 1], [12])
Step = Callable[[Any, Any], Any]


class Heads(nn.Module):
    """A text encoder with a head for words, one for sentences and one for numbers, and learnt weights of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.words, self.sentence, self.numbers = nn.Linear(8, 20), nn.Linear(8, 3), nn.Linear(8, 4)
        self.scales = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.embedding(words))
        mean = hidden.mean(1)
        return self.words(hidden), self.sentence(mean), self.numbers(mean)


def batch_of(seed: int, *, unlabelled: float = 0.3) -> dict[str, torch.Tensor]:
    """Return texts on the device of which some words are masked, and some texts have no masked word."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 20, (SAMPLES, 6), generator=generator)
    masked = torch.rand(SAMPLES, 6, generator=generator) < 0.3
    masked[torch.rand(SAMPLES, generator=generator) < unlabelled] = False
    masked[0, 0] = True
    batch = {
        "words": words,
        "targets": torch.where(masked, words, -100),
        "label": torch.randint(0, 3, (SAMPLES,), generator=generator),
        "numbers": torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64),
        "objects": torch.poisson(torch.full((SAMPLES,), 0.9), generator=generator).long(),
    }
    return there(batch)  # type: ignore[no-any-return]


def _words(outputs: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(outputs[0].flatten(0, 1), batch["targets"].flatten())


def _label(outputs: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(outputs[1], batch["label"])


def masked_words_and_a_label(model: Any, batch: Any) -> Any:
    outputs = model(batch["words"])
    return _words(outputs, batch) + 0.5 * _label(outputs, batch)


def by_names(model: Any, batch: Any) -> Any:
    outputs = model(batch["words"])
    return {"words": _words(outputs, batch), "label": 0.5 * _label(outputs, batch)}


def one_after_the_other(model: Any, batch: Any) -> Any:
    outputs = model(batch["words"])
    return [_words(outputs, batch), _label(outputs, batch), F.mse_loss(outputs[2], batch["numbers"])]


def three_means(model: Any, batch: Any) -> Any:
    outputs = model(batch["words"])
    found = outputs[2] - batch["numbers"]
    matched = batch["objects"] > 0
    boxes = (found.abs().sum(1) * matched).sum() / matched.sum().clamp(min=1)
    return _words(outputs, batch) + _label(outputs, batch) + 5 * boxes


def classes_with_weights(model: Any, batch: Any) -> Any:
    outputs = model(batch["words"])
    weights = torch.tensor([0.2, 1.5, 3.0], dtype=torch.float64, device=DEVICE)
    return F.cross_entropy(outputs[1], batch["label"], weight=weights) + _words(outputs, batch)


def distilled(model: Any, batch: Any) -> Any:
    """KL + CE: a teacher's logits for all words, and labels for some."""
    outputs = model(batch["words"])
    teacher = torch.sin(torch.arange(20.0, dtype=torch.float64, device=DEVICE) * (1 + batch["words"][..., None]))
    divergence = F.kl_div(outputs[0].log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1).mean()
    return 0.7 * divergence + 0.3 * _words(outputs, batch)


def objects(model: Any, batch: Any) -> Any:
    """Like DETR: classes over all queries, boxes over as many objects as there are, kept from 0 as a number."""
    outputs = model(batch["words"])
    matched = batch["objects"] > 0
    num_boxes = max(int(matched.sum()), 1)
    boxes = F.l1_loss(outputs[2][matched], batch["numbers"][matched], reduction="none").sum() / num_boxes
    return {"classes": _label(outputs, batch), "boxes": 5 * boxes}


def a_sum_beside_a_mean(model: Any, batch: Any) -> Any:
    outputs = model(batch["words"])
    return _words(outputs, batch) + F.cross_entropy(outputs[1], batch["label"], reduction="sum")


def with_penalties(model: Any, batch: Any) -> Any:
    penalty = 1e-2 * sum((p**2).sum() for p in model.parameters())
    return masked_words_and_a_label(model, batch) + penalty


def penalty_by_its_name(model: Any, batch: Any) -> Any:
    penalty = 1e-2 * sum((p**2).sum() for p in model.parameters())
    return by_names(model, batch) | {"penalty": penalty}


def learnt_weights(model: Any, batch: Any) -> Any:
    outputs = model(batch["words"])
    first, second = torch.exp(-model.scales)
    return first * _words(outputs, batch) + second * _label(outputs, batch) + model.scales.sum()


def subtracted_and_halved(model: Any, batch: Any) -> Any:
    outputs = model(batch["words"])
    entropy = -(outputs[1].softmax(1) * outputs[1].log_softmax(1)).sum(1).mean()
    return (_words(outputs, batch) - 0.1 * entropy) / 2


def sums_under_names(model: Any, batch: Any) -> Any:
    outputs = model(batch["words"])
    penalty = 1e-2 * sum((p**2).sum() for p in model.parameters())
    return {"x": (1 - _words(outputs, batch) + _label(outputs, batch)) / 2 + penalty, "y": _label(outputs, batch)}


def smoothed_labels(model: Any, batch: Any) -> Any:
    """Which PyTorch adds up by itself, so that no value of it is seen."""
    outputs = model(batch["words"])
    return {"label": F.cross_entropy(outputs[1], batch["label"], label_smoothing=0.1), "words": _words(outputs, batch)}


def with_constants(model: Any, batch: Any) -> Any:
    outputs = model(batch["words"])
    # In a list, for in a dict what has no gradient is taken for something that is only to be seen.
    return [3 - _words(outputs, batch), _label(outputs, batch), 0.0, torch.tensor(2.0)]


LOOPS: list[Step] = [
    masked_words_and_a_label, by_names, one_after_the_other, three_means, classes_with_weights, distilled, objects,
    a_sum_beside_a_mean, with_penalties, penalty_by_its_name, learnt_weights, subtracted_and_halved,
    sums_under_names, smoothed_labels, with_constants,
]  # fmt: skip


def total(losses: Any) -> torch.Tensor:
    if isinstance(losses, Mapping):
        losses = list(losses.values())
    return sum(losses[1:], losses[0]) if isinstance(losses, list) else losses


def whole(model: nn.Module, step: Step, batch: Any) -> float:
    """Leave the gradient of the whole batch, and return its loss."""
    model.zero_grad()
    loss = total(step(model, batch))
    loss.backward()
    return float(loss.detach())


def heads() -> Heads:
    torch.manual_seed(0)
    return there(Heads().double())  # type: ignore[no-any-return]


def error(model: nn.Module, other: nn.Module) -> float:
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True)]
    assert all((mine is None) == (theirs is None) for mine, theirs in pairs)
    off = [((mine - theirs).norm(), theirs.norm()) for mine, theirs in pairs if mine is not None and theirs is not None]
    return float(torch.stack([a for a, _ in off]).norm() / torch.stack([b for _, b in off]).norm())


def accumulator(model: nn.Module, step: Step, told: list[Any], **options: Any) -> autoaccum.Accumulator:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return autoaccum.Accumulator(model, optimizer, training_step=step, callbacks=[told.append], **options)


def run(running: autoaccum.Accumulator, batch: Any, plan: list[int]) -> tuple[float, int]:
    """Step by a plan, and return the loss and how often the window was run again."""
    with torch.enable_grad():
        gradient, _ = running._step.run(running._window(batch), plan)
    repeats = running._step.transaction._num_repeats
    running._step.apply(gradient)
    return float(gradient.loss), repeats


def compared(step: Step, plan: list[int], **options: Any) -> tuple[list[Any], list[int]]:
    """Compare windows with whole batches; return what was told, and how often each window was run again."""
    told, repeats = list[Any](), list[int]()
    model, other = heads(), heads()
    running = accumulator(model, step, told, micro_batch=max(plan), **options)
    for seed in range(4):
        batch = batch_of(seed, unlabelled=0.15 * seed)
        loss, again = run(running, batch, plan)
        repeats.append(again)
        expected = whole(other, step, batch)
        assert error(model, other) < 1e-12
        assert loss == pytest.approx(expected, rel=1e-12)
    return told, repeats


@pytest.mark.device(every=13)
@pytest.mark.parametrize("step", LOOPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("plan", PLANS[3:-1:2], ids=lambda plan: "+".join(map(str, plan)))
def test_the_gradient_and_the_loss_are_those_of_the_whole_batch(step: Step, plan: list[int]) -> None:
    told, _ = compared(step, plan)
    assert [event for event in told if isinstance(event, Notice)] == []


def len_of_numbers(batch: Any) -> int:
    return int(batch["numbers"].numel())


COUNTS: dict[str, Any] = {
    "words": lambda batch: (batch["targets"] != -100).sum(),
    "label": lambda batch: len(batch["label"]),
    "0": lambda batch: (batch["targets"] != -100).sum(),
    "1": lambda batch: len(batch["label"]),
    "2": len_of_numbers,
}
COUNTED: dict[Step, Any] = {
    by_names: {name: COUNTS[name] for name in ("words", "label")},
    penalty_by_its_name: {"words": COUNTS["words"]},  # all others are means over samples
    one_after_the_other: [COUNTS[name] for name in "012"],
    with_constants: [COUNTS[name] for name in "01"],
}


@pytest.mark.device(every=13)
@pytest.mark.parametrize("step", COUNTED, ids=lambda step: step.__name__)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "+".join(map(str, plan)))
def test_losses_whose_items_the_user_counts_are_weighed_one_by_one(step: Step, plan: list[int]) -> None:
    told, repeats = compared(step, plan, num_items=COUNTED[step])
    assert repeats == [0] * 4
    assert [event for event in told if isinstance(event, Notice | Joined)] == []
    assert all(event.passed for event in told if isinstance(event, Verified))


@pytest.mark.device
@pytest.mark.parametrize(
    ("step", "num_items"),
    [(step, None) for step in (by_names, one_after_the_other, sums_under_names, smoothed_labels, penalty_by_its_name)]
    + [(step, COUNTED[step]) for step in (by_names, one_after_the_other, penalty_by_its_name)],
)
def test_each_loss_is_reported_as_the_whole_batch_has_it(step: Step, num_items: Any) -> None:
    model, other = heads(), heads()
    running = accumulator(model, step, [], micro_batch=5, num_items=num_items)
    for seed in range(3):
        batch = batch_of(seed)
        running.step(batch)
        losses = step(other, batch)
        losses = losses if isinstance(losses, Mapping) else dict(enumerate(losses))
        assert list(running.outputs) == [f"loss/{name}" for name in losses]
        found = [value.item() for value in running.outputs.values()]
        assert found == pytest.approx([value.item() for value in losses.values()], rel=1e-6)


def test_losses_with_one_weight_are_reported_by_their_names() -> None:
    def step(model: Any, batch: Any) -> Any:
        return {"words": _words(model(batch["words"]), batch), "twice": 2 * _words(model(batch["words"]), batch)}

    running, other, told = accumulator(heads(), step, told := [], micro_batch=5), heads(), told
    for seed in range(3):
        running.step(batch_of(seed))
        expected = step(other, batch_of(seed))
        found = {name: value.item() for name, value in running.outputs.items()}
        assert found == pytest.approx({f"loss/{name}": value.item() for name, value in expected.items()}, rel=1e-6)
    assert not [event for event in told if isinstance(event, Joined | Notice)]


@pytest.mark.device
def test_counts_of_the_user_by_name_are_foretold_from_the_first_window_on() -> None:
    counts = COUNTED[by_names]
    together = lambda batch: {name: count(batch) for name, count in counts.items()}  # noqa: E731
    for num_items, first in ((counts, 0), (together, 1)):
        told: list[Any] = []
        model, other = heads(), heads()
        running = accumulator(model, by_names, told, micro_batch=5, num_items=num_items)
        repeats = []
        for seed in range(3):
            batch = batch_of(seed)
            _, again = run(running, batch, [5, 5, 2])
            repeats.append(again)
            whole(other, by_names, batch)
            assert error(model, other) < 1e-12
        assert repeats == [first, 0, 0]
        assert [event for event in told if isinstance(event, Notice)] == []


def test_counts_that_differ_from_those_beforehand_are_taken_for_another_run_of_the_window() -> None:
    """What counts differs with the samples that are counted together, which are all of them before the window."""
    counts = {"words": COUNTS["words"], "label": lambda batch: len(batch["label"]) // 2 * 2}

    def step(model: Any, batch: Any) -> Any:
        outputs, even = model(batch["words"]), len(batch["label"]) // 2 * 2
        label = F.cross_entropy(outputs[1][:even], batch["label"][:even], reduction="sum") / max(even, 1)
        return {"words": _words(outputs, batch), "label": label}

    running = accumulator(heads(), step, [], micro_batch=5, num_items=counts, verify=False)
    assert [run(running, batch_of(seed), [5, 5, 2])[1] for seed in range(2)] == [1, 1]
    gradient, other = [p.grad for p in running._step.transaction.trained()], heads()
    batch = batch_of(1)
    parts = [{name: value[start : start + 4] for name, value in batch.items()} for start in (0, 5)]
    parts.append({name: value[10:] for name, value in batch.items()})
    label = sum(_label(other(part["words"]), part) * len(part["label"]) for part in parts) / 10
    (label + _words(other(batch["words"]), batch)).backward()
    for found, p in zip(gradient, other.parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(found, p.grad, rtol=1e-12, atol=1e-14)


def test_counts_for_one_loss_and_for_several_are_not_mixed() -> None:
    def mixed(batch: Any) -> Any:
        return {"words": 1} if len(batch["label"]) == 2 else 5

    running = accumulator(heads(), by_names, [], micro_batch=5, num_items=mixed)
    with pytest.raises(ArgumentTypeError, match="a dict for every micro-batch, or a number for every one"):
        run(running, batch_of(0), [5, 5, 2])


@pytest.mark.device
class TestReduction:
    def test_says_what_a_loss_is_without_a_measurement(self) -> None:
        def step(model: Any, batch: Any) -> torch.Tensor:
            return F.cross_entropy(model(batch["words"])[1], batch["label"], reduction="sum")

        model, other = heads(), heads()
        running = accumulator(model, step, [], micro_batch=5, reduction="sum", verify=False)
        run(running, batch_of(0), [5, 5, 2])
        whole(other, step, batch_of(0))
        assert error(model, other) < 1e-12

    def test_a_sum_beside_a_count_is_divided_by_what_the_window_counts(self) -> None:
        """As DAPO and Transformers' num_items_in_batch do."""

        def step(model: Any, batch: Any) -> torch.Tensor:
            words = model(batch["words"])[0].flatten(0, 1)
            return F.cross_entropy(words, batch["targets"].flatten(), reduction="sum")

        def count(batch: Any) -> torch.Tensor:
            return (batch["targets"] != -100).sum()

        for plan in PLANS:
            told: list[Any] = []
            model, other = heads(), heads()
            running = accumulator(model, step, told, micro_batch=max(plan), reduction="sum", num_items=count)
            loss, _ = run(running, batch_of(3), plan)
            expected = whole(other, lambda m, b: step(m, b) / count(b), batch_of(3))
            assert error(model, other) < 1e-12
            assert loss == pytest.approx(expected, rel=1e-12)
            assert [event for event in told if isinstance(event, Notice)] == []

    def test_that_is_wrong_is_told(self) -> None:
        def step(model: Any, batch: Any) -> torch.Tensor:
            return F.cross_entropy(model(batch["words"])[1], batch["label"])

        told: list[Any] = []
        running = accumulator(heads(), step, told, micro_batch=5, reduction="sum", accumulate="weighted")
        with pytest.warns(AutoaccumWarning, match="windows that are cut get a gradient"):
            run(running, batch_of(0), [5, 5, 2])
        assert [event.passed for event in told if isinstance(event, Verified)] == [False]

    @pytest.mark.parametrize("reduction", ["average", {"words": "mean", "label": "sum"}, {}])
    def test_is_one_of_two(self, reduction: Any) -> None:
        with pytest.raises(ArgumentError, match="reduction=.*expected one of 'mean', 'sum'"):
            accumulator(heads(), by_names, [], reduction=reduction)


# Law 2, with two terms whose counts differ in each micro-batch, dropout and a named loss.

INPUTS = torch.randn(23, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 3, (23,), generator=torch.Generator().manual_seed(1))
DATA = (INPUTS, torch.where(torch.arange(23) % 3 > 0, LABELS, -100), LABELS)


def noisy_heads() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def two_losses(model: Any, batch: Any) -> Any:
    inputs, some, all_of_them = batch
    logits = model(inputs)
    return {"some": F.cross_entropy(logits, some), "all": F.cross_entropy(logits, all_of_them)}


def added(model: Any, batch: Any) -> Any:
    return total(two_losses(model, batch))


COUNTING = {"some": lambda batch: (batch[1] != -100).sum(), "all": lambda batch: len(batch[2])}


def trainer(step: Step, micro_batch: Any, **options: Any) -> autoaccum.Trainer:
    given: dict[str, Any] = {"effective_batch": 12, "clip_norm": 0.5, "device": DEVICE, "progress": False, "epochs": 1}
    given["num_items"] = COUNTING if step is two_losses else None
    return autoaccum.Trainer(noisy_heads(), DATA, training_step=step, micro_batch=micro_batch, **(given | options))


@strides(13)
def test_an_oom_at_every_operation_leaves_no_mark(stride: int) -> None:
    step, verify = two_losses, stride == 1  # measured windows are most of the operations
    with Operations() as operations:
        trainer(step, 6, verify=verify).fit()
    clean: dict[Any, Any] = {}
    replayed = 0
    for operation in operations.every(stride, 7):
        running = trainer(step, 6, verify=verify)
        with oom_at(operation):
            try:
                result = running.fit()
            except OptimizerOutOfMemoryError:
                continue
        replayed += sum(report.replays for report in result.history)
        assert len([event for event in result.events if isinstance(event, OutOfMemory)]) <= 1
        plans = tuple(report.micro_batches for report in result.history)
        if plans not in clean:
            without = trainer(step, plans, verify=verify).fit()
            clean[plans] = [report.loss for report in without.history], state_of(without)
        losses, state = clean[plans]
        assert [report.loss for report in result.history] == losses, f"operation {operation}"
        assert same(state_of(result), state), f"operation {operation} left a mark"
    assert replayed * stride > 250


@pytest.mark.device
@pytest.mark.parametrize("step", [added, two_losses])
def test_a_run_that_goes_on_ends_as_if_it_had_never_stopped(step: Step, tmp_path: Path) -> None:
    straight = trainer(step, 5, steps=6, epochs=None).fit()

    def stop(record: Any) -> None:
        if getattr(record, "step", 0) == 3 and hasattr(record, "micro_batches"):
            raise autoaccum.StopTraining

    options: dict[str, Any] = {"epochs": None, "run_dir": tmp_path, "checkpoint_every": 1}
    trainer(step, 5, steps=6, callbacks=[stop], **options).fit()
    resumed = trainer(step, 5, steps=6, **options).fit()
    assert [report.loss for report in resumed.history] == [report.loss for report in straight.history]
    assert same(state_of(resumed), state_of(straight))


@pytest.mark.device
def test_a_validation_loss_by_name_is_that_of_all_of_it() -> None:
    model = noisy_heads()
    result = autoaccum.fit(
        model, DATA, training_step=two_losses, num_items=COUNTING, effective_batch=12, micro_batch=5, device=DEVICE,
        progress=False, validation_data=DATA, lr=1e-12,
    )  # fmt: skip
    (validated,) = [event for event in result.events if isinstance(event, autoaccum.events.Validated)]
    model.eval()
    with torch.no_grad():
        losses = two_losses(model, there(DATA))
    assert validated.loss == pytest.approx(total(losses).item(), rel=1e-5)
    expected = {f"loss/{name}": value.item() for name, value in losses.items()}
    assert validated.metrics == pytest.approx(expected, rel=1e-5)
    assert result.history[-1].outputs.keys() == expected.keys()
