"""Experts balanced over the window: against the model's own loss on the whole of it, and on routers by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.errors import ArgumentError
from autoaccum.events import Notice, Verified
from tests.models import relative_error

WINDOW = 8
EXPERTS = 4


def texts() -> dict[str, torch.Tensor]:
    """Texts of several lengths, padded at their end; of one no token counts."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 50, (WINDOW, 9), generator=generator)
    lengths = torch.randint(4, 10, (WINDOW, 1), generator=generator)
    mask = (torch.arange(9) < lengths).long()
    labels = tokens.masked_fill(mask == 0, -100)
    labels[3] = -100
    labels[:, :2] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def mixtral() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.5,
        max_position_embeddings=32,
        experts_implementation="eager",  # the other ones know no float64
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate.weight" in name:
                parameter *= 30  # so that tokens are routed apart
    return model


class Mixture(nn.Module):
    """A layer of experts between two others, whose router is a plain linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.gate = nn.Linear(16, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(EXPERTS))
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens).flatten(0, 1)
        weights, chosen = self.gate(hidden).softmax(dim=-1).topk(2, dim=-1)
        outputs = torch.stack([expert(hidden) for expert in self.experts], dim=1)
        mixed = (outputs.gather(1, chosen[..., None].expand(-1, -1, 16)) * weights[..., None]).sum(dim=1)
        return self.head(mixed).view(*tokens.shape, -1)


def mixture() -> Any:
    torch.manual_seed(0)
    model = Mixture().double()
    with torch.no_grad():
        model.gate.weight *= 10
    return model


def task(model: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch["input_ids"])[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def whole_loss(model: Any, batch: Any) -> torch.Tensor:
    """By the paper's formula, on the whole window."""
    logits = model.gate(model.embed(batch["input_ids"]).flatten(0, 1))
    probabilities = logits.softmax(dim=-1)
    chosen = nn.functional.one_hot(probabilities.topk(2, dim=-1).indices, EXPERTS).sum(dim=1).double()
    return task(model, batch) + 0.3 * EXPERTS * (chosen.mean(dim=0) * probabilities.mean(dim=0)).sum()


def gradient_of(model: Any, **arguments: Any) -> tuple[torch.Tensor, list[Any]]:
    """The gradient of one window, and what was announced of it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accumulator = autoaccum.Accumulator(model, optimizer, **arguments)
    accumulator.step(texts())
    events = [event for event in accumulator.events if isinstance(event, Notice | Verified)]
    return torch.cat([p.grad.flatten() for p in model.parameters()]), events


def gradient_of_whole(model: Any, loss_of: Callable[[Any, Any], torch.Tensor]) -> torch.Tensor:
    loss_of(model, texts()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def own_loss(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch, output_router_logits=True).loss
    return loss


class TestMixtral:
    """The loss of Hugging Face's own model on the whole window, attention mask and ignored labels included."""

    # Its own loss is computed in float32, whatever the parameters are: a share of 3 / 8 is rounded there.
    @pytest.mark.parametrize(("micro_batch", "bound"), [(1, 1e-10), (2, 1e-10), (4, 1e-10), (3, 1e-6)])
    def test_the_gradient_is_that_of_the_whole_window(self, micro_batch: int, bound: float) -> None:
        model = mixtral()
        arguments = autoaccum.moe_balancing(model)
        found, events = gradient_of(model, micro_batch=micro_batch, **arguments)
        # It computes the probabilities that it balances in float32; here they are kept in float64.
        assert relative_error(found, gradient_of_whole(mixtral(), own_loss)) < 1e-6
        assert relative_error(found, gradient_of(mixtral(), micro_batch=WINDOW, **arguments)[0]) < bound
        assert {type(event) for event in events} == {Verified}

    def test_without_it_the_error_is_measured_and_announced(self) -> None:
        with pytest.warns(autoaccum.AutoaccumWarning, match="off the whole window's, measured on 6 samples"):
            found, _ = gradient_of(mixtral(), micro_batch=2, training_step=own_loss)
        assert relative_error(found, gradient_of_whole(mixtral(), own_loss)) > 0.01


class TestRouters:
    """Routers that are listened to, in any model."""

    @pytest.mark.parametrize("micro_batch", [1, 3, 5])
    @pytest.mark.parametrize("routers", ["gate", "ga*", ["gate"]])
    def test_the_gradient_is_that_of_the_whole_window(self, routers: Any, micro_batch: int) -> None:
        model = mixture()
        arguments = autoaccum.moe_balancing(
            model, routers=routers, training_step=task, top_k=2, coefficient=0.3, mask=lambda batch: None
        )
        found, events = gradient_of(model, micro_batch=micro_batch, **arguments)
        assert relative_error(found, gradient_of_whole(mixture(), whole_loss)) < 1e-12
        assert {type(event) for event in events} == {Verified}
        assert not model.gate._forward_hooks

    def test_tokens_that_do_not_count(self) -> None:
        def masked(model: Any, batch: Any) -> torch.Tensor:
            return task(model, batch)

        model, seen = mixture(), {}
        arguments = autoaccum.moe_balancing(model, routers="gate", training_step=masked, top_k=1, coefficient=1.0)
        shared = arguments["before_window"](None, lambda function: seen.setdefault("it", function(model, texts())))
        logits = model.gate(model.embed(texts()["input_ids"])).flatten(0, 1)[texts()["attention_mask"].flatten() == 1]
        counts = torch.bincount(logits.argmax(dim=1), minlength=EXPERTS).double()
        assert seen["it"]["rows"].tolist() == [texts()["attention_mask"].sum().item()]
        assert seen["it"]["assigned"].tolist() == [counts.tolist()]
        losses = arguments["training_step"](model, texts(), shared)
        expected = EXPERTS * (counts / counts.sum() * logits.softmax(dim=1).mean(dim=0)).sum()
        assert losses["load_balance"].item() == pytest.approx(expected.item(), rel=1e-12)
        assert losses["task"].item() == task(model, texts()).item()

    def test_losses_of_several_terms_and_what_stands_beside_them(self) -> None:
        model = mixture()
        arguments = autoaccum.moe_balancing(
            model,
            routers="gate",
            training_step=lambda model, batch: ({"a": task(model, batch)}, {"seen": 1}),
            top_k=2,
            coefficient=0.3,
        )
        shared = arguments["before_window"](None, lambda function: function(model, texts()))
        losses, outputs = arguments["training_step"](model, texts(), shared)
        assert list(losses) == ["a", "load_balance"]
        assert outputs == {"seen": 1}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "top_k=None: expected a number. The model's configuration has none"),
        ({"top_k": 2}, "coefficient=None: expected a number"),
        ({"top_k": 2, "coefficient": 0.1}, "model='Mixture': expected a Hugging Face model"),
        ({"top_k": 0, "coefficient": 0.1, "routers": "gate"}, "top_k=0"),
        ({"top_k": 2, "coefficient": -1.0, "routers": "gate"}, "coefficient=-1.0"),
        ({"top_k": 2, "coefficient": 0.1, "routers": "router"}, "routers='router'.*Its modules are embed, gate"),
        ({"training_step": task}, "training_step=.*routers= beside it"),
        ({"mask": 3}, "mask=3"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{text}"):
        autoaccum.moe_balancing(mixture(), **arguments)


def test_no_model_is_refused() -> None:
    with pytest.raises(ArgumentError, match="^model=3"):
        autoaccum.moe_balancing(3)  # type: ignore[arg-type]


def test_routers_that_are_not_called_are_refused() -> None:
    model = mixture()
    model.unused = nn.Linear(1, 1)
    arguments = autoaccum.moe_balancing(model, routers="unused", training_step=task, top_k=2, coefficient=0.1)
    with pytest.raises(ArgumentError, match="^routers="):
        gradient_of(model, **arguments)
