"""The laws where one sample does not fit: models of four kinds, in three kinds of memory, beside whatever else a run does."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import autoaccum
from autoaccum.distributed.group import join
from autoaccum.errors import ArgumentError, NothingFitsError
from autoaccum.events import MemorySaving, Recomputed, Validated
from autoaccum.testing import simulated_memory
from tests.devices import DEVICE, there
from tests.distributed.launching import launch
from tests.models import same, state_of
from tests.processes import in_turn
from tests.step.test_memory_saving import UNLIMITED, Stack, data, fit, of, sgd

ROOT = Path(__file__).parents[2]
WORDS = 64


class Task(NamedTuple):
    """A model, a window of it, and how its loss is computed."""

    model: nn.Module
    window: Any
    training_step: Callable[[Any, Any], torch.Tensor]


class GPT(nn.Module):
    def __init__(self, length: int, depth: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 64), nn.Parameter(torch.zeros(length, 64))
        layer = nn.TransformerEncoderLayer(64, 2, 256, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(64, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.head(self.layers(self.words(ids) + self.places, mask, is_causal=True))  # type: ignore[no-any-return]


def gpt(samples: int, size: int) -> Task:
    ids = torch.randint(0, WORDS, (samples, 64 * size + 1))

    def step(model: Any, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return Task(GPT(64 * size, 6), ids, step)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(inplace=True), nn.Dropout2d(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)  # type: ignore[no-any-return]


def conv_net(samples: int, size: int) -> Task:
    blocks = [Residual() for _ in range(6)]
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)
    )
    window = torch.randn(samples, 3, 20 * size, 20 * size), torch.randint(0, 3, (samples,))
    return Task(model, window, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))


SIZES = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2}
# Eager attention holds its scores, so that a long text is what takes the memory.
SIZES |= {"intermediate_size": 128, "attn_implementation": "eager"}


def llama(samples: int, size: int) -> Task:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=64 * size)
    ids = torch.randint(0, WORDS, (samples, 64 * size))
    window = {"input_ids": ids, "labels": ids.clone()}
    return Task(transformers.LlamaForCausalLM(config), window, lambda model, batch: model(**batch).loss)


def sentence_encoder(samples: int, size: int) -> Task:
    transformers = pytest.importorskip("transformers")
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.modules import Pooling

    class Words(nn.Module):
        """Makes vectors of words, as its namesake of the library does of texts."""

        def __init__(self) -> None:
            super().__init__()
            self.bert = transformers.BertModel(transformers.BertConfig(**SIZES, max_position_embeddings=64 * size))

        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            found = self.bert(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
            return {**features, "token_embeddings": found.last_hidden_state}

    model = library.SentenceTransformer(modules=[Words(), Pooling(64)], device="cpu")
    ids = torch.randint(0, WORDS, (samples, 2, 64 * size))
    mask = torch.arange(64 * size) < torch.randint(32 * size, 64 * size, (samples, 2, 1))

    def step(model: Any, batch: Any) -> torch.Tensor:
        ids, mask, wanted = batch
        both = [
            model({"input_ids": ids[:, side], "attention_mask": mask[:, side].long()})["sentence_embedding"]
            for side in (0, 1)
        ]
        return F.mse_loss(F.cosine_similarity(*both), wanted)

    return Task(model, (ids, mask, torch.rand(samples)), step)


MODELS = {"GPT": gpt, "conv net": conv_net, "Hugging Face LM": llama, "sentence encoder": sentence_encoder}


class Trained(NamedTuple):
    """What came of a training."""

    bits: list[torch.Tensor]
    """Losses, parameters, buffers, and what the next number would be drawn from."""
    events: list[Any]


def train(name: str, size: int, windows: int = 3, samples: int = 2, **options: Any) -> Trained:
    """Train for some windows, which are cut into single samples."""
    torch.manual_seed(0)
    task = MODELS[name](samples, size)
    model, window = there(task.model).train(), there(task.window)
    given: dict[str, Any] = {"micro_batch": 1, "verify": False, "patience": 0, **options}
    made = autoaccum.Accumulator(model, sgd(model.parameters()), training_step=task.training_step, **given)
    losses = [torch.as_tensor(made.step(window)) for _ in range(windows)]
    # Copies in host memory: a device has as much left for the next run.
    bits = [t.detach().to("cpu", copy=True) for t in (*losses, *model.parameters(), *model.buffers())]
    return Trained([*bits, torch.get_rng_state()], list(made.events))


def check(found: Trained, wanted: Trained) -> None:
    assert same(found.bits, wanted.bits)
    changes = [event for event in found.events if isinstance(event, MemorySaving)]
    assert changes
    assert changes[-1].blocks >= 3
    assert not [event for event in wanted.events if isinstance(event, MemorySaving)]


@pytest.mark.parametrize("name", MODELS)
def test_in_a_simulated_memory(name: str) -> None:
    def run(limit: int, **options: Any) -> tuple[Trained, int]:
        with simulated_memory(limit) as device:
            return train(name, 1, **options), device.peak

    plain, most = run(UNLIMITED, memory_saving="off")
    asked, least = run(UNLIMITED, memory_saving="checkpoint")
    limit = (most + least) // 2
    with pytest.raises(NothingFitsError):
        run(limit, memory_saving="off")
    found, peak = run(limit)
    assert least <= peak <= limit < most
    check(found, plain)
    check(asked, plain)
    assert any(isinstance(event, Recomputed) for event in found.events)


LARGE = 12
"""The size at which a sample takes so much that what an allocator keeps besides makes no difference."""

CHILD = """
import re, resource, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from autoaccum.errors import NothingFitsError
from tests.laws.test_laws_memory_saving import LARGE, check, train

name, most, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
train(name, 1), train(name, 1, memory_saving="checkpoint")  # imports what is lazy
data = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def fits(extra):
    resource.setrlimit(resource.RLIMIT_DATA, (data + extra, resource.RLIM_INFINITY))
    try:
        train(name, LARGE, windows=1, memory_saving="off")
    except NothingFitsError:
        return False
    return True

# What an allocator takes besides tensors differs from machine to machine: the limit is the first that is too low.
# And somewhat below that, for at the very edge a second run may find what the first one lacked.
low, extra = 0, 2 * most
while extra - low > step:
    middle = (low + extra) // 2
    low, extra = (low, middle) if fits(middle) else (middle, extra)
extra = low - step // 2
print("fits" if fits(extra) else "does not fit")
found = train(name, LARGE, windows=2)
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
check(found, train(name, LARGE, windows=2, memory_saving="off"))
print("the same bits")
"""


def needed(name: str, size: int, **options: Any) -> int:
    """Return the bytes that a window takes."""
    with simulated_memory(UNLIMITED) as device:
        train(name, size, windows=1, samples=1, **options)
    return device.peak


@in_turn
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and RLIMIT_DATA")
@pytest.mark.parametrize("name", ["conv net", pytest.param("GPT", marks=pytest.mark.slow)])
def test_below_an_allocator_that_really_fails(name: str) -> None:
    least, most = needed(name, LARGE, memory_saving="checkpoint"), needed(name, LARGE, memory_saving="off")
    assert most - least > 30 * 2**20, "else the limit means little"
    child = subprocess.run(
        [sys.executable, "-c", CHILD, name, str(most), str((most - least) // 8)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"},  # what is freed is given back, and not kept for later
    )
    assert child.stdout.splitlines() == ["does not fit", "the same bits"], child.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_on_a_device_that_refuses(name: str) -> None:
    def reserved(**options: Any) -> tuple[Trained, int]:
        gc.collect()  # runs refer to themselves: what is left of the last one is none of the next one's
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        found = train(name, LARGE // 2, windows=2, **options)
        return found, torch.accelerator.max_memory_reserved()

    assert DEVICE != "cpu"
    plain, most = reserved(memory_saving="off")
    asked, least = reserved(memory_saving="checkpoint")
    # Convolutions on a GPU make do with less where there is less: what is too little is found out.
    for parts in (2, 4, 8):
        limit = least + (most - least) // parts
        try:
            reserved(memory_saving="off", memory_limit=limit)
        except NothingFitsError:
            break
    else:
        assert DEVICE.startswith("cuda")
        assert name == "conv net"
        pytest.skip("cuDNN has an algorithm for whatever memory there is")
    found, peak = reserved(memory_limit=limit)
    assert peak <= limit
    check(found, plain)
    check(asked, plain)


@pytest.mark.weighted
@pytest.mark.filterwarnings("ignore:Forwards write to blocks")
class TestBeside:
    """Whatever else a run does is done to the same bits."""

    @pytest.mark.parametrize(
        "options",
        [
            {"precision": "bf16"},
            {"clip_norm": 0.1},
            {"noise_scale": True},
            {"validation_data": data(3), "validate_every": 2},
            {"micro_batch": 3},
            {"effective_batch": 8, "micro_batch": [(3, 1, 4)] * 4},
            {"optimizer": lambda params: torch.optim.AdamW(params, lr=0.01)},
            pytest.param({"verify": True}, marks=pytest.mark.measured),
        ],
        ids=lambda options: next(iter(options)),
    )
    @pytest.mark.filterwarnings("ignore:What forwards write to state depends on their samples")
    def test_of_a_run(self, options: dict[str, Any]) -> None:
        plain, _ = fit(UNLIMITED, memory_saving="off", **options)
        found, _ = fit(UNLIMITED, memory_saving="checkpoint", **options)
        assert same(state_of(found), state_of(plain))
        (told,) = of(found, MemorySaving)
        assert told.blocks == 6
        assert of(found, Recomputed)
        assert [event.loss for event in of(found, Validated)] == [event.loss for event in of(plain, Validated)]
        assert [report.grad_norm for report in found.history] == [report.grad_norm for report in plain.history]

    def test_of_an_optimizer_that_asks_for_gradients_itself(self) -> None:
        def run(memory_saving: Any) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model, batch = Stack(depth=2), data(3)
            optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
            made = autoaccum.Accumulator(
                model, optimizer, loss_fn=F.mse_loss, micro_batch=1, memory_saving=memory_saving
            )
            losses = [torch.as_tensor(made.step(batch)) for _ in range(3)]
            return [*losses, *(p.detach() for p in model.parameters()), *model.buffers(), torch.get_rng_state()]

        assert same(run("checkpoint"), run("off"))

    def test_of_a_step_that_evaluates_in_its_midst(self) -> None:
        def step(model: Any, batch: Any) -> torch.Tensor:
            model.eval()
            with torch.no_grad():
                wanted = model(batch[0])
            model.train()
            return F.mse_loss(model(batch[0]), batch[1] + 0.1 * wanted)

        options: dict[str, Any] = {"loss_fn": None, "training_step": step}
        plain, _ = fit(UNLIMITED, memory_saving="off", **options)
        found, _ = fit(UNLIMITED, memory_saving="checkpoint", **options)
        assert same(state_of(found), state_of(plain))
        assert of(found, Recomputed)

    @pytest.mark.filterwarnings("ignore:How the loss averages")
    def test_of_a_penalty_on_gradients(self) -> None:
        def step(model: Any, batch: Any) -> torch.Tensor:
            inputs = batch[0].requires_grad_()
            loss = F.mse_loss(model(inputs), batch[1])
            (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
            return loss + slope.square().sum()

        options: dict[str, Any] = {"loss_fn": None, "training_step": step, "verify": False, "steps": 3}
        plain, _ = fit(UNLIMITED, memory_saving="off", **options)
        found, _ = fit(UNLIMITED, memory_saving="checkpoint", **options)
        assert same(state_of(found), state_of(plain))
        assert len(of(found, MemorySaving)) == 1


def asked_for_by_a_rank() -> str:
    torch.manual_seed(0)
    model = Stack(depth=2)
    join(torch.device("cpu"))
    fully_shard(model)
    try:
        autoaccum.fit(
            model, data(), effective_batch=4, micro_batch=1, steps=1, loss_fn=F.mse_loss, optimizer=sgd,
            device="cpu", progress=False, cache=False, memory_saving="checkpoint",
        )  # fmt: skip
    except ArgumentError as error:
        return str(error)
    return "not refused"


class TestRefusals:
    def test_beside_a_model_that_is_sharded(self) -> None:
        for told in launch(asked_for_by_a_rank, 2):
            assert "a forward of a sharded model that is computed again would have to be on all ranks at once" in told
