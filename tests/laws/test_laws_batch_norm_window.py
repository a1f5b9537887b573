"""The laws for ``batch_norm="window"``: windows that are cut are what PyTorch computes of whole ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm, cross_entropy
from torch.utils.checkpoint import checkpoint

import autoaccum
from autoaccum import errors
from autoaccum.events import Notice, Record, Verified
from autoaccum.testing import oom_at, simulated_memory
from tests.faults import Operations, strides
from tests.laws import test_laws_batch_norm as ghosts
from tests.laws.test_laws_batch_norm import IMAGES, apart, convolutions, sgd
from tests.models import same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:The model holds . BatchNorm layer.*'window:autoaccum.AutoaccumWarning")


def fit(model: nn.Module, data: Any = IMAGES, **options: Any) -> autoaccum.FitResult:
    return ghosts.fit(model, data, **{"batch_norm": "window", "shuffle": False, **options})


def by_hand(model: nn.Module, effective_batch: int = 50, epochs: int = 2, loss_fn: Any = cross_entropy) -> nn.Module:
    """Train on whole windows, as anybody does who has the memory."""
    optimizer = sgd(model.parameters())
    for _ in range(epochs):
        for start in range(0, len(IMAGES[0]), effective_batch):
            inputs, targets = (tensor[start : start + effective_batch] for tensor in IMAGES)
            optimizer.zero_grad()
            loss_fn(model(inputs), targets).backward()
            optimizer.step()
    return model


MASKS: list[torch.Tensor] = []


class Masked(nn.Module):
    """Dropout whose masks are seen, and may be given."""

    given: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand(x.shape) > 0.3 if self.given is None else self.given
        MASKS.append(mask)
        return x * mask


class TestExactness:
    """Law 1, in its strict form: one whole forward and backward is what all is compared with."""

    @pytest.mark.parametrize(("effective_batch", "micro_batch"), [(50, 8), (50, 1), (49, 3), (97, 23), (300, 50)])
    def test_it_is_the_big_batch(self, effective_batch: int, micro_batch: int) -> None:
        model, expected = convolutions(), by_hand(convolutions(), effective_batch)
        result = fit(model, effective_batch=effective_batch, micro_batch=micro_batch)
        assert max(result.history[0].micro_batches) <= micro_batch < effective_batch
        assert apart(model, expected) < 1e-12
        assert model[1].num_batches_tracked == len(result.history)

    def test_tight_and_loose_limits_give_the_weights_of_whole_windows_after_50_of_them(self) -> None:
        expected = by_hand(convolutions(), 60, 10)
        for limit in ("420KiB", "64MiB"):
            model = convolutions()
            with simulated_memory(limit):
                result = fit(model, effective_batch=60, epochs=None, steps=50, micro_batch="auto")
            sizes = {size for report in result.history for size in report.micro_batches}
            assert (max(sizes) < 60) is (limit == "420KiB")
            assert apart(model, expected) < 1e-10

    def test_dropout_draws_the_same_in_all_passes(self) -> None:
        """The gradient is that of one backward through the window, whose masks are those of its micro-batches."""
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(98, 6), nn.BatchNorm1d(6), Masked(), nn.BatchNorm1d(6), nn.Linear(6, 3)
        ).double()
        expected = [p.detach().clone() for p in model.parameters()]
        MASKS.clear()
        result = fit(model, steps=1, epochs=None, micro_batch=20, verify=False)
        assert result.history[0].micro_batches == (17, 17, 16)
        assert len(MASKS) == 5 * 3  # two of statistics, one of the loss, two back
        for later in range(3, 15):
            assert torch.equal(MASKS[later], MASKS[later % 3])
        trained = [p.detach().clone() for p in model.parameters()]
        model[3].given = torch.cat(MASKS[:3])
        for p, before in zip(model.parameters(), expected, strict=True):
            p.data, p.grad = before, None
        cross_entropy(model(IMAGES[0][:50]), IMAGES[1][:50]).backward()
        sgd(model.parameters()).step()
        for p, after in zip(model.parameters(), trained, strict=True):
            torch.testing.assert_close(p.detach(), after, rtol=0, atol=1e-14)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_layers_that_are_checkpointed_and_called_twice(self, reentrant: bool) -> None:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.linear, self.norm, self.out = nn.Linear(98, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

            def both(self, x: torch.Tensor) -> torch.Tensor:
                return self.norm(self.norm(self.linear(x)).tanh() ** 3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = x.flatten(1).clone().requires_grad_(reentrant)
                return self.out(checkpoint(self.both, x, use_reentrant=reentrant) if self.is_cut else self.both(x))

            is_cut = True

        model, expected = Twice().double(), Twice().double()
        expected.is_cut = False
        if reentrant:  # its forward records nothing that a gradient of statistics could go back through
            with pytest.raises(errors.ArgumentError, match="use_reentrant=False"):
                fit(model, micro_batch=8, verify=False)
            return
        fit(model, micro_batch=8)
        assert apart(model, by_hand(expected)) < 1e-12
        assert model.norm.num_batches_tracked == 24

    def test_calls_that_no_layer_makes(self) -> None:
        class Functional(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.linear = nn.Linear(98, 5, bias=False)
                self.register_buffer("mean", torch.zeros(5))
                self.register_buffer("var", torch.ones(5))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = batch_norm(self.linear(x.flatten(1)), self.mean, self.var, training=self.training)
                x = torch.batch_norm(x.tanh(), None, None, None, None, True, 0.1, 1e-5, False)
                return batch_norm(x.exp(), None, None, training=True)

        model = Functional().double()
        fit(model, micro_batch=8)
        assert apart(model, by_hand(Functional().double())) < 1e-12

    def test_layers_below_that_are_frozen_and_what_is_in_eval_mode(self) -> None:
        def half(model: nn.Sequential) -> nn.Sequential:
            model[0].requires_grad_(False)
            model[1].requires_grad_(False)
            model[4].eval()
            return model

        model = half(convolutions())
        fit(model, micro_batch=8)
        # Trainer puts nothing into training mode that its user has put into eval mode.
        assert apart(model, by_hand(half(convolutions()))) < 1e-12
        assert model[4].num_batches_tracked == 0

    def test_micro_batches_that_count_nothing_are_part_of_the_statistics(self) -> None:
        """Nothing is learnt of them, and all others are normalised beside them."""
        targets = IMAGES[1].clone()
        targets[8:16], targets[60:62] = -100, -100

        def loss_fn(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return cross_entropy(inputs, targets, ignore_index=-100)

        def count(batch: Any) -> int:
            return int((batch[1] != -100).sum())

        expected, optimizer = convolutions(), None
        optimizer = sgd(expected.parameters())
        for start in range(0, 300, 48):
            optimizer.zero_grad()
            loss_fn(expected(IMAGES[0][start : start + 48]), targets[start : start + 48]).backward()
            optimizer.step()
        for num_items in (None, count):
            model = convolutions()
            fit(
                model,
                (IMAGES[0], targets),
                loss_fn=loss_fn,
                num_items=num_items,
                effective_batch=48,
                epochs=1,
                micro_batch=8,
            )
            assert apart(model, expected) < 1e-12

    def test_terms_outputs_and_a_norm(self) -> None:
        def step(model: nn.Module, batch: Any) -> Any:
            found = model(batch[0])
            return {"fit": cross_entropy(found, batch[1]), "size": 0.1 * found.square().mean()}

        results = []
        for micro_batch in (7, 50):
            model = convolutions()
            result = fit(model, training_step=step, clip_norm=0.3, micro_batch=micro_batch)
            results.append((model, [(report.loss, report.grad_norm) for report in result.history]))
        assert apart(results[0][0], results[1][0]) < 1e-12
        torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-12, atol=0)

    def test_an_accumulator(self) -> None:
        found = []
        for micro_batch in (50, 8):
            model = convolutions()
            accumulator = autoaccum.Accumulator(
                model, sgd(model.parameters()), loss_fn=cross_entropy, micro_batch=micro_batch, batch_norm="window"
            )
            for start, stop in ((0, 50), (50, 99), (99, 140), (140, 149)):
                accumulator.step((IMAGES[0][start:stop], IMAGES[1][start:stop]))
            found.append(model)
        assert apart(*found) < 1e-12

    def test_half_precision(self) -> None:
        """Statistics are of 32 bits, as PyTorch's are."""
        found = []
        for micro_batch in (8, 50):
            model = convolutions().float()
            result = fit(model, (IMAGES[0].float(), IMAGES[1]), precision="bf16", micro_batch=micro_batch, epochs=1)
            found.append([report.loss for report in result.history])
        torch.testing.assert_close(*found, rtol=0.02, atol=0)


class TestReplay:
    """Law 2: an OOM anywhere in a window leaves no mark."""

    @strides(101)
    def test_oom_at_every_operation(self, stride: int) -> None:
        def run(micro_batch: Any, operation: int | None = None) -> autoaccum.FitResult:
            model = convolutions(dropout=0.3)[:8]
            model.extend(nn.Sequential(nn.Linear(36, 3).double()))
            data = IMAGES[0][:29], IMAGES[1][:29]
            options = {"effective_batch": 20, "epochs": 1, "clip_norm": 0.5, "verify": False}
            if operation is None:
                return fit(model, data, micro_batch=micro_batch, **options)
            with oom_at(operation):
                return fit(model, data, micro_batch=micro_batch, **options)

        torch.manual_seed(0)
        with Operations() as operations:
            run(8)
        clean: dict[Any, list[torch.Tensor]] = {}
        replays = 0
        for operation in operations.every(stride, 5):
            torch.manual_seed(0)
            try:
                result = run(8, operation)
            except (errors.OptimizerOutOfMemoryError, errors.NothingFitsError, errors.LimitBelowModelError):
                continue
            plans = tuple(report.micro_batches for report in result.history)
            if plans not in clean:
                torch.manual_seed(0)
                clean[plans] = state_of(run(plans))
            assert same(state_of(result), clean[plans]), f"operation {operation} left a mark"
            replays += sum(report.replays for report in result.history)
        assert replays * stride > 1000
        assert len(clean) > 1

    def test_memory_is_that_of_a_micro_batch(self) -> None:
        """Trials measure what the passes take, so that the limit holds in all of them."""
        with simulated_memory("420KiB"):
            result = fit(convolutions(), effective_batch=60, steps=4, epochs=None)
        assert sum(report.replays for report in result.history) == 0
        assert max(report.peak_bytes or 0 for report in result.history) <= 420 * 1024
        assert max(result.history[-1].micro_batches) > 1


class TestResume:
    """Law 3: a run that is stopped after any window ends bit-identical to one that never was."""

    def test_after_each_window(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"effective_batch": 75, "epochs": 1, "micro_batch": 24}
        whole = fit(convolutions(0.3), **options)

        def stop(record: Record) -> None:
            if isinstance(record, autoaccum.events.StepReport):
                raise autoaccum.StopTraining

        for _ in range(4):
            result = fit(convolutions(0.3), **options, run_dir=tmp_path, checkpoint_every=1, callbacks=[stop])
        assert len(result.history) == 4
        assert same(state_of(result)[:-1], state_of(whole)[:-1])


class TestSaid:
    """What it costs is said, and refused where it is much."""

    def test_the_cost_is_announced_and_the_loss_verified(self) -> None:
        result = fit(convolutions(), micro_batch=8)
        (notice,) = [event for event in result.events if isinstance(event, Notice)]
        assert "4 BatchNorm layers" in notice.cause
        assert "about 5.5 times" in notice.consequence
        (verified,) = [event for event in result.events if isinstance(event, Verified)]
        assert verified.error < 1e-12
        assert not [event for event in fit(convolutions(), micro_batch=50).events if isinstance(event, Notice)]

    def test_more_layers_than_were_asked_for_are_refused(self) -> None:
        model = nn.Sequential(nn.Flatten(), *[nn.BatchNorm1d(98) for _ in range(6)], nn.Linear(98, 3)).double()
        with pytest.raises(errors.ArgumentError, match=r"at most 5 times, not 6.*'window:6'"):
            fit(model)
        fit(model, batch_norm="window:6", micro_batch=25, steps=1, epochs=None)

        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm, self.out = nn.BatchNorm1d(98), nn.Linear(98, 3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.out(self.norm(self.norm(x.flatten(1))))

        with pytest.raises(errors.ArgumentError, match=r"at most 1 times, not 2.*'window:2'"):
            fit(Twice().double(), batch_norm="window:1", micro_batch=25, verify=False)

    def test_a_model_that_calls_it_now_and_then_is_refused(self) -> None:
        class Sometimes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm, self.out = nn.BatchNorm1d(98), nn.Linear(98, 3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = x.flatten(1)
                return self.out(self.norm(x) if len(x) > 16 else x)

        with pytest.raises(errors.ArgumentError, match="as often for each micro-batch"):
            fit(Sometimes().double(), micro_batch=17, verify=False)

    def test_a_forward_that_writes_to_parameters_is_refused(self) -> None:
        class Writes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm, self.out = nn.BatchNorm1d(98), nn.Linear(98, 3)
                self.mean = nn.Parameter(torch.zeros(98), requires_grad=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.mean.data.mul_(0.9)
                with torch.no_grad():
                    self.mean.add_(0.1)
                return self.out(self.norm(x.flatten(1)))

        with pytest.raises(errors.ArgumentError, match="writes to no parameter"):
            fit(Writes().double(), micro_batch=17, verify=False)

    def test_an_effective_batch_that_follows_the_noise_is_refused(self) -> None:
        with pytest.raises(errors.ConflictingArgumentsError, match="batch_norm.*the noise scale"):
            fit(convolutions(), effective_batch="noise 8:50")

    @pytest.mark.parametrize("create_graph", [False, True])
    def test_a_loss_that_takes_gradients_through_it_is_refused(self, create_graph: bool) -> None:
        """They would go through the statistics of the whole window, which its micro-batches are only parts of."""

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            inputs = batch[0].clone().requires_grad_()
            found = model(inputs)
            (by_inputs,) = torch.autograd.grad(
                found.square().sum(), inputs, create_graph=create_graph, retain_graph=True
            )
            return cross_entropy(found, batch[1]) + by_inputs.square().mean()

        with pytest.raises(errors.ArgumentError, match="takes no gradients through BatchNorm"):
            fit(convolutions(), training_step=step, micro_batch=17, verify=False)

    @pytest.mark.parametrize(
        "options", [{"state": "window"}, {"noise_scale": True}, {"before_window": lambda batch: None}]
    )
    def test_what_cannot_stand_beside_it_is_refused(self, options: Any) -> None:
        with pytest.raises(errors.ConflictingArgumentsError, match=f"batch_norm.*{next(iter(options))}"):
            fit(convolutions(), **options)
