"""Law 1 on real models: Hugging Face's from a config, mixed precision, and clipping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.events import Notice, StepSkipped
from tests.devices import DEVICE, there
from tests.models import classes, mlp, relative_error, same

TINY: dict[str, Any] = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def causal_lm(**options: Any) -> nn.Module:
    """Labels are shifted inside; its forward takes ``num_items_in_batch``."""
    config = transformers.GPT2Config(
        **TINY, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **options
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        **TINY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


def masked_lm() -> nn.Module:
    """Its forward takes any keyword, and ignores ``num_items_in_batch``."""
    config = transformers.BertConfig(
        **TINY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    return transformers.BertForMaskedLM(config)


class OwnLM(nn.Module):
    """Takes no keyword but its own, and shifts its labels too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.head = nn.Linear(16, 40)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(input_ids))
        return {"loss": cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def tokens(num_samples: int) -> dict[str, torch.Tensor]:
    """(num_samples, 12) ids, of which the labels are ignored at ever other places; the first one's is never used."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 40, (num_samples, 12), generator=generator)
    labels = ids.clone()
    for row in range(num_samples):
        labels[row, 1 + (5 * row) % 11 :] = -100
    return {"input_ids": ids, "labels": labels}


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.device(every=5)
@pytest.mark.parametrize("make", [causal_lm, llama, masked_lm, OwnLM])
@pytest.mark.parametrize("micro_batch", [1, 4, 13])
def test_hugging_face_models(make: Any, micro_batch: int) -> None:
    data = tokens(13)
    torch.manual_seed(0)
    big, model = make(), make()
    model.load_state_dict(big.state_dict())
    expected = there(big)(**there(data))["loss"]
    expected.backward()
    result = autoaccum.fit(
        model,
        data,
        effective_batch=13,
        micro_batch=micro_batch,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
        shuffle=False,
        device=DEVICE,
        progress=False,
    )
    assert result.history[0].loss == pytest.approx(expected.item(), rel=1e-6)
    assert relative_error(gradient(model), gradient(big)) < 1e-5
    assert not any(isinstance(event, Notice) for event in result.events)


@pytest.mark.weighted
@pytest.mark.device
def test_a_model_that_is_compiled_with_its_loss_asks_for_num_items() -> None:
    """Nothing can be read off a compiled graph; it is said, not guessed."""

    class Compiled(torch.autograd.Function):
        """What a compiled model's graph looks like: one operation."""

        @staticmethod
        def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    def step(model: Any, batch: Any) -> torch.Tensor:
        return Compiled.apply(model(**batch)["loss"])  # type: ignore[no-untyped-call,no-any-return]

    options: dict[str, Any] = {"effective_batch": 13, "micro_batch": 4, "device": DEVICE, "progress": False}
    with pytest.warns(autoaccum.AutoaccumWarning, match="Pass num_items="):
        autoaccum.fit(OwnLM(), tokens(13), training_step=step, **options)
    data = tokens(13)
    torch.manual_seed(0)
    big, model = OwnLM(), OwnLM()
    model.load_state_dict(big.state_dict())
    there(big)(**there(data))["loss"].backward()
    autoaccum.fit(
        model,
        data,
        training_step=step,
        num_items=lambda batch: (batch["labels"][:, 1:] != -100).sum(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
        shuffle=False,
        **options,
    )
    assert relative_error(gradient(model), gradient(big)) < 1e-5


@pytest.mark.device
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_as_near_as_its_rounding(precision: Any) -> None:
    data = classes(26)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    big, model = there(mlp()), mlp()
    with torch.autocast(torch.device(DEVICE).type, dtype=dtype):
        loss = cross_entropy(big(there(data[0])), there(data[1]))
    loss.backward()
    autoaccum.fit(
        model,
        data,
        effective_batch=26,
        micro_batch=4,
        loss_fn=cross_entropy,
        precision=precision,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
        shuffle=False,
        device=DEVICE,
        progress=False,
    )
    assert relative_error(gradient(model), gradient(big)) < (1e-2 if precision == "bf16" else 2e-3)


@pytest.mark.device
def test_an_overflow_in_one_micro_batch_skips_the_whole_window_once() -> None:
    """As it would the big batch: no half of a gradient is stepped on, and the scale is halved once."""
    inputs, targets = classes(12)
    inputs[9] = 1e4  # overflows float16 in the backward, and only in the third micro-batch
    states: list[tuple[int, list[torch.Tensor]]] = []
    model = mlp()

    def remember(record: Any) -> None:
        if isinstance(record, autoaccum.StepReport):
            states.append((record.step, [p.detach().clone() for p in model.parameters()]))

    before = [p.detach().clone() for p in model.parameters()]
    result = autoaccum.fit(
        model,
        (inputs, targets),
        effective_batch=12,
        micro_batch=4,
        training_step=lambda m, b: (m(b[0]).float().square().mean(1) * b[0].abs().amax(1)).mean(),
        precision="fp16",
        steps=3,
        shuffle=False,
        callbacks=[remember],
        device=DEVICE,
        progress=False,
    )
    skipped = [event for event in result.events if isinstance(event, StepSkipped)]
    scales = [float(event.reason.split()[-1]) for event in skipped]
    assert scales == [65536.0 / 2**n for n in range(len(skipped))]
    assert len(skipped) >= 1
    assert same(states[0][1], before)
    assert result.num_steps == 3
