"""Names of other trainers, answered with ours."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from autoaccum.callbacks import EarlyStopping
from autoaccum.errors import ArgumentTypeError
from autoaccum.training.synonyms import ELSEWHERE, REMOVED, answering

DATA = torch.randn(8, 4), torch.randint(0, 2, (8,))


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("batch_size", "effective_batch"),
        ("batchSize", "effective_batch"),
        ("accumulate_grad_batches", "Leave it out"),
        ("num_train_epochs", "epochs"),
        ("compute_metrics", "metrics"),
        ("weight_decay", "Use optimizer=lambda params"),
        ("learning_rate", "lr"),
        ("clipNorm", "Did you mean clip_norm"),
        ("gradient_checkpointing", "memory_saving='checkpoint'"),
        ("efective_batch", "Did you mean effective_batch"),
        ("scheduler", "Did you mean lr_scheduler"),
        ("callback", "Did you mean callbacks"),
        ("optim", "Did you mean optimizer"),
        ("validation_dataset", "Did you mean validation_data"),
    ],
)
def test_what_others_call_it_is_answered_with_our_name(argument: str, told: str) -> None:
    for function in (autoaccum.fit, autoaccum.Trainer):
        options: dict[str, Any] = {argument: 3}
        with pytest.raises(
            ArgumentTypeError, match=rf"^{function.__name__}\(\) has no argument '{argument}'\. .*{told}"
        ):
            function(nn.Linear(4, 2), DATA, loss_fn=cross_entropy, **options)


def accumulator(**options: Any) -> autoaccum.Accumulator:
    model = nn.Linear(4, 2)
    return autoaccum.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=cross_entropy, **options)


ENTRIES: dict[str, Any] = {
    "fit": lambda **o: autoaccum.fit(nn.Linear(4, 2), DATA, loss_fn=cross_entropy, progress=False, cache=False, **o),
    "probe": lambda **o: autoaccum.probe(nn.Linear(4, 2), DATA, loss_fn=cross_entropy, **o),
    "estimate": lambda **o: autoaccum.estimate(
        nn.Linear(4, 2), DATA, loss_fn=cross_entropy, device_memory="1GiB", **o
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENTRIES)
def test_a_batch_size_is_an_effective_batch_in_the_words_of_each_entry_and_works_there(name: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        ENTRIES[name](batch_size=4)
    assert str(caught.value) == (
        f"{name}() has no argument 'batch_size'. Use effective_batch (samples per optimizer step)."
    )
    assert (caught.value.argument, caught.value.value) == ("batch_size", 4)
    assert ENTRIES[name](effective_batch=4) is not None


def test_where_there_is_no_effective_batch_a_batch_size_has_another_fix() -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        accumulator(batch_size=4)
    assert str(caught.value) == (
        "Accumulator() has no argument 'batch_size'. Pass all samples of one optimizer step to step(batch)."
    )
    for batch in DataLoader(TensorDataset(*DATA), batch_size=4):
        assert accumulator().step(batch).item() > 0
    with pytest.raises(ArgumentTypeError) as caught:
        autoaccum.check(nn.Linear(4, 2), DATA, loss_fn=cross_entropy, batch_size=4)  # type: ignore[call-arg]
    assert str(caught.value) == (
        "check() has no argument 'batch_size'. Leave it out (fit() has effective_batch for it)."
    )
    with pytest.raises(ArgumentTypeError) as caught:
        autoaccum.sweep(dict, batch_size=4)
    assert str(caught.value) == (
        "sweep() has no argument 'batch_size'. Use effective_batch (samples per optimizer step)."
    )


def test_what_nobody_knows_has_no_cure() -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        autoaccum.probe(nn.Linear(4, 2), DATA, loss_fn=cross_entropy, quux=1)  # type: ignore[call-arg]
    assert str(caught.value) == "probe() has no argument 'quux'."


def test_a_function_that_has_nothing_like_it_says_so() -> None:
    """An Accumulator's effective batch is the batch that it is given."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentTypeError, match=r"Leave it out \(fit\(\) has epochs for it\)\.$"):
        autoaccum.Accumulator(model, optimizer, loss_fn=cross_entropy, max_epochs=8)  # type: ignore[call-arg]
    with pytest.raises(ArgumentTypeError, match=r"Use clip_norm\.$"):
        autoaccum.Accumulator(model, optimizer, loss_fn=cross_entropy, max_grad_norm=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("effective_batch", r"Pass all samples of one optimizer step to step\(batch\)\.$"),
        ("per_device_train_batch_size", r"Pass all samples of one optimizer step to step\(batch\)\.$"),
        ("warmup_steps", r"Call scheduler.step\(\) after accumulator.step\(batch\)\.$"),
        ("lr_scheduler", r"Call scheduler.step\(\) after accumulator.step\(batch\)\.$"),
    ],
)
def test_what_a_loop_of_ones_own_does_is_said(argument: str, told: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {argument: 8}
    with pytest.raises(ArgumentTypeError, match=told):
        autoaccum.Accumulator(model, optimizer, loss_fn=cross_entropy, **options)


def test_callbacks_answer_too() -> None:
    with pytest.raises(ArgumentTypeError, match=r"Did you mean patience\?$"):
        EarlyStopping(patiense=2)  # type: ignore[call-arg]


def test_what_has_no_effective_batch_does_not_speak_of_one() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(
        ArgumentTypeError, match=r"Leave it out: autoaccum finds how many samples fit at once\.$"
    ) as caught:
        autoaccum.Accumulator(
            model, torch.optim.SGD(model.parameters(), lr=0.1), gradient_accumulation_steps=4,  # type: ignore[call-arg]
        )  # fmt: skip
    assert "effective_batch" not in str(caught.value)


def test_a_plan_answers_too() -> None:
    with pytest.raises(ArgumentTypeError, match=r"^plan\(\) has no argument .*Use effective_batch"):
        autoaccum.plan(batch_size=256)  # type: ignore[call-arg]
    with pytest.raises(ArgumentTypeError, match=r"Did you mean max_micro_batch\?"):
        autoaccum.plan(256, micro_batch=100)  # type: ignore[call-arg]
    assert autoaccum.plan(256, 100).sizes == (86, 85, 85)


def test_there_are_twenty_names_and_none_is_ours() -> None:
    assert len(ELSEWHERE) <= 20
    assert not set(inspect.signature(autoaccum.fit).parameters) & set(ELSEWHERE)


@pytest.mark.parametrize("argument", REMOVED)
@pytest.mark.parametrize("name", ["fit", "check", "Accumulator"])
def test_a_removed_argument_says_what_to_do_now(name: str, argument: str) -> None:
    with pytest.raises(ArgumentTypeError, match=rf"^{name}\(\) has no argument '{argument}'\. (Leave|Compute) it "):
        getattr(autoaccum, name)(torch.nn.Linear(2, 2), **{argument: "window"})


def test_signatures_are_as_without() -> None:
    def function(model: object, *, rate: float = 1.0) -> str:
        return f"{model} {rate}"

    answered = answering("function")(function)
    assert inspect.signature(answered) == inspect.signature(function)
    assert answered("a", rate=2.0) == "a 2.0"


@pytest.mark.parametrize("call", ["step", "backward"])
def test_a_step_is_given_one_batch(call: str) -> None:
    model = nn.Linear(4, 2)
    accumulator = autoaccum.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=cross_entropy)
    method: Any = getattr(accumulator, call)
    for given, named, told in (
        (
            DATA,
            {},
            rf"^Accumulator.{call}\(\) takes one batch, and got Tensor, Tensor\. .*Accumulator.{call}\(\(inputs, targets\)\)",
        ),
        ((), {"input_ids": DATA[0], "labels": DATA[1]}, rf"got input_ids=..., labels=...\. .*Accumulator.{call}\(\{{"),
        ((), {}, "got nothing.*all samples of a step"),
        ((DATA,), {"batch": DATA}, r"got tuple, batch=\.\.\.\."),
    ):
        with pytest.raises(ArgumentTypeError, match=told):
            method(*given, **named)
    expected = cross_entropy(model(DATA[0]), DATA[1]).item()
    assert method(batch=DATA).item() == pytest.approx(expected, rel=1e-6)

    def own(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs, targets, 1, 2, 3, 4, 5, 6, 7, 8)  # type: ignore[call-arg,arg-type]

    other: Any = autoaccum.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=own)
    with pytest.raises(TypeError, match="positional argument") as caught:
        getattr(other, call)(DATA)
    assert not isinstance(caught.value, autoaccum.AutoaccumError), "what the loss itself raises is its own"


@pytest.mark.parametrize(
    ("function", "given", "missing"),
    [
        (autoaccum.fit, {"effective_batch": 4}, "data"),
        (autoaccum.Trainer, {"effective_batch": 4}, "data"),
        (autoaccum.Accumulator, {}, "optimizer"),
        (autoaccum.probe, {}, "data"),
    ],
)
def test_what_is_missing_is_missing_in_the_call_that_was_made(function: Any, given: Any, missing: str) -> None:
    with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) missing .*'{missing}'"):
        function(nn.Linear(2, 2), **given)
