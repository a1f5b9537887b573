"""``check``: what it measures, that each kind of failure is named, and law 5: no trace."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from autoaccum import errors
from autoaccum.testing import simulated_memory
from autoaccum.training.check_report import CheckedCut, CheckReport, format_error
from tests.models import classes, mlp, noisy

DOUBLE = torch.float64


def check(model: nn.Module, batch: Any = None, **options: Any) -> CheckReport:
    batch = classes(12, DOUBLE) if batch is None else batch
    if "training_step" not in options:
        options = {"loss_fn": cross_entropy, **options}
    return autoaccum.check(model, batch, **{"device": "cpu", **options})


def linear(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 3, bias=bias, dtype=DOUBLE)


def cause(report: CheckReport) -> str:
    assert report.notice is not None
    return report.notice.cause


class TestWhatIsMeasured:
    def test_a_mean(self) -> None:
        report = check(mlp(DOUBLE))
        assert report.passed is True
        assert report.hypothesis == "items"
        assert report.error is not None
        assert report.error < 1e-14 < report.tolerance == 1e-9
        assert report.samples == 6
        assert [cut.sizes for cut in report.cuts] == [(1, 2, 3), (3, 2, 1), (2, 4)]
        assert max(cut.error for cut in report.cuts) == report.error == report.hypotheses["items"]
        assert list(report.hypotheses) == ["items", "samples", "sum"]
        assert set(report.tensors) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        assert list(report.tensors.values()) == sorted(report.tensors.values(), reverse=True)
        assert report.tensor == next(iter(report.tensors))
        assert report.notice is None
        assert report.seconds > 0

    def test_ignored_targets_are_a_mean_over_items_and_not_over_samples(self) -> None:
        inputs, targets = classes(12, DOUBLE)
        targets[::3] = -100
        report = check(mlp(DOUBLE), (inputs, targets))
        assert (report.passed, report.hypothesis) == (True, "items")
        assert report.hypotheses["samples"] > 0.01

    def test_a_sum_is_none_of_the_means(self) -> None:
        report = check(mlp(DOUBLE), loss_fn=lambda outputs, targets: cross_entropy(outputs, targets, reduction="sum"))
        assert (report.passed, report.hypothesis) == (True, "sum")
        assert list(report.hypotheses) == ["sum", "items", "samples"]
        # Of 1 + 2 + 3 samples the means take 1, 2 and 3 parts in six, or a third each.
        assert report.hypotheses["items"] > 0.1
        assert report.hypotheses["samples"] > 0.1

    def test_what_the_user_counts(self) -> None:
        weights = torch.rand(12, dtype=DOUBLE) + 0.5
        inputs, targets = classes(12, DOUBLE)

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            losses = cross_entropy(model(batch[0]), batch[1], reduction="none")
            return (losses * batch[2]).sum() / batch[2].sum().item() ** 1.5  # which no graph shows

        batch = inputs, targets, weights
        report = check(mlp(DOUBLE), batch, training_step=step)
        assert report.passed is False
        counted = check(mlp(DOUBLE), batch, training_step=step, num_items=lambda batch: batch[2].sum() ** 1.5)
        assert counted.passed is False, "the weight of a whole is not the sum of that of its parts"
        counted = check(
            mlp(DOUBLE),
            batch,
            training_step=lambda model, batch: step(model, batch) * batch[2].sum().item() ** 0.5,
            num_items=lambda batch: batch[2].sum(),
        )
        assert (counted.passed, counted.hypothesis) == (True, "num_items")

    def test_the_errors_are_those_of_the_gradients(self) -> None:
        """By hand: of the square of a mean, whose gradient is linear in no way."""
        inputs, targets = classes(6, DOUBLE)
        model = linear(bias=False)

        def loss_of(rows: slice) -> torch.Tensor:
            return model(inputs[rows]).sum(dim=1).mean() ** 2

        def gradient(loss: torch.Tensor) -> torch.Tensor:
            return torch.autograd.grad(loss, model.weight)[0]

        whole = gradient(loss_of(slice(0, 6)))
        parts = [(slice(0, 1), 1), (slice(1, 3), 2), (slice(3, 6), 3)]
        cut = sum((gradient(loss_of(rows)) * size / 6 for rows, size in parts), torch.zeros_like(whole))
        expected = float((cut - whole).norm() / whole.norm())
        report = check(model, (inputs, targets), training_step=lambda m, b: m(b[0]).sum(dim=1).mean() ** 2)
        assert report.passed is False
        assert report.hypotheses.keys() >= {"samples", "sum"}
        by_samples = dict(report.hypotheses)["samples"]
        assert by_samples >= expected > 0.01
        (first, *_) = [cut.error for cut in report.cuts]
        if report.hypothesis in ("samples", "items"):
            assert first == pytest.approx(expected, rel=1e-9)

    def test_float32_has_another_tolerance(self) -> None:
        report = check(mlp(), classes(12))
        assert report.passed
        assert report.tolerance == 2e-5

    def test_dropout_is_exact(self) -> None:
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3)).double()
        assert check(model).passed

    def test_two_samples_will_do(self) -> None:
        report = check(mlp(DOUBLE), classes(2, DOUBLE))
        assert report.passed
        assert {cut.sizes for cut in report.cuts} == {(1, 1)}

    def test_a_model_in_eval_mode_is_measured_in_training_mode_as_fit_would_train_it(self) -> None:
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        assert check(model.eval()).passed is False
        assert not any(module.training for module in model.modules())
        model.train()
        model[1].eval()
        assert check(model).passed

    def test_a_compiled_model_is_measured_eagerly_and_its_tensors_have_their_own_names(self) -> None:
        model = mlp(DOUBLE)

        def backend(*graph: Any) -> Any:
            pytest.fail("it was compiled")

        report = check(torch.compile(model, backend=backend))  # type: ignore[arg-type]
        assert report.passed
        assert "0.weight" in report.tensors


class TestWhatIsTaken:
    def test_any_batch(self) -> None:
        inputs, targets = classes(12, DOUBLE)

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            assert type(batch) is dict
            assert isinstance(batch["x"], np.ndarray)
            assert isinstance(batch["names"], list)
            assert batch["scale"] == 2
            return cross_entropy(model(torch.from_numpy(batch["x"])), batch["y"]) * batch["scale"]

        names = [f"sample {index}" for index in range(12)]
        batch = {"x": inputs.numpy(), "y": targets, "names": names, "scale": 2}
        assert check(mlp(DOUBLE), batch, training_step=step).passed

    def test_a_list_is_a_batch_as_a_data_loader_yields_it(self) -> None:
        loader = DataLoader(TensorDataset(*classes(12, DOUBLE)), batch_size=8)
        batch = next(iter(loader))
        assert isinstance(batch, list)
        assert check(mlp(DOUBLE), batch).passed

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_data(self, num_workers: int) -> None:
        dataset = TensorDataset(*classes(30, DOUBLE))
        loader = DataLoader(dataset, batch_size=1, num_workers=num_workers, timeout=9 if num_workers else 0)
        assert check(mlp(DOUBLE), dataset).passed
        report = check(mlp(DOUBLE), loader)
        assert report.passed
        assert report.samples == 6
        assert loader.num_workers == num_workers

    def test_a_batch_is_not_written_to(self) -> None:
        batch = classes(12, DOUBLE)
        before = copy.deepcopy(batch)

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            batch[0].mul_(2)
            return cross_entropy(model(batch[0]), batch[1])

        assert check(mlp(DOUBLE), batch, training_step=step).passed
        assert all(torch.equal(now, then) for now, then in zip(batch, before, strict=True))

    @pytest.mark.parametrize("num_samples", [0, 1])
    def test_of_one_sample_there_is_nothing_to_cut(self, num_samples: int) -> None:
        with pytest.raises(errors.ArgumentError, match="batch='.* sample.*': expected at least 2 samples. Pass more"):
            check(mlp(DOUBLE), classes(num_samples, DOUBLE))

    def test_batch_norm_needs_four(self) -> None:
        with pytest.raises(errors.ArgumentError, match="at least 4 samples.*two where there is BatchNorm"):
            check(noisy().double(), classes(3, DOUBLE))
        assert check(noisy().double(), classes(4, DOUBLE)).passed is False

    @pytest.mark.parametrize(
        ("batch", "options", "kind"),
        [
            (iter([classes(4)]), {}, errors.ArgumentTypeError),
            (3, {}, errors.ArgumentTypeError),
            ("digits", {}, errors.ArgumentTypeError),
            (torch.tensor(1.0), {}, errors.DataError),
            ((torch.ones(3, 8), torch.ones(4)), {}, errors.RaggedBatchError),
            (classes(4), {"collate_fn": list}, errors.ConflictingArgumentsError),
            (classes(4), {"num_items": 3}, errors.ArgumentTypeError),
            (classes(4), {"device": "gpu"}, errors.UnknownDeviceError),
            (classes(4), {"loss_fn": nn.CrossEntropyLoss}, errors.ArgumentTypeError),
            (classes(4), {"loss_fn": print, "training_step": print}, errors.ConflictingArgumentsError),
            (classes(4), {"loss_fn": lambda outputs, targets: outputs.sum() * float("nan")}, errors.NonFiniteLossError),
            (classes(4), {"loss_fn": lambda outputs, targets: outputs}, errors.NonScalarLossError),
            (classes(4), {"ranks": "all"}, errors.ArgumentError),
        ],
    )
    def test_bad_input(self, batch: Any, options: dict[str, Any], kind: type[Exception]) -> None:
        model = mlp()
        before = everything(model)
        with pytest.raises(kind):
            check(model, batch, **options)
        assert_same(everything(model), before)

    def test_no_model(self) -> None:
        with pytest.raises(errors.ArgumentTypeError):
            check(classes(4), mlp())  # type: ignore[arg-type]
        with pytest.raises(errors.NoTrainableParametersError):
            check(mlp().requires_grad_(False))

    def test_an_error_of_the_users_comes_out_as_it_is(self) -> None:
        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            raise KeyError("my own")

        with pytest.raises(KeyError, match="my own"):
            check(mlp(), classes(4), training_step=step)

    def test_a_loss_with_its_own_backward_is_refused(self) -> None:
        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            loss = cross_entropy(model(batch[0]), batch[1])
            loss.backward(retain_graph=True)
            return loss

        model = mlp()
        with pytest.raises(errors.LossSideEffectError):
            check(model, classes(4), training_step=step)
        assert all(p.grad is None for p in model.parameters())

    def test_not_within_a_run(self) -> None:
        def within(record: object) -> None:
            check(mlp())

        with pytest.raises(errors.AlreadyRunningError, match="check"):
            autoaccum.fit(
                mlp(), classes(8), effective_batch=4, loss_fn=cross_entropy, callbacks=[within], progress=False,
                cache=False, device="cpu",
            )  # fmt: skip


class Texts(torch.utils.data.Dataset[Any]):
    """Samples of different lengths."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(index + 2, 8, dtype=DOUBLE, generator=torch.Generator().manual_seed(index))


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


class Momentum(nn.Module):
    """A target that follows the model at each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = linear()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.target.weight.lerp_(self.net.weight.sin(), 0.5)
        return torch.as_tensor((self.net(inputs) - self.target(inputs)).square().mean())


class TestWhatIsNamed:
    """Each kind of failure by its cause."""

    def test_batch_norm(self) -> None:
        report = check(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double())
        assert report.passed is False
        assert cause(report).startswith("The model holds 1 BatchNorm layer in training mode: ")
        assert report.error is not None
        assert report.error > 0.01
        assert all(cut.error > report.tolerance for cut in report.cuts), "every cut is measured, not only the first"

    def test_samples_that_meet(self) -> None:
        def contrastive(model: nn.Module, batch: Any) -> torch.Tensor:
            outputs = model(batch[0])
            return cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))

        report = check(mlp(DOUBLE), training_step=contrastive)
        assert report.passed is False
        assert cause(report).startswith("The loss lets the samples of a batch meet")

    def test_padding(self) -> None:
        def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return (model(batch).sigmoid().mean(dim=1) ** 2).sum(dim=1).mean()

        report = check(linear(), Texts(), training_step=step, collate_fn=padded)
        assert report.passed is False
        assert cause(report).startswith("The model sees the padding")

    def test_state(self) -> None:
        report = check(Momentum(), classes(12, DOUBLE)[0], loss_fn=None)
        assert report.passed is False
        assert cause(report).startswith("A forward changes state")

    def test_hooks(self) -> None:
        model = linear()
        handle = model.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        report = check(model)
        assert report.passed is False
        assert cause(report).startswith("Hooks on parameters change the gradient")
        handle.remove()
        assert check(model).passed

    def test_what_nobody_knows(self) -> None:
        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            return cross_entropy(model(batch[0]), batch[1]) / (len(batch[0]) + 1)

        report = check(mlp(DOUBLE), training_step=step)
        assert report.passed is False
        assert report.notice is not None
        assert report.error is not None
        assert f" {format_error(report.error)} off" in report.notice.cause, "the error that is told is the report's"


class TestWhatCannotBeMeasured:
    def assert_unmeasured(self, report: CheckReport, why: str) -> None:
        assert report.passed is None
        assert not report.passed, "it does not pass for exact"
        assert why in cause(report)
        assert (report.error, report.hypothesis, report.tensor) == (None, None, None)
        assert (report.samples, report.cuts, report.hypotheses, report.tensors) == (0, (), {}, {})
        assert report.tolerance == 1e-9
        assert str(report).startswith("NOT MEASURED")

    def test_a_gradient_of_0(self) -> None:
        report = check(mlp(DOUBLE), loss_fn=lambda outputs, targets: outputs.sum() * 0)
        self.assert_unmeasured(report, "gradient of a few samples is 0")
        assert "autoaccum.check" not in str(report), "which is what was done"

    def test_hooks_that_run_after_a_backward_run_none(self) -> None:
        model = mlp(DOUBLE)
        called: list[int] = []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: called.append(1))
        self.assert_unmeasured(check(model), "register_post_accumulate_grad_hook")
        assert called == []

    def test_generators_that_are_not_torchs(self) -> None:
        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            return cross_entropy(model(batch[0]) * torch.tensor(np.random.rand(len(batch[0]), 1)), batch[1])

        self.assert_unmeasured(check(mlp(DOUBLE), training_step=step), "Python's or NumPy's generator")

    def test_too_little_memory(self) -> None:
        model, batch = linear(), classes(12, DOUBLE)

        def hungry(model: nn.Module, batch: Any) -> torch.Tensor:
            torch.empty(len(batch[0]) * 2**20)
            return cross_entropy(model(batch[0]), batch[1])

        with simulated_memory("15MiB"):
            assert check(model, batch, training_step=hungry).samples == 3
        with simulated_memory("5MiB"):
            self.assert_unmeasured(check(model, batch, training_step=hungry), "memory ran out")
        with simulated_memory(100), pytest.raises(errors.LimitBelowModelError):
            check(model, batch)


def everything(model: nn.Module) -> Any:
    """Whatever a check could leave a trace in, copied."""
    return copy.deepcopy(
        {
            "parameters": [p.detach() for p in model.parameters()],
            "gradients": [p.grad for p in model.parameters()],
            "buffers": list(model.buffers()),
            "training": [module.training for module in model.modules()],
            "torch": torch.get_rng_state(),
            "python": random.getstate()[1][:5],
            "numpy": np.random.get_state()[1],
        }
    )


def assert_same(now: Any, before: Any) -> None:
    torch.testing.assert_close(now, before, rtol=0, atol=0)


class Counting(nn.Module):
    """Everything that a forward may change: attributes, containers, parameters, buffers, random states."""

    def __init__(self, large: bool) -> None:
        super().__init__()
        self.net = noisy().double()
        # Beyond 16 MiB parameters are not copied in a run, unless a forward was seen to write to them.
        self.average = nn.Parameter(torch.zeros(2**21 + 5 if large else 5, dtype=DOUBLE), requires_grad=False)
        self.calls = 0
        self.log: list[float] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(random.random() + np.random.rand())
        self.average.data += 1
        if self.calls == 1:
            self.register_buffer("late", torch.ones(2))
        return torch.as_tensor(self.net(inputs))


class TestNoTrace:
    """Law 5."""

    @pytest.mark.parametrize("large", [False, True])
    @pytest.mark.parametrize("has_gradients", [False, True])
    def test_everything_is_as_it_was(self, large: bool, has_gradients: bool) -> None:
        model = Counting(large)
        model.net[5].eval()
        if has_gradients:
            cross_entropy(model.net(classes(8, DOUBLE)[0]), classes(8)[1]).backward()
        identities = [id(t) for t in (*model.parameters(), *model.buffers())]
        gradients = [id(p.grad) for p in model.parameters()]
        versions = [p.grad._version for p in model.parameters() if p.grad is not None]
        before = everything(model)
        check(model)
        assert_same(everything(model), before)
        assert (model.calls, model.log) == (0, [])
        assert [id(t) for t in (*model.parameters(), *model.buffers())] == identities
        assert [id(p.grad) for p in model.parameters()] == gradients
        assert [p.grad._version for p in model.parameters() if p.grad is not None] == versions

    def test_after_an_error_too(self) -> None:
        model = Counting(large=False)
        before = everything(model)

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            loss = cross_entropy(model(batch[0]), batch[1])
            if len(batch[0]) == 6:
                raise errors.StopTraining
            return loss

        with pytest.raises(errors.StopTraining):
            check(model, training_step=step)
        assert_same(everything(model), before)
        assert (model.calls, model.log) == (0, [])

    def test_lazy_layers_are_unbuilt_again(self) -> None:
        calls: list[int] = []
        head = nn.Linear(3, 3, dtype=DOUBLE)

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            calls.append(1)
            return cross_entropy(head(model(batch[0])), batch[1])

        model = nn.Sequential(nn.LazyLinear(4, dtype=DOUBLE), nn.ReLU(), nn.LazyLinear(3, dtype=DOUBLE))
        shown, state = repr(model), torch.get_rng_state()
        assert check(model, training_step=step).passed
        assert repr(model) == shown
        assert all(nn.parameter.is_lazy(p) for p in model.parameters())
        assert torch.equal(torch.get_rng_state(), state)
        assert calls == []
        assert head.weight.grad is None

    def test_what_a_function_holds(self) -> None:
        head = nn.Linear(3, 3, dtype=DOUBLE)
        scale = torch.ones(1, dtype=DOUBLE, requires_grad=True)
        scale.grad = kept = torch.full((1,), 3.0, dtype=DOUBLE)
        queue = torch.zeros(4)
        seen: list[int] = []
        count = 0

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            nonlocal count
            count += 1
            seen.append(count)
            queue.add_(1)
            return cross_entropy(head(model(batch[0])) * scale, batch[1])

        assert check(mlp(DOUBLE), training_step=step).passed
        assert (count, seen) == (0, [])
        assert not queue.any()
        assert head.weight.grad is None
        assert scale.grad is kept
        assert kept.item() == 3.0

    def test_training_goes_on_as_if_nothing_had_been(self) -> None:
        def train(checking: bool) -> list[torch.Tensor]:
            model = noisy()
            optimizer = torch.optim.AdamW(model.parameters())
            torch.manual_seed(7)
            for step in range(4):
                optimizer.zero_grad()
                cross_entropy(model(classes(8, seed=step)[0]), classes(8, seed=step)[1]).backward()
                if checking:  # between backward and step, where gradients count
                    check(model, classes(8, seed=step))
                optimizer.step()
            return [*model.parameters(), *model.buffers()]

        assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))

    def test_within_no_grad(self) -> None:
        with torch.no_grad():
            assert check(mlp(DOUBLE)).passed
            assert not torch.is_grad_enabled()

    def test_the_data_are_read_in_peace(self) -> None:
        class Batches:
            """What a dataset that draws as it is read does to random states."""

            def __iter__(self) -> Iterator[Any]:
                for _ in range(5):
                    torch.rand(3), random.random(), np.random.rand()
                    yield classes(4, DOUBLE)

        model = mlp(DOUBLE)
        before = everything(model)
        assert check(model, Batches()).passed
        assert_same(everything(model), before)


class TestReport:
    def test_is_plain_data(self) -> None:
        report = check(mlp(DOUBLE))
        document = json.loads(json.dumps(dataclasses.asdict(report)))
        assert document["passed"] is True
        assert document["cuts"][0] == {"sizes": [1, 2, 3], "error": report.cuts[0].error}
        assert document["hypotheses"] == dict(report.hypotheses)
        assert hash(report) == hash(dataclasses.replace(report))
        with pytest.raises(dataclasses.FrozenInstanceError):
            report.passed = False  # type: ignore[misc]

    def test_as_text(self) -> None:
        report = CheckReport(
            passed=True, hypothesis="items", error=3e-17, tolerance=1e-9, tensor="6", samples=6,
            cuts=(CheckedCut(sizes=(1, 2, 3), error=3e-17), CheckedCut(sizes=(2, 4), error=0.0)),
            hypotheses={"items": 3e-17, "sum": 0.5}, tensors={str(n): n * 5e-18 for n in range(6, -1, -1)},
            notice=None, seconds=0.012,
        )  # fmt: skip
        assert str(report) == (
            "EXACT: windows that are cut have the gradient of whole ones\n\n"
            "  the loss     a mean over the items that its graph counts\n"
            "  error        3e-17 of the gradient, where up to 1e-09 is rounding of 64 bits\n"
            "  measured on  6 samples, in 0.012 s\n\n"
            "  cut into      error\n"
            "  1 + 2 + 3     3e-17\n"
            "  2 + 4             0\n\n"
            "  the loss taken for                              error\n"
            "  a mean over the items that its graph counts     3e-17\n"
            "  a sum over samples                               50 %  not exact\n\n"
            "  parameter     error\n"
            "  6             3e-17\n"
            "  5           2.5e-17\n"
            "  4             2e-17\n"
            "  3           1.5e-17\n"
            "  2             1e-17\n"
            "  and 2 more, none of them worse"
        )

    def test_of_a_failure_it_begins_with_what_to_do(self) -> None:
        report = check(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double())
        lines = str(report).splitlines()
        assert lines[0].startswith("NOT EXACT: ")
        assert lines[2].startswith("  cause        The model holds 1 BatchNorm")
        assert any(line.startswith("  cure         Use GroupNorm") for line in lines)
        assert any(line.endswith("not exact") and "2 + 4" in line for line in lines)
        assert all(len(line) <= 100 for line in lines)

    @pytest.mark.parametrize(
        ("error", "text"),
        [
            (0.0, "0"),
            (3e-17, "3e-17"),
            (0.0009, "0.0009"),
            (0.273, "27 %"),
            (0.999, "100 %"),
            (5.214, "521 %"),
            (1e5, "1e+05"),
        ],
    )
    def test_errors_are_short(self, error: float, text: str) -> None:
        assert format_error(error) == text


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_targets_that_broadcast_are_found() -> None:
    """(n, 1) beside (n,): each sample meets all targets."""
    inputs = torch.randn(12, 8, dtype=DOUBLE)
    report = check(nn.Linear(8, 1, dtype=DOUBLE), (inputs, torch.randn(12, dtype=DOUBLE)), loss_fn=mse_loss)
    assert report.passed is False
