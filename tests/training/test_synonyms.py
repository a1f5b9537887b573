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
from autoaccum.callbacks import EMA, EarlyStopping, KeepBest, ReduceOnPlateau
from autoaccum.errors import ArgumentTypeError
from autoaccum.training.synonyms import ELSEWHERE, answering

DATA = torch.randn(8, 4), torch.randint(0, 2, (8,))


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("batch_size", "effective_batch"),
        ("per_device_train_batch_size", "effective_batch"),
        ("accumulate_grad_batches", "Leave it out"),
        ("max_epochs", "epochs"),
        ("num_train_epochs", "epochs"),
        ("compute_metrics", "metrics"),
        ("logger", "callbacks.*autoaccum.reporting"),
        ("early_stopping_patience", r"EarlyStopping\(.*validation_data"),
        ("ema_decay", r"autoaccum.callbacks.EMA"),
        ("load_best_model_at_end", "autoaccum.load_best"),
        ("weight_decay", "Use optimizer=lambda params"),
        ("warmup_steps", "Use lr_scheduler"),
        ("validation_split", "random_split"),
        ("strategy", "torchrun"),
        ("learning_rate", "lr"),
        ("clipNorm", "clip_norm"),
        ("gradient_checkpointing", "memory_saving='checkpoint'"),
        ("offload_optimizer", "memory_saving='offload'"),
        ("cpu_offload", "memory_saving='offload'"),
        ("efective_batch", "effective_batch"),
        ("eval_steps", r"Use validate_every \(samples: eval_steps times effective_batch\)"),
        ("evaluation_strategy", "leave it out to validate after each epoch"),
        ("per_device_eval_batch_size", "Leave it out.*max_micro_batch bounds it"),
        ("label_smoothing_factor", r"loss_fn=torch.nn.CrossEntropyLoss\(label_smoothing=0.1\)"),
        ("limit_train_batches", "Use steps or samples.*Subset"),
        ("greater_is_better", r"EarlyStopping\(metric='accuracy', mode='max'\).*KeepBest"),
        ("accum_steps", "Leave it out"),
        ("total_batch_size", "Use effective_batch"),
        ("max_iters", "Use steps"),
        ("max_time", "StopTraining"),
        ("group_by_length", "Leave it out.*sorted by length"),
        ("dtype", "Use precision"),
        ("keep_last", "Use keep_checkpoints"),
        ("tokenizer", "Use collate_fn"),
        ("world_size", "torchrun"),
        ("drop_remainder", "Use drop_last=True"),
        ("model_init", r"model=model_init\(\)"),
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
        "Accumulator() has no argument 'batch_size'. Use DataLoader(data, batch_size=4): step(batch) takes all samples "
        "of one optimizer step."
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


@pytest.mark.parametrize("argument", ["loss_scope", "embed"])
@pytest.mark.parametrize("function", [autoaccum.fit, autoaccum.check, autoaccum.evaluate, autoaccum.probe])
def test_what_joined_micro_batches_made_needless_says_so(function: Any, argument: str) -> None:
    options: dict[str, Any] = {argument: "window"}
    with pytest.raises(ArgumentTypeError, match="Leave it out: a loss that compares samples is that of the full batch"):
        function(nn.Linear(4, 2), DATA, loss_fn=cross_entropy, **options)


@pytest.mark.parametrize("function", [autoaccum.fit, autoaccum.check, autoaccum.probe, autoaccum.estimate])
def test_what_a_step_computes_itself_says_so(function: Any) -> None:
    options: dict[str, Any] = {"before_window": len}
    with pytest.raises(ArgumentTypeError, match="'before_window'. Compute it in the step .* once on the full batch"):
        function(nn.Linear(4, 2), DATA, loss_fn=cross_entropy, **options)
    with pytest.raises(ArgumentTypeError, match="Compute it in the step"):
        autoaccum.sweep(dict, **options)


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
        ("effective_batch", r"Use DataLoader\(data, batch_size=8\): step\(batch\) takes all samples of one"),
        (
            "per_device_train_batch_size",
            r"Use DataLoader\(data, batch_size=8\): step\(batch\) takes all samples of one",
        ),
        ("scheduler", r"Call scheduler.step\(\) after accumulator.step\(batch\)\.$"),
        ("lr_scheduler", r"Call scheduler.step\(\) after accumulator.step\(batch\)\.$"),
    ],
)
def test_what_a_loop_of_ones_own_does_is_said(argument: str, told: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {argument: 8}
    with pytest.raises(ArgumentTypeError, match=told):
        autoaccum.Accumulator(model, optimizer, loss_fn=cross_entropy, **options)


def test_inputs_and_targets_are_one_argument() -> None:
    with pytest.raises(
        ArgumentTypeError,
        match=r"^fit\(\) takes model and data without a name, and argument 3 is a Tensor\. .*data=\(inputs, targets\)",
    ):
        autoaccum.fit(nn.Linear(4, 2), *DATA, effective_batch=4, loss_fn=cross_entropy)  # type: ignore[misc,arg-type]


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
    ("make", "told"),
    [
        (
            lambda: EarlyStopping("accuracy", "max"),
            r"^EarlyStopping\(\) takes patience without a name, and argument 2 is a str\. .*metric=\.\.\., mode=",
        ),
        (lambda: EarlyStopping("accuracy"), r"^patience='accuracy': .*metric= names"),
        (
            lambda: EarlyStopping(monitor="val_loss"),
            r"^EarlyStopping\(\) has no argument 'monitor'\. Use metric \('loss', or",
        ),
        (lambda: EarlyStopping(patiense=2), r"Did you mean patience\?$"),
        (lambda: ReduceOnPlateau(threshold=0.1), r"Use min_delta\.$"),
        (
            lambda: KeepBest("val_loss"),
            r"^KeepBest\(\) needs mode, which has no default\. Pass mode='max' where higher is better",
        ),
        (lambda: KeepBest("accuracy", greater_is_better=True), r"Use mode='max' where"),
        (
            lambda: EMA(0.9, True),
            r"^EMA\(\) takes decay without a name, and argument 2 is a bool\. .*warm_up=\.\.\., validate=",
        ),
    ],
)
def test_callbacks_answer_too(make: Any, told: str) -> None:
    with pytest.raises(ArgumentTypeError, match=told):
        make()
    assert EarlyStopping(2, metric="accuracy", mode="max").patience == 2


def test_what_has_no_default_is_asked_for() -> None:
    model = nn.Linear(4, 2)
    told = r"\(\) needs effective_batch, which has no default\. Pass effective_batch=64, say: samples per optimizer step\.$"
    for function in (autoaccum.fit, autoaccum.Trainer):
        with pytest.raises(ArgumentTypeError, match=told):
            function(model, DATA, loss_fn=cross_entropy)  # type: ignore[call-arg]
        with pytest.raises(
            ArgumentTypeError,
            match=r"\(\) needs data, .*Pass tensors, a dataset or a DataLoader as the second argument\.$",
        ):
            function(model, effective_batch=4)  # type: ignore[call-arg]


def test_what_has_no_effective_batch_does_not_speak_of_one() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(
        ArgumentTypeError, match=r"Leave it out: autoaccum finds how many samples fit at once\.$"
    ) as caught:
        autoaccum.Accumulator(
            model, torch.optim.SGD(model.parameters(), lr=0.1), gradient_accumulation_steps=4,  # type: ignore[call-arg]
        )  # fmt: skip
    assert "effective_batch" not in str(caught.value)


def test_a_plan_is_made_of_three_numbers() -> None:
    for options in ({"batch_size": 256}, {"per_device_train_batch_size": 8}, {"gradient_accumulation_steps": 4}):
        with pytest.raises(
            ArgumentTypeError, match=r"^plan\(\) has no argument .*Use effective_batch.*max_micro_batch"
        ):
            autoaccum.plan(**options)  # type: ignore[call-arg]
    with pytest.raises(ArgumentTypeError, match=r"Did you mean max_micro_batch\?"):
        autoaccum.plan(256, micro_batch=100)  # type: ignore[call-arg]
    assert autoaccum.plan(256, 100).sizes == (86, 85, 85)


def test_evaluate_and_predict_answer_too() -> None:
    model = nn.Linear(4, 2)
    told = r"has no argument 'batch_size'\. .*max_micro_batch bounds it\)\.$"
    with pytest.raises(ArgumentTypeError, match=told):
        autoaccum.evaluate(model, DATA, loss_fn=cross_entropy, batch_size=8)  # type: ignore[call-arg]
    with pytest.raises(ArgumentTypeError, match=told):
        autoaccum.predict(model, DATA[0], batch_size=8)  # type: ignore[call-arg]
    module = made_by("lightning.pytorch.core.module", "LightningModule", nn.Module)
    own = type("Own", (module,), {"__module__": "__main__", "forward": lambda self, x: x * 2})()
    with pytest.raises(ArgumentTypeError, match="AutoAccum"):
        autoaccum.evaluate(own, DATA)
    assert torch.equal(autoaccum.predict(own, DATA[0]), DATA[0] * 2), "no loss is asked of it"


def test_every_name_is_as_it_is_compared_and_none_is_ours() -> None:
    names = [name for names in ELSEWHERE for name in names.split()]
    assert len(names) == len(set(names))
    assert all(name.isalnum() and name == name.lower() for name in names)
    ours = {name for name in inspect.signature(autoaccum.fit).parameters if "_" not in name}
    assert not ours & set(names)


def made_by(module: str, name: str, *bases: type) -> Any:
    return type(name, bases or (object,), {"__module__": module})


def test_a_module_or_trainer_of_another_library_is_told_what_to_pass() -> None:
    module = made_by("lightning.pytorch.core.module", "LightningModule", nn.Module)
    own = type("Own", (module,), {"__module__": "__main__", "forward": lambda self, x: self.linear(x)})()
    own.linear = nn.Linear(4, 2)
    with pytest.raises(
        ArgumentTypeError, match=r"^model='Own': .*AutoAccum\(effective_batch\).*model.training_step\(batch, 0\)"
    ):
        autoaccum.fit(own, DATA, effective_batch=4)
    result = autoaccum.fit(own, DATA, effective_batch=4, loss_fn=cross_entropy, progress=False, cache=False)
    assert result.num_samples == 8, "with a loss it is a module like any other"
    trainer = made_by("transformers.trainer", "Trainer")()
    with pytest.raises(ArgumentTypeError, match=r"^model='Trainer': .*AutoAccumTrainer.*trainer.train_dataset"):
        autoaccum.fit(trainer, DATA, effective_batch=4)
    with pytest.raises(ArgumentTypeError, match="trainer.model"):
        autoaccum.fit(model=trainer, data=DATA, effective_batch=4)


def test_signatures_are_as_without() -> None:
    def function(model: object, *, rate: float = 1.0) -> str:
        return f"{model} {rate}"

    answered = answering("function")(function)
    assert inspect.signature(answered) == inspect.signature(function)
    assert answered("a", rate=2.0) == "a 2.0"
