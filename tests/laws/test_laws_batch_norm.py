"""The laws for ``batch_norm``: results do not depend on how windows are cut, statistics of BatchNorm among them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

import autoaccum
from autoaccum import errors
from autoaccum.events import Notice, OutOfMemory, Planned, Record, Verified
from autoaccum.testing import oom_at, simulated_memory
from tests.faults import Operations, strides
from tests.models import same, state_of


def drawn(seed: int, *shape: int, below: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if below is not None:
        return torch.randint(below, shape, generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


IMAGES = drawn(0, 300, 2, 7, 7), drawn(1, 300, below=3)


class Samples(torch.utils.data.Dataset[Any]):
    """A list of them."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class ByGroups(nn.Module):
    """Ghost batch normalisation by its formulas, for the whole window at once: what results are compared with."""

    def __init__(self, like: Any, group: int) -> None:
        super().__init__()
        self.like, self.group = like, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bounds = list(range(0, len(x), self.group))
        if len(x) % self.group == 1 and len(x) > 1:
            bounds.pop()  # one sample joins the group before
        outputs = []
        for start, stop in zip(bounds, [*bounds[1:], len(x)], strict=True):
            rows = x[start:stop]
            over = [dim for dim in range(x.ndim) if dim != 1]
            shape = [1, -1] + [1] * (x.ndim - 2)
            mean, var = rows.mean(over), rows.var(over, unbiased=False)
            normalised = (rows - mean.view(shape)) / (var.view(shape) + self.like.eps).sqrt()
            if self.like.affine:
                normalised = normalised * self.like.weight.view(shape) + self.like.bias.view(shape)
            outputs.append(normalised)
            if self.like.track_running_stats:
                self.like.num_batches_tracked += 1
                factor = self.like.momentum or 1 / int(self.like.num_batches_tracked)
                count = rows.numel() / rows.shape[1]
                with torch.no_grad():
                    self.like.running_mean.lerp_(mean, factor)
                    self.like.running_var.lerp_(var * count / (count - 1), factor)
        return torch.cat(outputs)


def convolutions(dropout: float = 0.0) -> nn.Sequential:
    """Every kind of layer: with and without parameters, statistics, a momentum."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, bias=False),
        nn.BatchNorm2d(4, momentum=None),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(36, 6, bias=False),
        nn.BatchNorm1d(6, affine=False),
        nn.Tanh(),
        nn.Linear(6, 6, bias=False),
        nn.BatchNorm1d(6, track_running_stats=False),
        nn.Linear(6, 3),
    ).double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def fit(model: nn.Module, data: Any = IMAGES, **options: Any) -> autoaccum.FitResult:
    defaults: dict[str, Any] = {"loss_fn": cross_entropy, "optimizer": sgd, "effective_batch": 50, "epochs": 2}
    given = {"device": "cpu", "progress": False, "cache": False, "batch_norm": "ghost:8", **options}
    if "training_step" in given:
        defaults.pop("loss_fn")
    if "steps" in given:
        defaults.pop("epochs")
    return autoaccum.fit(model, data, **{**defaults, **given})


def apart(first: nn.Module, second: nn.Module) -> float:
    """The largest difference of any parameter, statistic or count."""
    states = zip(first.state_dict().items(), second.state_dict().values(), strict=True)
    found = [float((value - other).abs().max()) for (_, value), other in states]
    return max(found)


def by_hand(model: nn.Sequential, group: int, effective_batch: int, epochs: int) -> nn.Sequential:
    """Train with the formulas above, on whole windows, in an order that nobody shuffles."""
    whole = nn.Sequential(*(ByGroups(m, group) if isinstance(m, nn.modules.batchnorm._BatchNorm) else m for m in model))
    optimizer = sgd(model.parameters())
    for _ in range(epochs):
        for start in range(0, len(IMAGES[0]), effective_batch):
            inputs, targets = (tensor[start : start + effective_batch] for tensor in IMAGES)
            optimizer.zero_grad()
            cross_entropy(whole(inputs), targets).backward()
            optimizer.step()
    return model


class TestExactness:
    """Law 1: the gradient, and with it all that is trained, is the same whatever the plan."""

    @pytest.mark.parametrize("micro_batch", [8, 16, 23, 50, 300])
    @pytest.mark.parametrize("effective_batch", [50, 49, 48, 97, 53])
    def test_it_is_what_the_formulas_give_for_whole_windows(self, effective_batch: int, micro_batch: int) -> None:
        expected = by_hand(convolutions(), 8, effective_batch, 2)
        model = convolutions()
        result = fit(
            model, effective_batch=effective_batch, micro_batch=min(micro_batch, effective_batch), shuffle=False
        )
        assert apart(model, expected) < 1e-12
        groups = [-(-size // 8) - (size % 8 == 1) for report in result.history for size in [report.effective_batch]]
        assert model[1].num_batches_tracked == sum(groups)
        for report in result.history:
            assert all(size % 8 == 0 for size in report.micro_batches[:-1])
            assert min(report.micro_batches) > 1

    def test_tight_and_loose_limits_give_the_same_weights_after_50_windows(self) -> None:
        found = []
        for limit in ("420KiB", "64MiB"):
            model = convolutions()
            with simulated_memory(limit):
                result = fit(model, effective_batch=72, epochs=None, steps=50, micro_batch="auto")
            found.append((model, {size for report in result.history for size in report.micro_batches}))
            assert len(result.history) == 50
        (tight, small), (loose, large) = found
        assert max(small) < max(large) == 72
        assert all(size % 8 == 0 or size == 12 for size in small | large)  # 300 samples leave 12
        assert apart(tight, loose) < 1e-10

    def test_samples_of_several_lengths(self) -> None:
        """Windows are sorted by length, and groups are of neighbours in that order."""
        samples = [(drawn(seed, 3 + seed * 7 % 11), drawn(seed + 100, 3)) for seed in range(90)]

        def collate(batch: Any) -> Any:
            inputs = nn.utils.rnn.pad_sequence([one for one, _ in batch], batch_first=True)
            return inputs, torch.stack([target for _, target in batch])

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            inputs, targets = batch
            sums = torch.stack([inputs.sum(1), inputs.square().sum(1)], dim=1)  # of which padding is no part
            return mse_loss(model(sums), targets)

        found = []
        for limit in ("40KiB", "64MiB"):
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Linear(2, 30, bias=False), nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 3)
            ).double()
            with simulated_memory(limit):
                result = fit(model, Samples(samples), training_step=step, collate_fn=collate, effective_batch=45)
            found.append((model, max(max(report.micro_batches) for report in result.history)))
            assert not [event for event in result.events if isinstance(event, Notice)]
        assert found[0][1] < found[1][1]
        assert apart(found[0][0], found[1][0]) < 1e-12

    @pytest.mark.parametrize("views", [2, 3])
    def test_several_rows_for_each_sample(self, views: int) -> None:
        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            inputs, targets = batch
            copies = torch.stack([inputs + 0.1 * view for view in range(views)], dim=1)
            return cross_entropy(model(copies.flatten(0, 1)), targets.repeat_interleave(views))

        first, second = convolutions(), convolutions()
        fit(first, training_step=step, micro_batch=8)
        fit(second, training_step=step, micro_batch=50)
        assert apart(first, second) < 1e-12

    def test_calls_that_no_layer_makes(self) -> None:
        class Functional(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(2, 5, bias=False)
                self.register_buffer("mean", torch.zeros(5))
                self.register_buffer("var", torch.ones(5))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = nn.functional.batch_norm(self.linear(x), self.mean, self.var, training=self.training)
                x = torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False)
                return nn.functional.batch_norm(x, None, None, training=True)

        found = []
        for micro_batch in (8, 24, 50):
            torch.manual_seed(0)
            model = Functional().double()
            data = IMAGES[0][:, :, 0, 0], IMAGES[1]
            result = fit(model, data, micro_batch=micro_batch)
            assert not [event for event in result.events if isinstance(event, Notice)]
            found.append(model)
        assert apart(found[0], found[2]) < 1e-12
        assert apart(found[1], found[2]) < 1e-12
        assert float(found[0].mean.abs().max()) > 0

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_layers_that_are_checkpointed(self, reentrant: bool) -> None:
        """What a backward computes once more moves no statistics."""

        class Checkpointed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = convolutions()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = x.clone().requires_grad_() if reentrant else x
                return self.layers[10:](checkpoint(self.layers[:10], x, use_reentrant=reentrant))

        plain = convolutions()
        fit(plain, micro_batch=50)
        for micro_batch in (8, 50):
            model = Checkpointed()
            fit(model, micro_batch=micro_batch)
            assert apart(model.layers, plain) < 1e-12

    def test_a_layer_that_is_called_twice(self) -> None:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear, self.norm = nn.Linear(98, 6, bias=False), nn.BatchNorm1d(6)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.norm(self.norm(self.linear(x.flatten(1))).tanh())

        found = []
        for micro_batch in (50, 8):
            torch.manual_seed(0)
            model = Twice().double()
            fit(model, micro_batch=micro_batch, epochs=1)
            found.append(model)
        # Within a group both calls move them, and no other call comes between.
        assert found[0].norm.num_batches_tracked == found[1].norm.num_batches_tracked == 84
        assert apart(*found) < 1e-12

    def test_an_accumulator(self) -> None:
        found = []
        for micro_batch in (50, 8):
            model = convolutions()
            accumulator = autoaccum.Accumulator(
                model, sgd(model.parameters()), loss_fn=cross_entropy, micro_batch=micro_batch, batch_norm="ghost:8"
            )
            for start, stop in ((0, 50), (50, 99), (99, 140), (140, 141 + 8)):
                accumulator.step((IMAGES[0][start:stop], IMAGES[1][start:stop]))
            found.append(model)
        assert apart(*found) < 1e-12


class TestFrozen:
    """Running statistics are what training normalises by, and stay."""

    @pytest.mark.parametrize("micro_batch", [1, 7, 50])
    def test_it_is_training_with_these_layers_in_eval_mode(self, micro_batch: int) -> None:
        start = convolutions()[:-2]
        fit(start, batch_norm="ghost:8", epochs=1)
        model, expected = deepcopy(start), deepcopy(start)
        expected.train()
        for layer in expected.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.eval()
        result = fit(model, batch_norm="frozen", micro_batch=micro_batch)
        fit(expected, batch_norm="micro", micro_batch=50)
        assert apart(model, expected) < 1e-12
        assert torch.equal(model[1].running_mean, start[1].running_mean)
        assert model[1].num_batches_tracked == start[1].num_batches_tracked
        assert not torch.equal(model[1].weight, start[1].weight)
        assert model[1].training
        assert not [event for event in result.events if isinstance(event, Notice)]

    def test_without_statistics_there_are_none_to_freeze(self) -> None:
        with pytest.raises(errors.ArgumentError, match="track_running_stats=True"):
            fit(convolutions(), batch_norm="frozen")


class TestReplay:
    """Law 2: an OOM anywhere in a window leaves no mark."""

    @strides(13)
    def test_oom_at_every_operation(self, stride: int) -> None:
        def run(micro_batch: Any, operation: int | None = None) -> autoaccum.FitResult:
            model = convolutions(dropout=0.3)
            data = IMAGES[0][:53], IMAGES[1][:53]
            options = {
                "effective_batch": 32,
                "epochs": 1,
                "clip_norm": 0.5,
                "verify": False,
                "micro_batch": micro_batch,
            }
            if operation is None:
                return fit(model, data, **options)
            with oom_at(operation):
                return fit(model, data, **options)

        with Operations() as operations:
            run(16)
        clean: dict[Any, list[torch.Tensor]] = {}
        replays = 0
        for operation in operations.every(stride, 5):
            try:
                result = run(16, operation)
            except (errors.OptimizerOutOfMemoryError, errors.NothingFitsError, errors.LimitBelowModelError):
                continue
            plans = tuple(report.micro_batches for report in result.history)
            if plans not in clean:
                clean[plans] = state_of(run(plans))
            assert same(state_of(result), clean[plans]), f"operation {operation} left a mark"
            replays += sum(report.replays for report in result.history)
        print(f"{replays} faults replayed, of {len(operations.names)} operations, plans {sorted(clean)}")
        assert replays * stride > 400
        assert ((8, 8, 8, 8), (8, 8, 5)) in clean

    def test_a_group_that_does_not_fit_is_named(self) -> None:
        with (
            simulated_memory("400KiB"),
            pytest.raises(errors.NothingFitsError, match="ghost:48.*a whole group") as caught,
        ):
            fit(convolutions(), batch_norm="ghost:48", effective_batch=96, verify=False)
        assert (caught.value.micro_batch, caught.value.group) == (48, 48)

    @pytest.mark.parametrize("operation", [400, 900])
    def test_an_error_leaves_the_model_the_users_own(self, operation: int) -> None:
        model = convolutions()
        names, kinds = list(model.state_dict()), [type(layer) for layer in model.modules()]
        attributes = [set(vars(layer)) for layer in model.modules()]

        def stop(inputs: Any, targets: Any) -> torch.Tensor:
            if torch.is_grad_enabled() and model[1].num_batches_tracked > 20:
                raise KeyError("of the user")
            return cross_entropy(inputs, targets)

        with pytest.raises(KeyError):
            fit(model, loss_fn=stop, micro_batch=min(operation // 100 * 8, 50))
        assert list(model.state_dict()) == names
        assert [type(layer) for layer in model.modules()] == kinds
        assert [set(vars(layer)) for layer in model.modules()] == attributes
        assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules())
        assert model[1](IMAGES[0].repeat(1, 2, 1, 1)).std() > 0.9  # of all of them, as PyTorch has it
        assert not torch.overrides._get_current_function_mode_stack()


class TestResume:
    """Law 3: a run that is stopped after any window ends bit-identical to one that never was."""

    def test_after_each_window(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"effective_batch": 50, "epochs": 1, "micro_batch": 24}
        whole = fit(convolutions(0.3), **options)

        def stop(record: Record) -> None:
            if isinstance(record, autoaccum.events.StepReport):
                raise autoaccum.StopTraining

        for _ in range(10):
            result = fit(convolutions(0.3), **options, run_dir=tmp_path, checkpoint_every=1, callbacks=[stop])
            if len(result.history) == 6:
                break
        assert len(result.history) == 6
        assert same(state_of(result)[:-1], state_of(whole)[:-1])

    def test_other_statistics_are_another_run(self, tmp_path: Path) -> None:
        fit(convolutions(), run_dir=tmp_path, steps=1, checkpoint_every=1)
        with pytest.raises(errors.ResumeError, match="batch_norm"):
            fit(convolutions(), run_dir=tmp_path, steps=2, batch_norm="ghost:16")


class TestVerified:
    """Law 8: what is measured is that cut windows, of whole groups, have the gradient of whole ones."""

    def test_the_figure_is_that_of_a_gradient_that_is_right(self) -> None:
        result = fit(convolutions(), micro_batch=8)
        (verified,) = [event for event in result.events if isinstance(event, Verified)]
        assert verified.error < 1e-12
        assert not [event for event in result.events if isinstance(event, Notice)]

    def test_it_is_measured_where_two_groups_of_that_size_do_not_fit_at_once(self) -> None:
        with simulated_memory("440KiB"):
            result = fit(convolutions(), effective_batch=96, batch_norm="ghost:32")
        assert {size for report in result.history for size in report.micro_batches} == {32, 12}
        (verified,) = [event for event in result.events if isinstance(event, Verified)]
        assert verified.error < 1e-12

    @pytest.mark.filterwarnings("ignore:The model holds 1 BatchNorm")
    def test_a_layer_that_nobody_sees_is_announced(self) -> None:
        class ByItself(nn.BatchNorm1d):
            def forward(self, input: torch.Tensor) -> torch.Tensor:
                if not self.training:
                    return super().forward(input)
                return (input - input.mean(0)) / (input.var(0) + self.eps).sqrt()

        model = nn.Sequential(nn.Flatten(), nn.Linear(98, 6), ByItself(6), nn.Linear(6, 3)).double()
        result = fit(model, micro_batch=8)
        (notice,) = [event for event in result.events if isinstance(event, Notice)]
        assert "not all of which are seen to normalise by batch_norm='ghost:8'" in notice.cause

    @pytest.mark.weighted
    @pytest.mark.filterwarnings("ignore:The (model holds|loss is neither)")
    def test_what_is_announced_of_micro_batches_names_this_cure(self) -> None:
        result = fit(convolutions()[:-2], micro_batch=8, batch_norm="micro")
        (notice,) = [event for event in result.events if isinstance(event, Notice)]
        assert "batch_norm='ghost:32'" in notice.cure


class TestPlans:
    """Law 6: micro-batches of whole groups, and none larger than what fits."""

    @pytest.mark.parametrize("limit", ["300KiB", "400KiB", "500KiB", "1MiB"])
    def test_the_search_knows_the_groups(self, limit: str) -> None:
        with simulated_memory(limit) as device:
            result = fit(convolutions(), effective_batch=150, epochs=4)
            assert device.peak <= device.limit
        for report in result.history:
            assert all(size % 8 == 0 for size in report.micro_batches[:-1])
        planned = [event for event in result.events if isinstance(event, Planned)]
        assert planned
        assert all(size % 8 in (0, 6) for size in planned[-1].sizes)
        assert not [event for event in result.events if isinstance(event, OutOfMemory) and event.micro_batch <= 8]
