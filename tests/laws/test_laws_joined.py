"""Laws 1, 2, 3 and 7 where micro-batches are joined: the step runs once, on the full batch, whatever it computes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autoaccum
from autoaccum.events import Joined, Notice, Replanned, Validated
from autoaccum.step import verification
from autoaccum.testing import oom_at, simulated_memory
from tests.faults import Operations, strides

pytestmark = pytest.mark.measured

SAMPLES = 8
Step = Callable[[Any, Any], torch.Tensor]


class Recorder(torch.optim.SGD):
    """Keeps the gradient that it steps on."""

    gradients: list[torch.Tensor | None]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.gradients = [None if p.grad is None else p.grad.to_dense().clone() for p in parameters]
        super().step()


def body(width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, width), nn.GELU(), nn.Linear(width, 4))


def data() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(SAMPLES, 5), "y": torch.randint(0, 4, (SAMPLES,)), "w": torch.rand(SAMPLES)}


def contrast(outputs: torch.Tensor) -> torch.Tensor:
    """Compare every sample with every other one, so that no weights of micro-batches are right."""
    return (outputs @ outputs.T / 4).logsumexp(1).square().mean()


SCENARIOS: dict[str, Callable[[], tuple[nn.Module, Step]]] = {}


def scenario(function: Callable[[], tuple[nn.Module, Step]]) -> Callable[[], tuple[nn.Module, Step]]:
    SCENARIOS[function.__name__] = function
    return function


@scenario
def contrastive() -> tuple[nn.Module, Step]:
    return body(), lambda model, batch: contrast(model(batch["x"]))


@scenario
def twice_with_both_halves_in_one_call() -> tuple[nn.Module, Step]:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        first, second = model(torch.cat([batch["x"], batch["x"].flip(1)])).chunk(2)
        return contrast(first) + (first - second).std(0).sum() + model(batch["x"] * 2).mean().exp()

    return body(), step


@scenario
def a_mode_that_changes_after_the_call() -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        model.eval()
        outputs = model(batch["x"])
        model.train()
        return contrast(outputs)

    return model, step


class Features(nn.Module):
    """Returns what it is given beside what it computes, as encoders of sentences do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = body()

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return features | {"embedding": self.inner(features["x"])}


@scenario
def inputs_that_are_returned() -> tuple[nn.Module, Step]:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        scale = torch.ones(1, requires_grad=True)
        found = model({"x": batch["x"] * scale, "y": batch["y"]})
        return contrast(found["embedding"]) + F.cross_entropy(found["embedding"], found["y"]) + found["x"].std()

    return Features(), step


class Adversary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = body(), nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


@scenario
def flags_that_change_after_the_call() -> tuple[nn.Module, Step]:
    def step(model: Any, batch: Any) -> torch.Tensor:
        made = model.generator(batch["x"])
        model.critic.requires_grad_(False)
        fooled = model.critic(made).sigmoid().log().mean().square()
        model.critic.requires_grad_(True)
        told = model.critic(made.detach()).square().sum().sqrt()
        return fooled + told

    return Adversary(), step


@scenario
def weights_that_are_swapped() -> tuple[nn.Module, Step]:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        doubled = {name: 2 * p for name, p in model.named_parameters()}
        return contrast(functional_call(model, doubled, (batch["x"],))) + contrast(model(batch["x"]))

    return body(), step


@scenario
def autocast_in_the_step() -> tuple[nn.Module, Step]:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float64, enabled=False):
            outputs = model(batch["x"])
        return contrast(outputs)

    return body(), step


@scenario
def a_frozen_teacher() -> tuple[nn.Module, Step]:
    teacher = body().requires_grad_(False)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(batch["x"])
        outputs = model(batch["x"])
        return (outputs.std(0) - wanted.std(0)).square().sum() + contrast(outputs)

    return body(), step


@scenario
def a_gradient_penalty() -> tuple[nn.Module, Step]:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch["x"].clone().requires_grad_()
        outputs = model(x)
        (slope,) = torch.autograd.grad(outputs.square().sum(), x, create_graph=True)
        return contrast(outputs) + (slope.norm(dim=1) - 1).square().mean().sqrt()

    return body(), step


@scenario
def hooks_on_parameters() -> tuple[nn.Module, Step]:
    model = body()
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return model, lambda model, batch: contrast(model(batch["x"]))


class Auxiliary(nn.Module):
    """Leaves a loss of its own behind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = body(), nn.Linear(5, 4)
        self.loss: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.gate(x).softmax(1)
        self.loss = shares.mean(0).square().sum()
        return self.inner(x) * shares


@scenario
def a_loss_left_on_a_module() -> tuple[nn.Module, Step]:
    return Auxiliary(), lambda model, batch: contrast(model(batch["x"])) + model.loss


@scenario
def outputs_that_a_hook_records() -> tuple[nn.Module, Step]:
    model = body()
    seen: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.clear()
        outputs = model(batch["x"])
        return contrast(outputs) + seen[0].mean(0).square().sum()

    return model, step


@scenario
def statistics_of_the_batch() -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 4))
    return model, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"])


class Counting(nn.Module):
    """Changes with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = body()
        self.register_buffer("calls", torch.zeros(()))
        self.times = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.times += 1
        return self.inner(x) * (1 + self.calls) / (1 + self.times**2)


@scenario
def state_that_each_call_moves() -> tuple[nn.Module, Step]:
    return Counting(), lambda model, batch: contrast(model(batch["x"]))


class Doubling(nn.Module):
    """Saves nothing of its input, so that it may be written over."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = body()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * 2)


@scenario
def inputs_that_are_changed_after_the_call() -> tuple[nn.Module, Step]:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch["x"].clone()
        outputs = model(x)
        x.add_(1)
        return contrast(outputs) + x.mean() * outputs.mean()

    return Doubling(), step


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        outputs, state = self.lstm(x, state)
        return self.head(outputs), state


@scenario
def tensors_that_are_time_first() -> tuple[nn.Module, Step]:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        x = torch.stack([batch["x"], batch["x"] * 2, batch["x"] + 1])
        state = torch.zeros(2, len(batch["x"]), 6), torch.zeros(2, len(batch["x"]), 6)
        outputs, (hidden, _) = model(x, state)
        return contrast(outputs[-1]) + contrast(hidden[0])

    return Sequences(), step


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), body()
        self.back, self._use_reentrant = nn.Linear(6, 5), use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.back(torch.tanh(self.first(x)))
        return checkpoint(self.second, hidden, use_reentrant=self._use_reentrant)


@scenario
def a_checkpoint_inside() -> tuple[nn.Module, Step]:
    return Checkpointed(False), lambda model, batch: contrast(model(batch["x"]))


@scenario
def a_reentrant_checkpoint_inside() -> tuple[nn.Module, Step]:
    return Checkpointed(True), lambda model, batch: contrast(model(batch["x"]))


@scenario
def a_checkpoint_around() -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))  # whose output is what is saved of a tanh
    return model, lambda model, batch: contrast(checkpoint(model, batch["x"], use_reentrant=False))


@scenario
def per_sample_gradients() -> tuple[nn.Module, Step]:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        parameters = dict(model.named_parameters())

        def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
            return functional_call(model, parameters, (x,)).square().sum()

        each = torch.func.vmap(loss, in_dims=(None, 0))(parameters, batch["x"])
        return each.std() + contrast(model(batch["x"]))

    return body(), step


@scenario
def labels_from_outside_of_the_batch() -> tuple[nn.Module, Step]:
    labels = torch.arange(SAMPLES) % 4
    return body(), lambda model, batch: F.cross_entropy(model(batch["x"]), labels)


class Returning(nn.Module):
    """Returns its own loss, and others with it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.log_scale = body(), nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.inner(x)
        weighted = (F.cross_entropy(outputs, y, reduction="none") * w).sum() / w.sum().clamp(min=1)
        return {"loss": weighted * (-self.log_scale).exp() + self.log_scale + contrast(outputs), "outputs": outputs}


@scenario
def a_model_that_returns_its_loss() -> tuple[nn.Module, Step]:
    return Returning(), lambda model, batch: model(**batch)["loss"]


class Mutating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = body()

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch["hidden"] = self.inner(batch["x"])
        return batch["hidden"]


@scenario
def a_batch_that_the_model_adds_to() -> tuple[nn.Module, Step]:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs = model(batch)
        return contrast(outputs) + batch["hidden"].mean().exp()

    return Mutating(), step


@scenario
def a_module_that_reads_anothers_parameter() -> tuple[nn.Module, Step]:
    class Borrowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.lender = nn.Linear(5, 4), nn.Linear(5, 4)
            self.__dict__["borrowed"] = [self.lender]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(x) * self.__dict__["borrowed"][0].weight.sum()

    return Borrowing(), lambda model, batch: contrast(model(batch["x"]))


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.s = body(), nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@scenario
def learned_weights_of_tasks_that_lack_labels() -> tuple[nn.Module, Step]:
    def step(model: Any, batch: Any) -> Any:
        outputs, there = model(batch["x"]), batch["w"] < 0.3
        losses = {"class": (-model.s[0]).exp() * F.cross_entropy(outputs, batch["y"]) + model.s[0]}
        if there.any():
            error = outputs[there, 0] - batch["w"][there]
            losses["value"] = (-model.s[1]).exp() * error.square().mean() + model.s[1]
        return losses

    return Tasks(), step


@scenario
def means_over_different_counts() -> tuple[nn.Module, Step]:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs, mask = model(batch["x"]), (batch["w"] < 0.4).double()
        targets = batch["y"].where(batch["w"] > 0.2, -100)
        value = (mask * outputs[:, 0].square()).sum() / mask.sum().clamp(min=1)
        return F.cross_entropy(outputs, targets) + value

    return body(), step


@scenario
def a_mean_that_is_expanded_to_the_samples() -> tuple[nn.Module, Step]:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs = model(batch["x"])
        targets = batch["y"].where(batch["w"] > 0.3, -100)
        return F.cross_entropy(outputs, targets) + 0.5 * outputs.square().mean().expand(len(outputs)).mean()

    return body(), step


@scenario
def a_sum_with_a_penalty() -> tuple[nn.Module, Step]:
    def step(model: Any, batch: Any) -> torch.Tensor:
        return model(batch["x"]).square().sum() + 0.1 * model[0].weight.square().sum()

    return body(), step


@scenario
def a_mean_over_one() -> tuple[nn.Module, Step]:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        mask = (batch["w"] > 0.7).double()
        return (mask * model(batch["x"])[:, 0].square()).sum() / mask.sum().clamp(min=1)

    return body(), step


class Mixture(nn.Module):
    """A layer of experts, each sample going to two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(5, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.gate(x)
        weights, chosen = logits.softmax(1).topk(2)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return (outputs.gather(1, chosen[..., None].expand(-1, -1, 4)) * weights[..., None]).sum(1), logits


@scenario
def experts_that_are_balanced() -> tuple[nn.Module, Step]:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs, logits = model(batch["x"])
        probabilities = logits.softmax(1)
        chosen = F.one_hot(probabilities.topk(2).indices, 4).sum(1).double()
        # Fedus, Zoph and Shazeer, 2021, equations 4 to 6.
        return F.cross_entropy(outputs, batch["y"]) + 0.3 * 4 * (chosen.mean(0) * probabilities.mean(0)).sum()

    return Mixture(), step


@scenario
def a_scripted_model() -> tuple[nn.Module, Step]:
    return torch.jit.script(body()), lambda model, batch: contrast(model(batch["x"]))


@scenario
def a_traced_model() -> tuple[nn.Module, Step]:
    return torch.jit.trace(body(), torch.randn(3, 5)), lambda model, batch: contrast(model(batch["x"]))


@scenario
def a_method_that_is_no_call() -> tuple[nn.Module, Step]:
    return body(), lambda model, batch: contrast(model.forward(batch["x"]))


def some(batch: Any) -> torch.Tensor:
    return torch.where(batch["w"] < 0.6, batch["y"], -100)


CERTAIN: dict[str, Step] = {
    "cross entropy that ignores targets": lambda model, batch: F.cross_entropy(model(batch["x"]), some(batch)),
    "a sum": lambda model, batch: model(batch["x"]).square().sum(),
    "two means over samples": lambda model, batch: (
        F.cross_entropy(model(batch["x"]), batch["y"]) + 0.1 * model(batch["x"]).square().mean()
    ),
    "a mean over a mask": lambda model, batch: (
        (model(batch["x"]).square() * (batch["x"][:, 1:] < 1)).sum() / (batch["x"][:, 1:] < 1).sum()
    ),
    "a mean with a penalty": lambda model, batch: (
        F.cross_entropy(model(batch["x"]), some(batch)) + 0.1 * model[0].weight.square().sum()
    ),
}
UNCERTAIN = {
    "means_over_different_counts": verification.SEVERAL,
    "a_sum_with_a_penalty": verification.ONLY_PENALTIES,
    "a_mean_over_one": verification.CLAMPED,
}


def stepped(model: nn.Module, step: Step, batches: list[Any], **options: Any) -> tuple[list[Any], list[Any]]:
    optimizer = Recorder(model.parameters(), 0.05)
    events: list[Any] = []
    accumulator = autoaccum.Accumulator(model, optimizer, training_step=step, callbacks=[events.append], **options)
    found = []
    for batch in batches:
        loss = accumulator.step(batch)
        found.append((float(loss), optimizer.gradients, [b.clone() for b in model.buffers()]))
    return found, events


@pytest.fixture(autouse=True)
def _in_64_bits() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("accumulate", ["joined", "auto"])
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.filterwarnings("ignore")
def test_the_gradient_is_that_of_the_full_batch(name: str, accumulate: str) -> None:
    torch.manual_seed(0)
    model, step = SCENARIOS[name]()
    batches = [data() for _ in range(4)]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    whole, _ = stepped(model, step, copy.deepcopy(batches), micro_batch=SAMPLES)
    torch.manual_seed(0)
    model, step = SCENARIOS[name]()
    model.load_state_dict(state)
    joined, events = stepped(model, step, batches, micro_batch=3, accumulate=accumulate)
    for (loss, gradients, buffers), (other, others, other_buffers) in zip(whole, joined, strict=True):
        assert other == pytest.approx(loss, rel=1e-12)
        for one, found in zip(gradients, others, strict=True):
            assert (one is None) == (found is None)
            if one is not None:
                assert torch.linalg.vector_norm(found - one) <= 1e-12 * max(torch.linalg.vector_norm(one), 1e-3)
        for one, found in zip(buffers, other_buffers, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-12, atol=1e-12)
    assert not [event for event in events if isinstance(event, Notice)]
    assert all(event.passed for event in events if isinstance(event, Joined))


def test_a_causal_language_model_balances_its_experts_over_the_full_batch() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.5,
        output_router_logits=True,
        experts_implementation="eager",  # the other ones know no float64
    )  # fmt: skip
    gradients = []
    for micro_batch in (SAMPLES, 3):
        torch.manual_seed(0)
        model = transformers.MixtralForCausalLM(config)
        tokens = torch.randint(0, 50, (SAMPLES, 9))
        optimizer, events = Recorder(model.parameters(), 0.05), list[Any]()
        step = autoaccum.Accumulator(model, optimizer, micro_batch=micro_batch, callbacks=[events.append]).step
        step({"input_ids": tokens, "labels": tokens})
        gradients.append(optimizer.gradients)
        assert not [event for event in events if isinstance(event, Notice)]
    assert [event.passed for event in events if isinstance(event, Joined)] == [True]
    for one, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", CERTAIN)
def test_a_loss_with_one_certain_count_is_weighted(name: str) -> None:
    torch.manual_seed(0)
    batches = [data() for _ in range(4)]
    _, events = stepped(body(), CERTAIN[name], batches, micro_batch=3)
    assert not [event for event in events if isinstance(event, Joined | Notice)]


@pytest.mark.parametrize("name", UNCERTAIN)
def test_a_loss_with_several_counts_is_joined_though_weights_are_right(name: str) -> None:
    torch.manual_seed(0)
    model, step = SCENARIOS[name]()
    batch = data() | {"w": torch.tensor([0.9, 0.1, 0.1, 0.9, 0.9, 0.1, 0.9, 0.9])}  # 1, 2 and 2 of them are large
    _, events = stepped(model, step, [batch] * 2, micro_batch=3)
    assert [event.reason for event in events if isinstance(event, Joined)] == [UNCERTAIN[name]]
    report = autoaccum.check(model, batch, training_step=step)
    assert (report.accumulate, report.reason, report.passed) == ("joined", UNCERTAIN[name], True)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.linear(x), 0.5)


def test_each_micro_batch_draws_in_backward_what_it_drew_in_forward() -> None:
    torch.manual_seed(0)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs = model(batch["x"])
        outputs.retain_grad()
        seen.append((batch["x"], outputs))
        return contrast(outputs) + torch.rand(()) * outputs.mean()

    found, _ = stepped(Dropping(), step, [data() for _ in range(3)], micro_batch=3, accumulate="joined")
    x, outputs = seen[-1]
    assert outputs.grad is not None
    # The mask of the forward shows in the outputs: what was dropped is 0, and has no gradient.
    kept = (outputs != 0).double() * 2
    assert 0 < kept.mean() < 2
    torch.testing.assert_close(found[-1][1][0], (outputs.grad * kept).T @ x, rtol=1e-12, atol=1e-14)


def test_a_window_leaves_the_random_state_of_its_forward() -> None:
    torch.manual_seed(0)
    states = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = contrast(model(batch["x"]))
        states.append(torch.get_rng_state())
        return loss

    batches = [data() for _ in range(3)]
    stepped(Dropping(), step, batches, micro_batch=3, accumulate="joined")
    # The third window is not measured: its step ran last, and its recomputations have left nothing.
    assert torch.equal(torch.get_rng_state(), states[-1])


@pytest.mark.parametrize("name", ["contrastive", "a_checkpoint_around", "statistics_of_the_batch"])
def test_nothing_of_a_window_is_left_behind(name: str) -> None:
    def living() -> int:
        gc.collect()
        return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())

    torch.manual_seed(0)
    model, step = SCENARIOS[name]()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    accumulator = autoaccum.Accumulator(model, optimizer, training_step=step, micro_batch=3, accumulate="joined")
    batches = [data() for _ in range(6)]
    weighted = autoaccum.Accumulator(model, optimizer, training_step=step, micro_batch=SAMPLES)
    weighted.step(data())
    before = living()
    counts = []
    for batch in batches:
        accumulator.step(batch)
        counts.append(living())
    assert counts[0] - before <= 4  # parameters' gradients, random states; and no graph of what was measured
    assert counts[1:] == [counts[1]] * 5


def test_a_module_that_returns_its_inputs_is_split() -> None:
    torch.manual_seed(0)
    model, step = SCENARIOS["inputs_that_are_returned"]()
    seen: list[int] = []
    model.inner.register_forward_hook(lambda *given: seen.append(len(given[2])))  # type: ignore[operator, union-attr]
    found = autoaccum.fit(
        model, data(), training_step=step, effective_batch=SAMPLES, micro_batch=3, epochs=1, accumulate="joined",
        device="cpu", cache=False, progress=False, verify=False,
    )  # fmt: skip
    (event,) = [one for one in found.events if isinstance(one, Joined)]
    assert event.opened == ()
    assert any(seen[at : at + 5] == [3, 3, 2, 3, 3] for at in range(len(seen))), "the last one is not run again"


def plain_data(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 5, generator=generator), torch.randint(0, 4, (count,), generator=generator)


def noisy_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.2), nn.BatchNorm1d(6, momentum=0.5), nn.GELU(), nn.Linear(6, 4))


def coupled(model: nn.Module, batch: Any) -> torch.Tensor:
    outputs = model(batch[0])
    return F.cross_entropy(outputs, batch[1]) + contrast(outputs) * torch.rand(())


def run(model: nn.Module | None = None, samples: Any = None, **options: Any) -> autoaccum.FitResult:
    options = {"micro_batch": 4, "steps": 3, **options}
    return autoaccum.fit(
        model or noisy_model(), samples or plain_data(24), effective_batch=8, training_step=coupled, accumulate="joined", device="cpu",
        cache=False, progress=False, **options,
    )  # fmt: skip


def ends_alike(first: autoaccum.FitResult, second: autoaccum.FitResult) -> bool:
    both = zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in both)


@strides(499)
def test_memory_that_runs_out_anywhere_leaves_no_mark(stride: int) -> None:
    run()
    model, samples = noisy_model(), plain_data(24)
    with Operations() as operations:
        run(model, samples)
    numbers = operations.every(stride)
    assert len(numbers) * stride > 1800
    known: dict[tuple[Any, ...], autoaccum.FitResult] = {}
    replayed = 0
    for number in numbers:
        model, samples = noisy_model(), plain_data(24)
        try:
            with oom_at(number):
                found = run(model, samples)
        except autoaccum.errors.MemoryLimitError:  # in the optimizer's own step, which is not run again
            continue
        plans = tuple(report.micro_batches for report in found.history)
        if plans not in known:
            known[plans] = run(micro_batch=list(plans))
        assert ends_alike(found, known[plans]), (number, plans)
        replayed += any(isinstance(event, Replanned) for event in found.events)
    assert replayed


def test_memory_that_runs_out_while_parameters_are_frozen_leaves_them_as_they_were() -> None:
    model, x, y = body(), *plain_data(SAMPLES)

    def step(model: nn.Module, batch: Any, fails: list[bool]) -> torch.Tensor:
        outputs = model(batch[0])
        model.requires_grad_(False)
        if fails and fails.pop():
            raise torch.OutOfMemoryError("out of memory")
        others = model(batch[0] * 2)
        model.requires_grad_(True)
        return contrast(outputs) + others.mean()

    found = []
    for is_short in (False, True):
        kept, fails = copy.deepcopy(model), list[bool]()
        optimizer = torch.optim.SGD(kept.parameters(), 0.1)
        loss_of = lambda model, batch, fails=fails: step(model, batch, fails)  # noqa: E731
        accumulator = autoaccum.Accumulator(
            kept, optimizer, training_step=loss_of, micro_batch=4, accumulate="joined"
        )  # fmt: skip
        for number in range(4):
            fails.extend([True] * (is_short and number == 3))
            accumulator.step((x, y))
        assert not fails
        found.append(list(kept.parameters()))
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(*found, strict=True))


def test_a_run_goes_on_as_if_it_had_never_stopped(tmp_path: Any) -> None:
    whole = run(steps=6, epochs=None)
    run(steps=3, run_dir=tmp_path / "run")
    resumed = run(steps=6, run_dir=tmp_path / "run")
    assert [report.loss for report in whole.history[3:]] == [report.loss for report in resumed.history[-3:]]
    assert ends_alike(whole, resumed)


def encoder(model: nn.Module, batch: Any) -> torch.Tensor:
    return contrast(model(batch[0]))


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 400), nn.GELU(), nn.Linear(400, 400), nn.GELU(), nn.Linear(400, 4))


@pytest.mark.filterwarnings("ignore")
def test_a_window_that_does_not_fit_is_joined_in_less_memory() -> None:
    torch.set_default_dtype(torch.float32)
    plain = plain_data(256)
    batch = plain[0].float(), plain[1]

    def peak(**options: Any) -> tuple[int, float, list[Any]]:
        with simulated_memory(2**40) as device:
            model = wide()
            found = autoaccum.fit(
                model, batch, effective_batch=256, training_step=encoder, steps=3, device="cpu", cache=False,
                progress=False, **options,
            )  # fmt: skip
            return device.peak, found.history[-1].loss, found.events

    whole, loss, _ = peak(micro_batch=256)
    joined, other, events = peak(micro_batch=16)
    assert [event for event in events if isinstance(event, Joined)]
    assert other == pytest.approx(loss, rel=1e-4)
    assert joined < 0.75 * whole


class Centred(nn.Module):
    """Compares samples in its own code, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = body(), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Dropout(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.second(hidden - hidden.mean(0))


@pytest.mark.parametrize(("samples", "windows"), [(32, [8, 8, 8, 8]), (26, [8, 8, 5, 5]), (9, [5, 4]), (3, [3])])
@pytest.mark.parametrize("micro_batch", [3, 8])
def test_a_validation_is_of_the_loss_of_whole_windows(samples: int, windows: list[int], micro_batch: int) -> None:
    torch.manual_seed(0)
    held_out = torch.randn(samples, 5), torch.randint(0, 3, (samples,))
    seen = []

    def outputs(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(model.first[0].training)
        return model(batch[0]).square().mean(1)

    options: dict[str, Any] = {"validation_data": held_out, "validate_every": 1, "metrics": {"size": outputs}}
    step = lambda model, batch: contrast(model(batch[0])) + F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    found = autoaccum.fit(
        Centred(), plain_data(24), effective_batch=8, training_step=step, micro_batch=micro_batch, steps=1,
        accumulate="joined", device="cpu", cache=False, progress=False, **options,
    )  # fmt: skip
    (event,) = [one for one in found.events if isinstance(one, Validated)]
    model = found.model.eval()
    with torch.no_grad():
        parts = zip(*(one.split(windows) for one in held_out), strict=True)
        losses = [len(part[0]) * float(step(model, part)) for part in parts]
        sizes = [float(model(part).square().mean(1).sum()) for part in held_out[0].split(windows)]
    assert event.loss == pytest.approx(sum(losses) / samples, rel=1e-12)
    assert event.metrics["size"] == pytest.approx(sum(sizes) / samples, rel=1e-12)
    assert event.micro_batch <= micro_batch
    assert not any(seen)
    assert model.second[0].num_batches_tracked == 2, "by the two calls of the step that was trained"


class Narrow(nn.Module):
    """Has no memory for more than two samples where it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = body()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.inner(x)


def test_a_validation_that_does_not_fit_is_joined_in_smaller_micro_batches() -> None:
    torch.manual_seed(0)
    held_out = plain_data(20)
    found = autoaccum.fit(
        Narrow(), plain_data(24), effective_batch=8, training_step=encoder, micro_batch=4, steps=1, device="cpu",
        cache=False, progress=False, validation_data=held_out, validate_every=1, accumulate="joined",
    )  # fmt: skip
    (event,) = [one for one in found.events if isinstance(one, Validated)]
    with torch.no_grad():
        expected = sum(len(part) * float(contrast(found.model.inner(part))) for part in held_out[0].split([8, 6, 6]))
    assert event.loss == pytest.approx(expected / 20, rel=1e-12)
    assert event.micro_batch == 2
