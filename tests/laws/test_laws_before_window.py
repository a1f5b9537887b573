"""The laws of docs/laws.md, for runs with a ``before_window``: what micro-batches get of their whole window."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.events import Notice, OutOfMemory, Verified
from autoaccum.testing import oom_at
from tests.devices import DEVICE, there
from tests.faults import Operations, strides
from tests.models import mlp, relative_error, same, state_of

WINDOW = 8
PLANS = [((3, 1, 4),) * 2 + ((5,),), ((1,) * 8,) * 2 + ((1,) * 5,), ((5, 3), (2, 6), (1, 4)), ((8,), (8,), (5,))]
"""Plans of three windows of 21 samples."""


def data() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(21, 8, generator=generator, dtype=torch.float64),
        "y": torch.randint(0, 3, (21,), generator=generator),
        "advantages": torch.randn(21, generator=generator, dtype=torch.float64) * 3 + 1,
        "mask": torch.randint(0, 2, (21, 4), generator=generator),
    }


class Recorder(torch.optim.SGD):
    """Remembers the gradient of each step, as one vector."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.gradients: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.param_groups[0]["params"]]))
        super().step(closure)


# Each is (before_window, training_step); in the big batch's own loop in_pieces is one call.


def normalised(batch: Any) -> Any:
    advantages = batch["advantages"]
    return {"advantages": (advantages - advantages.mean()) / (advantages.std(unbiased=False) + 1e-8)}


def ppo(model: nn.Module, batch: Any) -> torch.Tensor:
    ratio = model(batch["x"]).log_softmax(1).gather(1, batch["y"][:, None])[:, 0].exp()
    advantages = batch["advantages"]
    return -torch.minimum(ratio * advantages, ratio.clamp(0.3, 0.4) * advantages).mean()


def frequencies(batch: Any) -> Any:
    return {"weights": 1 / (torch.bincount(batch["y"], minlength=3).double() + 1)}


def eight_weights(batch: Any) -> Any:
    """As many as the window has samples."""
    return {"weights": 1 / (torch.bincount(batch["y"], minlength=WINDOW).double() + 1)}


def weighted(model: nn.Module, batch: Any) -> torch.Tensor:
    return (each(model, batch) * batch["weights"][batch["y"]]).mean()


def each(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def hardest(batch: Any, in_pieces: Any) -> Any:
    losses = in_pieces(each)
    return {"threshold": losses.sort().values[len(losses) // 2] * 0.999, "kept": float((len(losses) + 1) // 2)}


def mined(model: nn.Module, batch: Any, shared: Any) -> torch.Tensor:
    losses = each(model, batch)
    return (losses * (losses > shared["threshold"])).sum() / shared["kept"]


def centre(batch: Any, in_pieces: Any) -> Any:
    return in_pieces(lambda model, micro_batch: model(micro_batch["x"])).mean(dim=0)


def centred(model: nn.Module, batch: Any, centre: torch.Tensor) -> torch.Tensor:
    return (model(batch["x"]) - centre).square().sum(dim=1).mean()


def residuals(batch: Any, in_pieces: Any) -> Any:
    """Rows in a list, in an array and in a tensor, and what belongs to the window, by a model's own forwards."""
    outputs = in_pieces(lambda model, micro_batch: {"outputs": model(micro_batch["x"])})["outputs"]
    away = outputs - outputs.mean(dim=0)
    return {"tensor": away, "array": away.cpu().numpy(), "list": away.sum(dim=1).tolist(), "whole": outputs.std()}


def by_residuals(model: nn.Module, batch: Any, shared: Any) -> torch.Tensor:
    array, numbers = torch.as_tensor(shared["array"], device=DEVICE), torch.tensor(shared["list"], device=DEVICE)
    weights = shared["tensor"].sum(dim=1) * array.sum(dim=1) + numbers
    return (each(model, batch) * weights).mean() * shared["whole"]


def counted(batch: Any) -> Any:
    return {"num_items_in_batch": batch["mask"].sum()}


def tokens(model: nn.Module, batch: Any) -> torch.Tensor:
    return (each(model, batch)[:, None] * batch["mask"]).sum() / batch["num_items_in_batch"]


RECIPES: dict[str, tuple[Any, Any]] = {
    "PPO's normalised advantages": (normalised, ppo),
    "class weights by frequency": (frequencies, weighted),
    "as many class weights as samples": (eight_weights, weighted),
    "the hardest half": (hardest, mined),
    "centring": (centre, centred),
    "rows of every kind": (residuals, by_residuals),
    "num_items_in_batch": (counted, tokens),
}
EVERY = pytest.mark.parametrize(("before", "step"), RECIPES.values(), ids=RECIPES)


def gradients_of_whole_windows(before: Callable[..., Any], step: Callable[..., Any]) -> list[torch.Tensor]:
    """What the big batch's own loop gives."""
    model = there(mlp(torch.float64))
    optimizer = Recorder(model.parameters())
    for start in (0, 8, 16):
        batch = there({name: rows[start : start + WINDOW] for name, rows in data().items()})
        with torch.no_grad():
            if before.__code__.co_argcount == 2:
                shared = before(batch, lambda function: function(model, batch))  # noqa: B023
            else:
                shared = before(batch)
        optimizer.zero_grad()
        loss = step(model, batch, shared) if step.__code__.co_argcount == 3 else step(model, {**batch, **shared})
        loss.backward()
        optimizer.step()
    return optimizer.gradients


def fitted(before: Any, step: Any, **options: Any) -> autoaccum.FitResult:
    return trainer(before, step, **options).fit()


def trainer(before: Any, step: Any, **options: Any) -> autoaccum.Trainer:
    arguments: dict[str, Any] = {"optimizer": Recorder, "shuffle": False, "cache": False, "progress": False}
    given = arguments | {"training_step": step, "before_window": before, "effective_batch": WINDOW} | options
    return autoaccum.Trainer(given.pop("model", None) or mlp(torch.float64), data(), device=DEVICE, **given)


class TestExactness:
    """Law 1: the gradient is that of the loss over the whole window, with the window's own statistics; nothing is said."""

    @pytest.mark.device(every=7)
    @EVERY
    @pytest.mark.parametrize("plans", [*PLANS, "auto", 3], ids=str)
    def test_in_fit(self, before: Any, step: Any, plans: Any) -> None:
        result = fitted(before, step, micro_batch=plans)
        if not isinstance(plans, int | str):
            assert tuple(report.micro_batches for report in result.history) == plans
        expected = gradients_of_whole_windows(before, step)
        assert max(map(relative_error, result.optimizer.gradients, expected)) < 1e-12  # type: ignore[attr-defined]
        assert not [event for event in result.events if isinstance(event, Notice)]

    @pytest.mark.device(every=5)
    @EVERY
    @pytest.mark.parametrize("micro_batch", [1, 3, 5])
    def test_in_an_accumulator(self, before: Any, step: Any, micro_batch: int) -> None:
        model = there(mlp(torch.float64))
        optimizer = Recorder(model.parameters())
        accumulator = autoaccum.Accumulator(
            model, optimizer, training_step=step, before_window=before, micro_batch=micro_batch
        )
        for start in (0, 8, 16):
            accumulator.step({name: rows[start : start + WINDOW] for name, rows in data().items()})
            assert max(accumulator.micro_batches) <= micro_batch
        expected = gradients_of_whole_windows(before, step)
        assert max(map(relative_error, optimizer.gradients, expected)) < 1e-12
        assert {type(event) for event in accumulator.events if isinstance(event, Notice | Verified)} == {Verified}

    @pytest.mark.device
    def test_a_loss_fn_and_num_items_get_it_too(self) -> None:
        def weights(batch: Any) -> torch.Tensor:
            return torch.linspace(1, 2, len(batch[1]), dtype=torch.float64, device=DEVICE) / len(batch[1])

        def loss_fn(outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return (cross_entropy(outputs, targets, reduction="none") * weights).sum() / weights.sum()

        def num_items(batch: Any, weights: torch.Tensor) -> torch.Tensor:
            assert len(batch[1]) == len(weights)
            return weights.sum()

        model = there(mlp(torch.float64))
        optimizer = Recorder(model.parameters())
        accumulator = autoaccum.Accumulator(
            model, optimizer, loss_fn=loss_fn, before_window=weights, num_items=num_items, micro_batch=3
        )
        batch = there((data()["x"], data()["y"]))
        accumulator.step(batch)
        whole = there(mlp(torch.float64))
        loss_fn(whole(batch[0]), batch[1], weights(batch)).backward()
        expected = torch.cat([p.grad.flatten() for p in whole.parameters()])  # type: ignore[union-attr]
        assert relative_error(optimizer.gradients[0], expected) < 1e-12
        assert not [event for event in accumulator.events if isinstance(event, Notice)]

    @pytest.mark.device
    def test_a_model_that_returns_its_loss_gets_it_as_a_keyword(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = mlp(torch.float64)

            def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, **others: Any) -> Any:
                return {"loss": tokens(self.layers, {"x": x, "y": y, "mask": mask, **others})}

        result = fitted(counted, None, model=Model(), micro_batch=3)
        expected = gradients_of_whole_windows(counted, tokens)
        assert max(map(relative_error, result.optimizer.gradients, expected)) < 1e-12  # type: ignore[attr-defined]


class TestVerified:
    """Law 8: what is done before the window passes; the same done within the step, for each micro-batch, does not."""

    @pytest.mark.device(every=2)
    @EVERY
    def test_it_is_measured_to_be_exact(self, before: Any, step: Any) -> None:
        verified = [event.error for event in fitted(before, step, micro_batch=3).events if isinstance(event, Verified)]
        assert verified
        assert max(verified) < 1e-11
        report = autoaccum.check(mlp(torch.float64), data(), training_step=step, before_window=before, device=DEVICE)
        assert report.passed
        assert report.error == pytest.approx(0, abs=1e-11)

    @pytest.mark.device
    @pytest.mark.parametrize("name", ["PPO's normalised advantages", "class weights by frequency"])
    def test_within_the_step_it_is_announced(self, name: str) -> None:
        before, step = RECIPES[name]
        with pytest.warns(autoaccum.AutoaccumWarning):
            result = fitted(None, lambda model, batch: step(model, {**batch, **before(batch)}), micro_batch=3)
        (notice,) = [event for event in result.events if isinstance(event, Notice)]
        assert "off the whole window's, measured on 6 samples" in notice.cause
        assert "before_window" in notice.cure

    @pytest.mark.device
    def test_results_of_pieces_that_depend_on_the_pieces_are_announced(self) -> None:
        def per_piece(batch: Any, in_pieces: Any) -> Any:
            return in_pieces(lambda model, micro: (model(micro["x"]) - model(micro["x"]).mean(dim=0)).detach())

        def step(model: nn.Module, batch: Any, shared: torch.Tensor) -> torch.Tensor:
            return (model(batch["x"]) * shared).sum(dim=1).mean()

        with pytest.warns(autoaccum.AutoaccumWarning):
            result = fitted(per_piece, step, micro_batch=3)
        (notice,) = [event for event in result.events if isinstance(event, Notice)]
        assert "off the whole window's, measured on 6 samples" in notice.cause

    @pytest.mark.device
    def test_dropout_in_the_pieces_is_no_error(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3)).double()
        result = fitted(centre, centred, model=model, micro_batch=3)
        measured = [event for event in result.events if isinstance(event, Verified | Notice)]
        assert measured
        assert all(isinstance(event, Verified) and event.error < 1e-11 for event in measured)


class Average:
    """Keeps an average of rewards over windows, and draws from a generator of its own."""

    def __init__(self) -> None:
        self.mean, self.windows = torch.zeros((), dtype=torch.float64), 0
        self.generator = torch.Generator().manual_seed(3)
        self.seen: list[float] = []

    def __call__(self, batch: Any, in_pieces: Any) -> Any:
        outputs = in_pieces(lambda model, micro_batch: model(micro_batch["x"]))
        self.mean.mul_(0.9).add_(0.1 * outputs.mean().double())
        self.windows += 1
        self.seen.append(self.mean.item())
        noise = torch.rand(len(outputs), generator=self.generator) + torch.rand(len(outputs))
        return {"weights": noise.double() + self.mean * self.windows}

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "windows": self.windows, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean.copy_(state["mean"])
        self.windows = state["windows"]
        self.generator.set_state(state["generator"])


def plain_average() -> Any:
    """The same without pieces, in a closure."""
    mean, seen = 0.0, []

    def before(batch: Any) -> Any:
        nonlocal mean
        mean = 0.9 * mean + 0.1 * float(batch["advantages"].mean())
        seen.append(mean)
        return {"weights": torch.rand(len(batch["y"])).double() + mean}

    return before


def by_weights(model: nn.Module, batch: Any) -> torch.Tensor:
    return (each(model, batch) * batch["weights"]).mean()


def noisy() -> nn.Module:
    """Dropout and BatchNorm, in which forwards draw and write."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3)).double()


def noisy_trainer(before: Any, **options: Any) -> autoaccum.Trainer:
    defaults = {"shuffle": True, "verify": False, "optimizer": None}
    return trainer(before, by_weights, model=noisy(), **{**defaults, **options})


def noisy_run(before: Any, **options: Any) -> autoaccum.FitResult:
    return noisy_trainer(before, **options).fit()


class Counting(nn.Module):
    """A model whose buffer, frozen parameter and attribute count the calls of a function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(6, 3)
        self.register_buffer("buffer", torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.number = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)  # type: ignore[no-any-return]


@pytest.mark.device
@pytest.mark.parametrize("micro_batch", [4, 12])
def test_what_a_function_writes_to_the_model_is_written_once_a_window(micro_batch: int) -> None:
    """Though it is called once more, to see what has rows, and again for validations, and by a probe and a check."""
    model = Counting()

    def count(batch: Any) -> dict[str, torch.Tensor]:
        model.buffer += 1
        model.frozen += 1
        model.number += 1
        return {"rows": batch["x"].mean(1)}

    def step(model: Any, batch: Any) -> torch.Tensor:
        return cross_entropy(model(batch["x"]) + batch["rows"][:, None], batch["y"])

    data = {"x": torch.randn(36, 6), "y": torch.randint(0, 3, (36,))}
    given: Any = {"training_step": step, "before_window": count, "device": DEVICE}
    autoaccum.probe(model, data, max_micro_batch=8, **given)
    autoaccum.check(model, data, **given)
    assert [float(model.buffer), float(model.frozen), model.number] == [0, 0, 0]
    autoaccum.fit(
        model, data, effective_batch=12, micro_batch=micro_batch, validation_data=data, validate_every=12,
        progress=False, **given,
    )  # fmt: skip
    assert [float(model.buffer), float(model.frozen), model.number] == [3, 3, 3]


@pytest.mark.filterwarnings("ignore:The model holds 1 BatchNorm")
class TestReplay:
    """Law 2: memory that runs out anywhere, before the window's first micro-batch too, leaves no mark."""

    @strides(17)
    @pytest.mark.parametrize("make", [Average, plain_average])
    def test_oom_at_every_operation(self, make: Any, stride: int) -> None:
        running = noisy_trainer(make(), micro_batch=5)
        with Operations() as operations:
            running.fit()
        clean: dict[Any, list[torch.Tensor]] = {}
        replayed = 0
        for operation in operations.every(stride):
            before = make()
            running = noisy_trainer(before, micro_batch=5)
            with oom_at(operation):
                try:
                    result = running.fit()
                except autoaccum.errors.OptimizerOutOfMemoryError:
                    continue
            plans = tuple(report.micro_batches for report in result.history)
            if plans not in clean:
                again = make()
                clean[plans] = [*state_of(noisy_run(again, micro_batch=plans)), *held_by(again)]
            assert same([*state_of(result), *held_by(before)], clean[plans]), f"operation {operation} left a mark"
            replayed += sum(isinstance(event, OutOfMemory) and event.phase == "training" for event in result.events)
        assert replayed * stride > 100

    def test_the_state_moves_once_a_window_and_a_replay_computes_it_anew(self) -> None:
        before, calls = Average(), []

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            calls.append(len(batch["y"]))
            if len(calls) in (3, 4):
                raise torch.OutOfMemoryError
            return by_weights(model, batch)

        result = fitted(before, step, micro_batch=4, verify=False)
        assert [report.replays for report in result.history] == [0, 2, 0]
        calm = Average()
        fitted(calm, by_weights, micro_batch=[report.micro_batches for report in result.history], verify=False)
        assert before.seen == calm.seen
        assert before.windows == len(before.seen) == 3

    @pytest.mark.parametrize("make", [Average, plain_average])
    def test_where_state_moves_once_a_window(self, make: Any) -> None:
        """With ``state="window"`` each micro-batch finds what the first one found, and what was shared with it."""
        runs = []
        for state in ("micro-batch", "window"):
            before = make()
            result = fitted(before, by_weights, micro_batch=3, verify=False, state=state)
            runs.append([*state_of(result), *held_by(before)])
        assert same(*runs)

    def test_what_pieces_draw_and_write_does_not_show(self) -> None:
        """A run whose pieces' results are not used ends like one without any."""

        def unused(batch: Any, in_pieces: Any) -> Any:
            in_pieces(lambda model, micro_batch: model(micro_batch["x"]))

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            return each(model, batch).mean()

        runs = []
        for before in (None, unused):
            runs.append(state_of(fitted(before, step, model=noisy(), micro_batch=3, optimizer=None, verify=False)))
        assert same(*runs)

    def test_one_piece_that_does_not_fit_is_cut(self) -> None:
        """Memory that only the pieces need: the window's plan becomes smaller."""

        def large(batch: Any, in_pieces: Any) -> Any:
            return in_pieces(lambda model, micro: torch.zeros(len(micro["y"]) ** 2 * 100_000).sum(dim=0))

        def step(model: nn.Module, batch: Any, shared: Any) -> torch.Tensor:
            return each(model, batch).mean()

        with autoaccum.testing.simulated_memory(8_000_000):
            result = fitted(large, step, micro_batch=8)
        assert [report.micro_batches for report in result.history][-1] != (8,)
        assert any(isinstance(event, OutOfMemory) for event in result.events)


def held_by(before: Any) -> list[torch.Tensor]:
    if not isinstance(before, Average):
        return [torch.tensor(before.__closure__[0].cell_contents)]
    return [before.mean, torch.tensor(before.windows), torch.tensor(before.seen), before.generator.get_state()]


class Module(nn.Module):
    """What a before_window keeps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, batch: Any) -> Any:
        self.mean.mul_(0.9).add_(0.1 * batch["advantages"].mean().to(self.mean.device))
        return {"weights": batch["advantages"] * self.mean}


@pytest.mark.filterwarnings("ignore:The model holds 1 BatchNorm")
class TestResume:
    """Law 3: a run that is killed and started again goes on with what its before_window kept."""

    @pytest.mark.parametrize("make", [Average, Module])
    @pytest.mark.parametrize("stopped", [1, 2])
    def test_it_ends_like_a_run_that_was_never_stopped(self, make: Any, stopped: int, tmp_path: Path) -> None:
        def stop(record: Any) -> None:
            if isinstance(record, autoaccum.StepReport) and record.step == stopped:
                raise autoaccum.StopTraining

        before = make()
        whole = [*state_of(noisy_run(before, micro_batch=3, epochs=2)), before.mean]
        first = noisy_run(make(), micro_batch=3, epochs=2, run_dir=tmp_path, callbacks=[stop])
        assert first.num_steps == stopped
        again = make()
        result = noisy_run(again, micro_batch=3, epochs=2, run_dir=tmp_path)
        assert same([*state_of(result), again.mean], whole)
        assert isinstance(again, Module) or again.windows == 6
