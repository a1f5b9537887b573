"""Every mistake gets its own typed error that names the argument, the value and the cure, before any training."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from autoaccum import errors
from autoaccum.testing import simulated_memory
from tests.models import classes, mlp


class Stepped(torch.optim.SGD):
    """An optimizer that must not be used."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> None:
        raise AssertionError("training had begun")


def fit(**options: Any) -> autoaccum.FitResult:
    arguments: dict[str, Any] = {
        "model": mlp(),
        "data": classes(20),
        "effective_batch": 8,
        "loss_fn": cross_entropy,
        "optimizer": Stepped,
        "device": "cpu",
        "progress": False,
        **options,
    }
    return autoaccum.fit(**arguments)


def frozen() -> nn.Module:
    model = mlp()
    model.requires_grad_(False)
    return model


NAN = (torch.full((20, 8), float("nan")), classes(20)[1])

CASES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "effective batch 0": (
        {"effective_batch": 0},
        errors.ArgumentError,
        "effective_batch=0: expected an int of at least 1. Pass",
    ),
    "effective batch negative": ({"effective_batch": -8}, errors.ArgumentError, "effective_batch=-8: expected an int"),
    "effective batch float": (
        {"effective_batch": 8.0},
        errors.ArgumentTypeError,
        "effective_batch=8.0: expected an int",
    ),
    "effective batch bool": (
        {"effective_batch": True},
        errors.ArgumentTypeError,
        "effective_batch=True: expected an int",
    ),
    "empty tensors": ({"data": (torch.empty(0, 8), torch.empty(0))}, errors.EmptyDatasetError, "data holds no sample"),
    "empty dataset": ({"data": TensorDataset(torch.empty(0, 8))}, errors.EmptyDatasetError, "data holds no sample"),
    "empty iterable": ({"data": (batch for batch in [])}, errors.EmptyDatasetError, "data holds no sample"),
    "empty validation data": ({"validation_data": []}, errors.EmptyDatasetError, "validation_data holds no sample"),
    "tensors disagree": ({"data": (torch.zeros(5, 8), torch.zeros(4))}, errors.RaggedBatchError, r"\[0\]: 5, \[1\]: 4"),
    "batches disagree": (
        {"data": [(torch.zeros(5, 8), torch.zeros(4))]},
        errors.RaggedBatchError,
        r"\[0\]: 5, \[1\]: 4",
    ),
    "data is nothing": ({"data": None}, errors.ArgumentTypeError, "data=None: expected a Dataset"),
    "loss is a vector": (
        {"loss_fn": lambda outputs, targets: cross_entropy(outputs, targets, reduction="none")},
        errors.NonScalarLossError,
        r"loss_fn returned a tensor of shape \(\d,\): expected one scalar.*\.mean\(\)",
    ),
    "loss is a float": ({"loss_fn": lambda outputs, targets: 0.5}, errors.NonScalarLossError, "a value of type float"),
    "loss has no grad": (
        {"loss_fn": lambda outputs, targets: cross_entropy(outputs, targets).detach()},
        errors.LossWithoutGradError,
        "loss_fn returned a loss without a gradient",
    ),
    "loss is NaN": ({"data": NAN}, errors.NonFiniteLossError, "the loss of the first window is nan; no step was taken"),
    "model without loss": (
        {"loss_fn": None, "data": classes(20)[0]},
        errors.NonScalarLossError,
        "the model returned a tensor",
    ),
    "loss_fn without pairs": ({"data": classes(20)[0]}, errors.DataError, r"batches are \(inputs, targets\)"),
    "nothing to train": ({"model": frozen()}, errors.NoTrainableParametersError, r"requires_grad_\(True\)"),
    "no module": ({"model": lambda inputs: inputs}, errors.ArgumentTypeError, "expected a torch.nn.Module"),
    "optimizer of another model": (
        {"optimizer": torch.optim.SGD(mlp().parameters(), lr=0.1)},
        errors.ForeignOptimizerError,
        "optimizer='SGD'.*holds none of them.*model.parameters",
    ),
    "no optimizer": ({"optimizer": "adam"}, errors.ArgumentTypeError, "optimizer='adam'"),
    "optimizer with a closure": (
        {"optimizer": lambda p: torch.optim.LBFGS(p)},
        errors.ArgumentTypeError,
        "LBFGS.*closure",
    ),
    "lr beside an optimizer": (
        {"lr": 0.1},
        errors.ConflictingArgumentsError,
        "lr=0.1: expected at most one of lr and optimizer",
    ),
    "both loss_fn and training_step": (
        {"training_step": lambda model, batch: None},
        errors.ConflictingArgumentsError,
        "at most one of training_step and loss_fn",
    ),
    "two budgets": (
        {"epochs": 1, "steps": 5},
        errors.ConflictingArgumentsError,
        "steps=5: expected at most one of steps and epochs",
    ),
    "budget 0": ({"samples": 0}, errors.ArgumentError, "samples=0"),
    "unknown device": ({"device": "cuda:99"}, errors.UnknownDeviceError, "device='cuda:99' is not available: this"),
    "no device": ({"device": "gpu"}, errors.UnknownDeviceError, "device='gpu' is no device to train on."),
    "memory limit in words": ({"memory_limit": "lots"}, errors.ArgumentError, "memory_limit='lots': expected bytes"),
    "memory limit above 1": ({"memory_limit": 1.5}, errors.ArgumentError, "memory_limit=1.5.*share"),
    "memory limit bool": ({"memory_limit": True}, errors.ArgumentTypeError, "memory_limit=True"),
    "micro-batch in words": ({"micro_batch": "big"}, errors.ArgumentTypeError, "micro_batch='big'"),
    "micro-batch 0": ({"micro_batch": 0}, errors.ArgumentError, "micro_batch=0"),
    "plans of plans": ({"micro_batch": [8, 8]}, errors.ArgumentTypeError, "list of plans"),
    "max micro-batch 0": ({"max_micro_batch": 0}, errors.ArgumentError, "max_micro_batch=0"),
    "headroom 1": ({"headroom": 1}, errors.ArgumentError, "headroom=1"),
    "precision": (
        {"precision": "fp8"},
        errors.ArgumentError,
        "precision='fp8': expected one of 'fp32', 'bf16', 'fp16'",
    ),
    "clip_norm 0": ({"clip_norm": 0}, errors.ArgumentError, "clip_norm=0: expected a number above 0"),
    "negative workers": ({"num_workers": -1}, errors.ArgumentError, "num_workers=-1"),
    "scheduler instance": (
        {"lr_scheduler": LambdaLR(torch.optim.SGD(mlp().parameters(), lr=0.1), lambda step: 1.0)},
        errors.ArgumentTypeError,
        r"a function \(optimizer, num_steps\)",
    ),
    "scheduler without a length": (
        {"data": [classes(8)], "lr_scheduler": lambda optimizer, num_steps: None},
        errors.ArgumentError,
        "Pass steps=",
    ),
    "drop_last drops all": (
        {"drop_last": True, "effective_batch": 64},
        errors.ArgumentError,
        "at least effective_batch=64",
    ),
    "drop_last drops all, in steps": (
        {"drop_last": True, "effective_batch": 64, "steps": 3},
        errors.ArgumentError,
        "at least effective_batch=64",
    ),
    "collate_fn beside tensors": ({"collate_fn": list}, errors.ConflictingArgumentsError, "Wrap|wrap"),
    "collate_fn beside batches": (
        {"data": iter([classes(8)]), "collate_fn": list},
        errors.ConflictingArgumentsError,
        "one of batches",
    ),
    "epochs of an iterator": ({"data": iter([classes(8)]), "epochs": 2}, errors.ArgumentError, "epochs=2"),
    "validation on an iterator": (
        {"validation_data": iter([classes(8)])},
        errors.ArgumentTypeError,
        "data that can be read again",
    ),
    "callbacks is a function": ({"callbacks": print}, errors.ArgumentTypeError, "a list of functions"),
    "loss_fn in words": ({"loss_fn": "ce"}, errors.ArgumentTypeError, "loss_fn='ce'"),
    "num_items is a number": ({"num_items": 8}, errors.ArgumentTypeError, "num_items=8"),
    "num_items counts nothing": (
        {"num_items": lambda batch: None},
        errors.ArgumentTypeError,
        r"num_items\(micro-batch\)=None",
    ),
    "scheduler with a metric": (
        {"lr_scheduler": lambda optimizer, num_steps: ReduceLROnPlateau(optimizer)},
        errors.ArgumentTypeError,
        "needs no metric",
    ),
    "scheduler of nothing": (
        {"lr_scheduler": lambda optimizer, num_steps: None},
        errors.ArgumentTypeError,
        "lr_scheduler=None",
    ),
    "lazy layers": (
        {"model": nn.LazyLinear(3)},
        errors.ArgumentError,
        "model='LazyLinear': expected a model whose lazy layers know their shapes. Call it once on a batch: model.inputs.",
    ),
    "BatchNorm in ones": (
        {"model": nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3)), "micro_batch": 1},
        errors.ArgumentError,
        "micro_batch=1: expected an int of at least 2.*BatchNorm",
    ),
    "loss_fn forgotten": (
        {"loss_fn": None},
        errors.DataError,
        "neither loss_fn nor training_step was given.*Pass loss_fn",
    ),
    "no plans": ({"micro_batch": []}, errors.ArgumentError, "micro_batch="),
    "seed too large": ({"seed": 2**70}, errors.ArgumentError, "seed="),
    "collate_fn beside a loader": (
        {"data": DataLoader(TensorDataset(*classes(20))), "collate_fn": list},
        errors.ConflictingArgumentsError,
        "collate_fn",
    ),
    "workers beside a loader": (
        {"data": DataLoader(TensorDataset(*classes(20))), "num_workers": 2},
        errors.ConflictingArgumentsError,
        "num_workers",
    ),
    "negative items": ({"num_items": lambda batch: -1}, errors.ArgumentError, r"num_items\(micro-batch\)=-1"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_bad_input(case: str) -> None:
    options, kind, message = CASES[case]
    with pytest.raises(kind, match=re.compile(message, re.DOTALL)) as caught:
        fit(**options)
    assert isinstance(caught.value, errors.AutoaccumError)
    assert type(caught.value) is kind, "its own type, not a base of it"


def test_a_limit_below_the_model_names_both_numbers() -> None:
    model = nn.Linear(8, 50_000)
    weights = sum(p.nbytes for p in model.parameters())
    with simulated_memory("1MiB"), pytest.raises(errors.LimitBelowModelError, match="1.00 MiB may be used") as caught:
        fit(model=model, optimizer=None)
    assert caught.value.limit_bytes == 2**20
    assert caught.value.needed_bytes > 2**20
    assert "or train a smaller model" in str(caught.value)
    with simulated_memory(5 * weights), pytest.raises(errors.LimitBelowModelError) as caught:
        fit(model=model, optimizer=None, memory_limit=3 * weights)
    assert 3.9 * weights < caught.value.needed_bytes < 4.1 * weights  # weights, gradients and AdamW's two moments
    with pytest.raises(errors.LimitBelowModelError, match="10.00 MiB may be used") as caught:
        fit(memory_limit="10MiB")  # less than Python itself
    assert "train a smaller model" not in str(caught.value), "which would not make up for Python"
    assert "(the process, and " in str(caught.value)


def test_nothing_was_changed_by_a_nan() -> None:
    model = mlp()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(errors.NonFiniteLossError):
        fit(model=model, data=NAN)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_out_of_memory_in_the_optimizers_step() -> None:
    class Fails(Stepped):
        def step(self, closure: Any = None) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(errors.OptimizerOutOfMemoryError, match=r"Fails.step ran out of memory in step 1") as caught:
        fit(optimizer=Fails)
    assert caught.value.step == 1
    assert caught.value.__context__ is None, "no stack of ours behind it"


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn: dict[str, str] = {}
    parents: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^    ([│├└─ ]*)(\w+)(?: \((\w+)\))?  +\S", line) or re.match(
            r"^    ()(AutoaccumError)$", line
        )
        if match:
            depth = len(match[1])
            parents = [entry for entry in parents if entry[0] < depth]
            drawn[match[2]] = parents[-1][1] if parents else ""
            parents.append((depth, match[2]))
    classes_ = {
        name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)
    }
    assert set(drawn) == set(classes_)
    for name, parent in drawn.items():
        if parent:
            assert classes_[parent] in classes_[name].__mro__


ADVICE = (
    errors.Advice(name="bf16", how="precision='bf16'"),
    errors.Advice(name="SGD", how="optimizer=..."),
)


def test_advice_stands_in_the_message_a_line_each() -> None:
    plain = errors.NothingFitsError(phase="training", micro_batch=2, peak_bytes=5120, limit_bytes=3072)
    assert "\n" not in str(plain)
    assert plain.advice == ()
    error = plain.advised(ADVICE)
    assert (error.phase, error.micro_batch, error.peak_bytes, error.limit_bytes) == ("training", 2, 5120, 3072)
    first, *lines = str(error).splitlines()
    assert first.startswith("training: a micro-batch of 2, the smallest there is, does not fit, 5.00 KiB in use")
    assert lines == ["  bf16: precision='bf16'", "  SGD: optimizer=..."]


def test_errors_can_be_pickled() -> None:
    """Else a pool of processes waits for them for ever."""
    for error in (
        errors.ArgumentError("effective_batch", 0, "an int"),
        errors.RaggedBatchError({"x": 3, "y": 4}),
        errors.NothingFitsError(phase="training", micro_batch=1, peak_bytes=5, limit_bytes=4, advice=ADVICE),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)
