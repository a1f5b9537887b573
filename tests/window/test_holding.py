"""What holds the memory at a moment: counted by kind and named, without a trace."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoaccum.memory.base import Usage
from autoaccum.memory.oom import RanOut, attempt, witnessed
from autoaccum.window import holding
from autoaccum.window.holding import KINDS, LARGEST, REST, held
from autoaccum.window.job import Job

EVERYTHING = 10_000


class Full:
    """A memory of which so much is held, 500 bytes by the allocator alone."""

    def usage(self) -> Usage:
        return Usage(EVERYTHING + 500, EVERYTHING + 700, EVERYTHING, EVERYTHING)


class Counted(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return function(*args, **(kwargs or {}))


class Net(nn.Module):
    """A layer, of whose output a step is made before memory runs out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)
        self.again = self.layer.weight  # the same under another name, which comes first
        self.register_buffer("seen", torch.zeros(7))
        self.hidden: Any = None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.layer(batch))
        self.hidden = weakref.ref(hidden)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. " + "x" * 1000)


def job(model: nn.Module) -> Job:
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return Job(
        model=model, modules=(model,), optimizer=optimizer, loss_of=lambda m, b: m(b), device=torch.device("cpu")
    )


def seen(model: nn.Module, look: Any = held) -> dict[str, Any]:
    """What is seen when memory runs out in a forward of 3 samples."""
    job_of, found = job(model), []
    whole = torch.ones(12, 4)

    def add() -> None:
        batch = whole[:3].clone()
        model(batch)

    # As the function of ours that runs a micro-batch.
    ours = {**add.__globals__, "__name__": "autoaccum.window.transaction"}
    add = FunctionType(add.__code__, ours, closure=add.__closure__)
    with witnessed(lambda error: found.append(look(job_of, Full(), error))):
        assert isinstance(attempt(add), RanOut)
    return dict(found[0])


def test_bytes_are_told_by_kind() -> None:
    model = Net()
    found = seen(model)
    assert found["bytes_by_kind"] == {
        "parameters": 25 * 4, "buffers": 7 * 4, "gradients": 25 * 4, "optimizer state": 2 * 25 * 4 + 2 * 4,
        "inputs": 12 * 4, REST: EVERYTHING - (100 + 28 + 100 + 208 + 48),
    }  # fmt: skip
    assert list(found["bytes_by_kind"]) == [*KINDS, REST]
    assert (found["used_bytes"], found["only_the_allocator_holds_bytes"]) == (EVERYTHING + 500, 500)
    assert (found["asked_bytes"], found["peak_bytes"], found["device"]) == (2 * 2**30, EVERYTHING + 700, "cpu")
    assert len(found["error"]) == 500
    assert json.loads(json.dumps(found)) == found


def test_tensors_are_told_by_size_and_name() -> None:
    kept = torch.zeros(1000)  # of nobody that is known, as a list of losses is
    found = seen(Net())["largest_tensors"]
    assert len(found) < LARGEST
    assert [one["bytes"] for one in found] == sorted((one["bytes"] for one in found), reverse=True)
    assert {"bytes": kept.nbytes, "shape": [1000], "dtype": "float32", "kind": REST, "name": None} in found
    names = {(one["kind"], one["name"], tuple(one["shape"])) for one in found if one["kind"] != REST}
    # Where larger tensors of other tests are alive, fewer of these are among the largest.
    assert names <= {
        ("parameters", "again", (5, 4)), ("gradients", "again", (5, 4)), ("inputs", None, (3, 4)),
        ("optimizer state", "again exp_avg", (5, 4)), ("optimizer state", "again exp_avg_sq", (5, 4)),
        ("buffers", "seen", (7,)), ("parameters", "layer.bias", (5,)), ("gradients", "layer.bias", (5,)),
        ("optimizer state", "layer.bias exp_avg", (5,)), ("optimizer state", "layer.bias exp_avg_sq", (5,)),
        ("optimizer state", "again step", ()), ("optimizer state", "layer.bias step", ()),
    }  # fmt: skip
    assert ("parameters", "again", (5, 4)) in names
    losses = [torch.zeros(500) for _ in range(30)]
    found = seen(Net())["largest_tensors"]
    assert [one["bytes"] for one in found] == [kept.nbytes] + [losses[0].nbytes] * (LARGEST - 1)


def test_nothing_is_run_drawn_or_pinned() -> None:
    before = torch.get_rng_state()
    gc.disable()  # by counting alone what is not pinned is gone
    try:
        with Counted() as blind:
            seen(Net(), lambda *_: {})
        random = torch.rand(1)
        torch.set_rng_state(before)
        with Counted() as counted:
            seen(model := Net())
        assert counted.operations == blind.operations
        assert model.hidden() is None
        assert torch.rand(1) == random
    finally:
        gc.enable()


def test_a_frame_that_somebody_holds_pins_no_batch() -> None:
    """As that of a generator, or one that a debugger keeps: what was read of it is not kept by it."""
    frames, batches = [], []

    def add() -> None:
        batch = torch.ones(3)
        batches.append(weakref.ref(batch))
        frames.append(sys._getframe())
        raise torch.OutOfMemoryError

    add = FunctionType(add.__code__, {**add.__globals__, "__name__": "autoaccum.window.x"}, closure=add.__closure__)
    job_of = job(Net())
    with witnessed(lambda error: held(job_of, Full(), error) and None):
        attempt(add)
    assert len(frames) == 1
    assert batches[0]() is None


def test_a_tensor_of_the_users_own_class_hears_nothing() -> None:
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{function} was called")

    loud = torch.zeros(2000).as_subclass(Loud)
    found = seen(Net())["largest_tensors"]
    assert any(one["shape"] == [2000] for one in found)
    assert type(loud) is Loud


def test_what_has_no_storage_is_left_out() -> None:
    sparse = torch.zeros(3000).to_sparse()
    meta = torch.zeros(4000, device="meta")
    shapes = [one["shape"] for one in seen(Net())["largest_tensors"]]
    assert list(sparse.shape) not in shapes
    assert list(meta.shape) not in shapes


def test_a_cpu_has_no_allocator_that_counts() -> None:
    assert holding._statistics(torch.device("cpu")) == {}
