"""The key of past runs: the same for what costs the same, in every process, and another for what does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.lr_scheduler import OneCycleLR

from autoaccum.runs import past_of_run
from autoaccum.runs.past_of_run import describe
from autoaccum.testing import simulated_memory

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


class Block(nn.Module):
    """With what models keep in attributes: a switch, a config."""

    def __init__(
        self,
        *,
        checkpointing: bool = False,
        attention: str = "sdpa",
        rate: float = 0.1,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gradient_checkpointing = checkpointing
        self.config = SimpleNamespace(attention=attention, rate=rate, layers={*"abcdefgh"}, me=self)


def net(width: int = 8, activation: type[nn.Module] = nn.ReLU, p: float = 0.1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), activation(), nn.Dropout(p), nn.BatchNorm1d(width), Block())


class Others(torch.optim.AdamW):
    """Not PyTorch's."""


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **options)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **options)


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(*shape, dtype=dtype), torch.zeros(shape[0], dtype=torch.int64)


def key_of(
    model: nn.Module | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    *,
    loss: Any = cross_entropy,
    **changes: Any,
) -> str:
    model = net() if model is None else model
    modules = [model, loss] if isinstance(loss, nn.Module) else [model]
    facts = {"precision": "fp32", "batch": rows(3, 4), "device": CPU, "compiled": False, "functions": (loss, None)}
    return past_of_run.key_of(modules, optimizer(model), **{**facts, **changes})


def changed(model: nn.Module, change: Callable[[Any], Any]) -> nn.Module:
    change(model)
    return model


SAME = {
    "nothing": key_of,
    "seed and weights": lambda: key_of(changed(net(), lambda m: nn.init.ones_(m[0].weight))),
    "lr": lambda: key_of(optimizer=partial(adamw, lr=0.3)),
    "size of a rate": lambda: key_of(net(), optimizer=partial(adamw, weight_decay=0.5)),
    "rate in a config": lambda: key_of(nn.Sequential(*list(net())[:-1], Block(rate=0.2))),
    "number of samples": lambda: key_of(batch=rows(17, 4)),
    "hooks": lambda: key_of(changed(net(), lambda m: m.register_forward_hook(lambda *_: None))),
    "code of the loss": lambda: key_of(loss=partial(cross_entropy, label_smoothing=0.1)),
    "scheduler": lambda: key_of(optimizer=with_schedule),
}


def with_schedule(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    OneCycleLR(optimizer, max_lr=0.1, total_steps=10, cycle_momentum=False)
    return optimizer


DIFFERENT: dict[str, Callable[[], str]] = {
    "width": lambda: key_of(net(width=9)),
    "activation": lambda: key_of(net(activation=nn.GELU)),
    "one layer more": lambda: key_of(net().append(nn.Identity())),
    "what a layer says of itself": lambda: key_of(net(p=0.2)),
    "no rate": lambda: key_of(net(p=0.0)),
    "dtype": lambda: key_of(net().double()),
    "frozen": lambda: key_of(changed(net(), lambda m: m[0].requires_grad_(False))),
    "mode": lambda: key_of(changed(net(), lambda m: m[3].eval())),
    "buffer": lambda: key_of(changed(net(), lambda m: m.register_buffer("mask", torch.zeros(3)))),
    "checkpointing": lambda: key_of(nn.Sequential(*list(net())[:-1], Block(checkpointing=True))),
    "switch in a config": lambda: key_of(nn.Sequential(*list(net())[:-1], Block(attention="eager"))),
    "no rate in a config": lambda: key_of(nn.Sequential(*list(net())[:-1], Block(rate=0.0))),
    "optimizer": lambda: key_of(optimizer=lambda m: torch.optim.Adagrad(m.parameters())),
    "optimizer with the same options": lambda: key_of(optimizer=lambda m: Others(m.parameters())),
    "foreach": lambda: key_of(optimizer=partial(adamw, foreach=True)),
    "fused": lambda: key_of(optimizer=partial(adamw, fused=True)),
    "amsgrad": lambda: key_of(optimizer=partial(adamw, amsgrad=True)),
    "sgd": lambda: key_of(optimizer=sgd),
    "sgd with momentum": lambda: key_of(optimizer=partial(sgd, momentum=0.9)),
    "optimizer of a part": lambda: key_of(optimizer=lambda m: torch.optim.AdamW(list(m.parameters())[:2])),
    "precision": lambda: key_of(precision="bf16"),
    "compiled": lambda: key_of(compiled=True),
    "length": lambda: key_of(batch=rows(3, 5)),
    "dimensions": lambda: key_of(batch=rows(3, 4, 1)),
    "dtype of inputs": lambda: key_of(batch=rows(3, 4, dtype=torch.float64)),
    "structure": lambda: key_of(batch=dict(zip("ab", rows(3, 4), strict=True))),
    "names": lambda: key_of(batch=dict(zip("xy", rows(3, 4), strict=True))),
    "one input more": lambda: key_of(batch=(*rows(3, 4), ["a", "b", "c"])),
    "arrays": lambda: key_of(batch=(np.zeros((3, 4), np.float32), rows(3, 4)[1])),
    "loss": lambda: key_of(loss=mse_loss),
    "loss module": lambda: key_of(loss=nn.CrossEntropyLoss()),
    "training step": lambda: key_of(functions=(None, cross_entropy)),
}


@pytest.mark.parametrize("name", SAME)
def test_what_changes_no_cost_changes_no_key(name: str) -> None:
    torch.manual_seed(list(SAME).index(name))
    assert SAME[name]() == key_of()


def test_what_may_change_the_cost_changes_the_key() -> None:
    keys = {name: make() for name, make in DIFFERENT.items()} | {"nothing": key_of()}
    names: dict[str, list[str]] = {}
    for name, found in keys.items():
        names.setdefault(found, []).append(name)
    assert [same for same in names.values() if len(same) > 1] == []


def test_a_key_is_32_hexadecimal_digits() -> None:
    assert len(key_of()) == 32
    assert int(key_of(), 16) > 0


def test_no_address_counts() -> None:
    class Addressed(nn.Linear):
        def extra_repr(self) -> str:
            return object.__repr__(self)

    models = [nn.Sequential(Addressed(2, 2)) for _ in range(2)]
    assert models[0][0].extra_repr() != models[1][0].extra_repr()
    assert key_of(models[0]) == key_of(models[1])


def test_zero_is_no_rate_as_an_int_and_as_a_float() -> None:
    assert key_of(optimizer=partial(sgd, momentum=0)) == key_of(optimizer=partial(sgd, momentum=0.0))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_the_cpu_is_known_by_its_threads() -> None:
    before = key_of()
    torch.set_num_threads(torch.get_num_threads() + 1)
    assert key_of() != before


def test_an_accelerator_is_known_by_its_name_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)

    def key_with(name: str, total_memory: int) -> str:
        properties = SimpleNamespace(name=name, total_memory=total_memory)
        monkeypatch.setattr(
            torch, "get_device_module", lambda _: SimpleNamespace(get_device_properties=lambda _: properties)
        )
        return key_of(device=device)

    first = key_with("A", 2**34)
    assert describe(device) == "cuda A"
    assert first == key_with("A", 2**34)
    assert len({first, key_with("B", 2**34), key_with("A", 2**35), key_of()}) == 4


def test_torchs_version_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert key_of() != before


def test_bytes_of_a_simulated_device_are_not_taken_for_those_of_the_host() -> None:
    before = key_of()
    with simulated_memory("1GiB"):
        simulated = key_of()
    with simulated_memory("2GiB"):
        assert key_of() == simulated, "the limit does not count"
    assert simulated != before


def test_it_is_the_same_in_other_processes() -> None:
    """Where texts have other hashes, and objects other addresses."""
    script = (
        "from tests.runs.test_past_of_run_key import key_of; import torch; torch.set_num_threads(1); print(key_of())"
    )
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    child = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert child.stdout.strip() == key_of()


def test_a_hugging_face_models_attention_counts() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    def gpt2(attention: str, num_heads: int = 2) -> GPT2LMHeadModel:
        sizes = {"n_layer": 2, "n_embd": 8, "n_head": num_heads, "vocab_size": 11, "n_positions": 16}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(**sizes, **ends, attn_implementation=attention))

    checkpointed = gpt2("sdpa")
    for layer in checkpointed.modules():  # as its method of that name does
        if hasattr(layer, "gradient_checkpointing"):
            layer.gradient_checkpointing = True
    assert any(vars(layer).get("gradient_checkpointing") for layer in checkpointed.modules())
    assert key_of(gpt2("sdpa")) == key_of(gpt2("sdpa"))
    assert len({key_of(m) for m in (gpt2("sdpa"), gpt2("eager"), gpt2("sdpa", 4), checkpointed)}) == 4
