"""The laws of docs/laws.md, for losses over the whole window: the gradient is that of one backward through all of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, logsigmoid, normalize, relu

import autoaccum
from autoaccum.errors import OptimizerOutOfMemoryError
from autoaccum.events import Notice, OutOfMemory, Resumed, Verified
from autoaccum.testing import oom_at, simulated_memory
from autoaccum.window.two_passes import TwoPasses
from tests.devices import DEVICE, there
from tests.faults import Operations, strides
from tests.models import relative_error, same, state_of

WINDOW = 12
F64 = torch.float64


class Towers(nn.Module):
    """Two towers, of which dropout, a counting buffer and a learnable scale are parts."""

    def __init__(self, dropout: float = 0.0, dtype: torch.dtype = F64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.image = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 5))
        self.text = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 5))
        self.log_scale = nn.Parameter(torch.tensor(0.7))
        self.bias = nn.Parameter(torch.tensor(-0.5))
        self.register_buffer("calls", torch.zeros(()))
        self.to(dtype)

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {
            "image": normalize(self.image(batch["image"]), dim=1),
            "text": normalize(self.text(batch["text"]), dim=1),
        }


def data(num_samples: int = 31, dtype: torch.dtype = F64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "image": torch.randn(num_samples, 8, generator=generator, dtype=dtype),
        "text": torch.randn(num_samples, 6, generator=generator, dtype=dtype),
        "label": torch.arange(num_samples) % 3,
        "relevance": torch.rand(num_samples, generator=generator, dtype=dtype),
    }


def embed(model: Any, batch: Any) -> Any:
    return model(batch)


# The losses: each is made for a model, whose parameters it may use.

MakeLoss = Callable[[Any], Callable[..., torch.Tensor]]


def info_nce(model: Any) -> Callable[..., torch.Tensor]:
    return lambda e: cross_entropy(
        e["image"] @ e["text"].T / 0.1, torch.arange(len(e["image"]), device=e["text"].device)
    )


def clip(model: Any) -> Callable[..., torch.Tensor]:
    def loss(e: Any, batch: Any) -> torch.Tensor:
        logits = model.log_scale.exp() * e["image"] @ e["text"].T
        own = torch.arange(len(logits), device=logits.device)
        return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2

    return loss


def sig_lip(model: Any) -> Callable[..., torch.Tensor]:
    def loss(e: Any) -> torch.Tensor:
        logits = model.log_scale.exp() * e["image"] @ e["text"].T + model.bias
        signs = 2 * torch.eye(len(logits), dtype=logits.dtype, device=logits.device) - 1
        return -logsigmoid(signs * logits).sum() / len(logits)

    return loss


def sup_con(model: Any) -> Callable[..., torch.Tensor]:
    def loss(e: Any, batch: Any) -> torch.Tensor:
        z, label = torch.cat([e["image"], e["text"]]), batch["label"].repeat(2)
        itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
        logits = (z @ z.T / 0.2).masked_fill(itself, -torch.inf)
        positives = (label[:, None] == label) & ~itself
        chances = logits.log_softmax(1).masked_fill(~positives, 0)
        return -(chances.sum(1) / positives.sum(1)).mean()

    return loss


def triplet(model: Any) -> Callable[..., torch.Tensor]:
    """Hard mining: the farthest of the same label, the nearest of another."""

    def loss(e: Any, batch: Any) -> torch.Tensor:
        z, label = e["image"], batch["label"]
        far = (2 - 2 * z @ z.T + 1e-9).sqrt()
        is_same = label[:, None] == label
        positive = far.masked_fill(~is_same, -1).amax(1)
        negative = far.masked_fill(is_same, 9).amin(1)
        return relu(positive - negative + 0.5).mean()

    return loss


def barlow_twins(model: Any) -> Callable[..., torch.Tensor]:
    def loss(e: Any) -> torch.Tensor:
        a, b = ((z - z.mean(0)) / (z.std(0) + 1e-6) for z in (e["image"], e["text"]))
        cross = a.T @ b / len(a)
        off = cross - torch.diag(cross.diagonal())
        return (1 - cross.diagonal()).square().sum() + 0.01 * off.square().sum()

    return loss


def vic_reg(model: Any) -> Callable[..., torch.Tensor]:
    def loss(e: Any) -> torch.Tensor:
        total = (e["image"] - e["text"]).square().mean()
        for z in e.values():
            centred = z - z.mean(0)
            covariance = centred.T @ centred / (len(z) - 1)
            off = covariance - torch.diag(covariance.diagonal())
            total = total + relu(1 - (z.var(0) + 1e-4).sqrt()).mean() + off.square().sum() / z.shape[1]
        return total

    return loss


def prototypes(model: Any) -> Callable[..., torch.Tensor]:
    """Support samples come first; the others are told by the means of their classes."""

    def loss(e: Any, batch: Any) -> torch.Tensor:
        z, label = e["image"], batch["label"]
        half = len(z) // 2
        means = torch.stack([z[:half][label[:half] == one].mean(0) for one in range(3)])
        return cross_entropy(-torch.cdist(z[half:], means).square(), label[half:])

    return loss


def list_net(model: Any) -> Callable[..., torch.Tensor]:
    def loss(e: Any, batch: Any) -> torch.Tensor:
        scores = (e["image"] * e["text"]).sum(1)
        return -(batch["relevance"].softmax(0) * scores.log_softmax(0)).sum()

    return loss


LOSSES: dict[str, MakeLoss] = {
    one.__name__: one
    for one in (info_nce, clip, sig_lip, sup_con, triplet, barlow_twins, vic_reg, prototypes, list_net)
}


class Recorder(torch.optim.SGD):
    """Remembers the gradient of each step, as one vector."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.gradients: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:
        self.gradients.append(gradient_of(self.param_groups[0]["params"]))
        super().step(closure)


def gradient_of(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])


def fit(model: Any, make: MakeLoss = clip, **options: Any) -> autoaccum.FitResult:
    arguments: dict[str, Any] = {
        "data": data(),
        "effective_batch": WINDOW,
        "optimizer": Recorder,
        "shuffle": False,
        "device": DEVICE,
        "progress": False,
        "strict": True,
        **options,
    }
    return autoaccum.fit(model, loss_scope="window", embed=embed, loss_fn=make(model), **arguments)


def big_batch(model: Any, make: MakeLoss, result: autoaccum.FitResult, *, cuts: bool) -> list[torch.Tensor]:
    """The gradients of a loop of one backward a window: through the joined forwards of the same cuts, or of all."""
    loss_fn, everything = make(model), there(data())
    optimizer, start = Recorder(p for p in model.parameters() if p.requires_grad), 0
    takes_batch = loss_fn.__code__.co_argcount == 2
    for report in result.history:
        window = {name: value[start : start + sum(report.micro_batches)] for name, value in everything.items()}
        start += sum(report.micro_batches)
        found, begin = [], 0
        for size in report.micro_batches if cuts else (WINDOW + 1,):
            found.append(embed(model, {name: value[begin : begin + size] for name, value in window.items()}))
            begin += size
        embeddings = {name: torch.cat([one[name] for one in found]) for name in found[0]}
        optimizer.zero_grad()
        loss = loss_fn(embeddings, window) if takes_batch else loss_fn(embeddings)
        loss.backward()
        assert report.loss == pytest.approx(loss.item(), rel=1e-9)
        optimizer.step()
    return optimizer.gradients


def check(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], bound: float = 1e-12) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < bound


class TestExactness:
    """Law 1: the gradient that reaches the optimizer is that of the loss over the whole window."""

    @pytest.mark.parametrize("micro_batch", [1, 3, 5, WINDOW, "auto"])
    @pytest.mark.parametrize("name", LOSSES)
    def test_without_dropout_it_is_that_of_one_forward(self, name: str, micro_batch: Any) -> None:
        model = Towers()
        big = there(deepcopy(model))
        result = fit(model, LOSSES[name], micro_batch=micro_batch)
        assert [sum(report.micro_batches) for report in result.history] == [12, 12, 7]
        check(result.optimizer.gradients, big_batch(big, LOSSES[name], result, cuts=False))  # type: ignore[attr-defined]
        if micro_batch == 1:
            assert all(event.passed for event in result.events if isinstance(event, Verified))
            assert not [event for event in result.events if isinstance(event, Notice)]

    @pytest.mark.parametrize("micro_batch", [1, 3, 5, WINDOW])
    @pytest.mark.parametrize("name", LOSSES)
    def test_with_dropout_it_is_that_of_the_joined_forwards_of_the_same_cuts(self, name: str, micro_batch: int) -> None:
        """Random states of the first pass are replayed in the second; buffers move once per micro-batch."""
        model = Towers(0.3)
        big = there(deepcopy(model))
        result = fit(model, LOSSES[name], micro_batch=micro_batch, verify=False, strict=False, seed=7)
        torch.manual_seed(7)
        check(result.optimizer.gradients, big_batch(big, LOSSES[name], result, cuts=True))  # type: ignore[attr-defined]
        assert model.calls == big.calls == sum(len(report.micro_batches) for report in result.history)

    def test_with_dropout_measuring_leaves_no_trace_and_passes(self) -> None:
        measured, plain = fit(Towers(0.3), micro_batch=5), fit(Towers(0.3), micro_batch=5, verify=False, strict=False)
        assert same(state_of(measured), state_of(plain))
        assert [event.passed for event in measured.events if isinstance(event, Verified)] == [True]

    def test_clipped_after_the_whole_window(self) -> None:
        model = Towers()
        big = there(deepcopy(model))
        result = fit(model, micro_batch=5, clip_norm=1e-3)
        window = {name: value[:WINDOW] for name, value in there(data()).items()}
        clip(big)(embed(big, window), window).backward()
        first = gradient_of(list(big.parameters()))
        assert result.history[0].grad_norm == pytest.approx(float(first.norm()), rel=1e-12)
        assert float(result.optimizer.gradients[0].norm()) == pytest.approx(1e-3, rel=1e-3)  # type: ignore[attr-defined]

    def test_a_loss_module_has_parameters_of_its_own(self) -> None:
        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.log_scale = nn.Parameter(torch.tensor(0.3, dtype=F64))

            def forward(self, e: Any) -> torch.Tensor:
                logits = self.log_scale.exp() * e["image"] @ e["text"].T
                return cross_entropy(logits, torch.arange(len(logits), device=logits.device))

        found = []
        for micro_batch in (5, WINDOW):
            model, loss = Towers(), Scaled()
            fit(model, lambda _, loss=loss: loss, micro_batch=micro_batch)
            found.append([*model.parameters(), *loss.parameters()])
            assert loss.log_scale != 0.3
        for one, other in zip(*found, strict=True):
            assert relative_error(one.detach(), other.detach()) < 1e-12

    def test_spectral_norms_move_once_per_micro_batch_and_the_second_pass_finds_the_same(self) -> None:
        def made() -> Any:
            model = Towers()
            nn.utils.parametrizations.spectral_norm(model.image[3])
            return model

        model, big = made(), there(made())
        result = fit(model, micro_batch=5, verify=False, strict=False)
        check(result.optimizer.gradients, big_batch(big, clip, result, cuts=True))  # type: ignore[attr-defined]
        for one, other in zip(model.buffers(), big.buffers(), strict=True):
            assert relative_error(one, other) < 1e-12

    def test_a_momentum_encoder_moves_once_per_micro_batch(self) -> None:
        """It is no buffer, and no gradient tells of it: the first window shows that forwards write to it."""

        class Momentum(Towers):
            def __init__(self) -> None:
                super().__init__()
                self.slow = deepcopy(self.text).requires_grad_(False)

            def forward(self, batch: Any) -> dict[str, torch.Tensor]:
                for slow, fast in zip(self.slow.parameters(), self.text.parameters(), strict=True):
                    slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
                return super().forward(batch) | {"text": normalize(self.slow(batch["text"]), dim=1)}

        model = Momentum()
        big = there(deepcopy(model))
        result = fit(model, micro_batch=5, verify=False, strict=False)
        check(result.optimizer.gradients, big_batch(big, clip, result, cuts=True))  # type: ignore[attr-defined]
        for one, other in zip(model.parameters(), big.parameters(), strict=True):
            assert relative_error(one.detach(), other.detach()) < 1e-12

    def test_generators_of_the_users_own_are_replayed(self) -> None:
        def noisy_by(noise: torch.Generator) -> Callable[..., Any]:
            def noisy(called: Any, batch: Any) -> Any:
                found = called(batch)
                drawn = torch.randn(found["image"].shape, generator=noise, dtype=F64, device=noise.device)
                return found | {"image": found["image"] * (1 + 0.1 * drawn)}

            return noisy

        device, model = there(torch.zeros(1)).device, Towers()
        big = there(deepcopy(model))
        noise = torch.Generator(device).manual_seed(1)
        result = autoaccum.fit(
            model, data(), effective_batch=WINDOW, loss_scope="window", embed=noisy_by(noise), loss_fn=clip(model),
            micro_batch=4, optimizer=Recorder, shuffle=False, verify=False, device=DEVICE, progress=False,
        )  # fmt: skip
        again, window = torch.Generator(device).manual_seed(1), there(data())
        found = [noisy_by(again)(big, {n: v[begin : begin + 4] for n, v in window.items()}) for begin in (0, 4, 8)]
        clip(big)({name: torch.cat([one[name] for one in found]) for name in found[0]}, None).backward()
        check(result.optimizer.gradients[:1], [gradient_of(list(big.parameters()))])  # type: ignore[attr-defined]
        for report in result.history[1:]:  # whose micro-batches draw once each, too
            for size in report.micro_batches:
                torch.randn(size, 5, generator=again, dtype=F64, device=device)
        assert torch.equal(again.get_state(), noise.get_state())

    @pytest.mark.parametrize(("precision", "bound"), [("bf16", 2e-2), ("fp16", 2e-3)])
    def test_under_autocast(self, precision: Any, bound: float) -> None:
        def last(micro_batch: int) -> torch.Tensor:
            model = Towers(dtype=torch.float32)
            result = fit(
                model, data=data(dtype=torch.float32), micro_batch=micro_batch, precision=precision, strict=False
            )
            return result.optimizer.gradients[0]  # type: ignore[attr-defined, no-any-return]

        scale = 1.0
        assert relative_error(last(5) * scale, last(WINDOW)) < bound

    @pytest.mark.parametrize("state", ["micro-batch", "window"])
    def test_schedules_and_state_of_the_window(self, state: Any) -> None:
        model = Towers()
        big = there(deepcopy(model))
        result = fit(model, micro_batch=5, effective_batch="5, 2:13", state=state, epochs=1)
        assert [sum(report.micro_batches) for report in result.history] == [5, 5, 13, 8]
        check(result.optimizer.gradients, big_batch(big, clip, result, cuts=False))  # type: ignore[attr-defined]
        assert model.calls == (4 if state == "window" else sum(len(report.micro_batches) for report in result.history))

    def test_an_accumulator_takes_it_too(self) -> None:
        found = []
        for micro_batch in (5, WINDOW):
            model = there(Towers())
            optimizer = Recorder(model.parameters())
            accumulator = autoaccum.Accumulator(
                model, optimizer, loss_scope="window", embed=embed, loss_fn=clip(model), micro_batch=micro_batch
            )
            loss = accumulator.step({name: value[:WINDOW] for name, value in data().items()})
            assert sum(accumulator.micro_batches) == WINDOW
            found.append(torch.cat([optimizer.gradients[0], loss.reshape(1)]))
        assert relative_error(found[0], found[1]) < 1e-12

    def test_outputs_beside_the_loss_are_those_of_the_window(self) -> None:
        def with_outputs(model: Any) -> Any:
            def loss(e: Any) -> Any:
                return info_nce(model)(e), {"norm": e["image"].square().sum() / len(e["image"]), "rows": e["text"]}

            return loss

        result = fit(Towers(), with_outputs, micro_batch=5)
        assert result.history[0].outputs["norm"] == pytest.approx(1.0)
        assert result.history[0].outputs["rows"].shape == (12, 5)


class TestVerified:
    """Law 8: that embeddings do not depend on their micro-batch is measured, and said where they do."""

    def test_embeddings_that_depend_on_the_others_are_announced(self) -> None:
        class Centred(Towers):
            def forward(self, batch: Any) -> dict[str, torch.Tensor]:
                return {name: z - z.mean(0) for name, z in super().forward(batch).items()}

        with pytest.warns(autoaccum.errors.AutoaccumWarning):
            result = fit(Centred(), micro_batch=5, strict=False)
        assert [event.passed for event in result.events if isinstance(event, Verified)] == [False]
        with pytest.raises(autoaccum.errors.NotExactError):
            fit(Centred(), micro_batch=5)

    def test_batch_norm_is_named(self) -> None:
        model = Towers()
        model.image.insert(1, nn.BatchNorm1d(16).double())
        with pytest.warns(autoaccum.errors.AutoaccumWarning, match="BatchNorm"):
            result = fit(model, micro_batch=5, strict=False)
        assert [event.passed for event in result.events if isinstance(event, Verified)] == [False]
        (notice,) = [event for event in result.events if isinstance(event, Notice)]
        assert "autoaccum.convert_batch_norm" in notice.cure
        assert "batch_norm=" not in notice.cure, "which is refused beside such a loss"


class SGD(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)


def trainer(micro_batch: Any, **options: Any) -> autoaccum.Trainer:
    model = Towers(0.3, torch.float32)
    arguments: dict[str, Any] = {
        "data": data(23, torch.float32),
        "effective_batch": WINDOW,
        "optimizer": SGD,
        "clip_norm": 0.5,
        "progress": False,
        "device": DEVICE,
        **options,
    }
    return autoaccum.Trainer(
        model, loss_scope="window", embed=embed, loss_fn=clip(model), micro_batch=micro_batch, **arguments
    )


_clean: dict[Any, list[torch.Tensor]] = {}


def clean(plans: tuple[tuple[int, ...], ...]) -> list[torch.Tensor]:
    """What a run of recorded plans leaves, without an OOM."""
    if plans not in _clean:
        result = trainer(plans).fit()
        assert tuple(report.micro_batches for report in result.history) == plans
        _clean[plans] = state_of(result)
    return _clean[plans]


class TestReplay:
    """Law 2: an OOM anywhere in either pass, or in the loss, leaves no mark."""

    @strides(211)
    @pytest.mark.parametrize("micro_batch", [6, "auto"])
    def test_oom_at_every_operation(self, micro_batch: Any, stride: int) -> None:
        with Operations() as operations:
            trainer(micro_batch).fit()
        replayed = 0
        for operation in operations.every(stride):
            running = trainer(micro_batch)
            with oom_at(operation):
                try:
                    result = running.fit()
                except OptimizerOutOfMemoryError:
                    continue
            plans = tuple(report.micro_batches for report in result.history)
            assert [sum(plan) for plan in plans] == [12, 11]
            failed = [event for event in result.events if isinstance(event, OutOfMemory)]
            replays = sum(report.replays for report in result.history)
            assert replays == sum(event.phase == "training" for event in failed)
            assert same(state_of(result), clean(plans)), f"operation {operation} left a mark"
            replayed += replays
        assert replayed * stride > (400 if stride == 1 else 0)

    def test_a_limit_that_the_whole_window_does_not_fit(self) -> None:
        """The search finds the micro-batch; the window is many times as large as what fits at once."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 3000), nn.Tanh(), nn.Linear(3000, 4))
        inputs = torch.randn(256, 8)

        def loss(z: torch.Tensor) -> torch.Tensor:
            return cross_entropy(z @ z.T, torch.arange(len(z)))

        kept = sum(p.nbytes for p in model.parameters())
        with simulated_memory(5 * kept + 600_000):
            result = autoaccum.fit(
                model, (inputs,), effective_batch=128, loss_scope="window", embed=lambda called, batch: called(batch[0]),
                loss_fn=loss, optimizer=lambda ps: torch.optim.SGD(ps, lr=1e-3), epochs=4, device="cpu", progress=False,
                cache=False,
            )  # fmt: skip
        sizes = result.history[-1].micro_batches
        assert len(sizes) > 1
        assert max(sizes) > 8
        assert [sum(report.micro_batches) for report in result.history] == [128] * 8


class TestResume:
    """Law 3: a run that was stopped ends as the run that was not."""

    @pytest.mark.parametrize("micro_batch", [5, "auto"])
    def test_bit_identical(self, micro_batch: Any, tmp_path: Path) -> None:
        def stop(record: Any) -> None:
            if isinstance(record, autoaccum.StepReport) and record.step == 2:
                raise autoaccum.StopTraining

        options: dict[str, Any] = {"epochs": 3, "run_dir": tmp_path, "cache": False}
        trainer(micro_batch, callbacks=[stop], **options).fit()
        resumed = trainer(micro_batch, **options).fit()
        assert [event.step for event in resumed.events if isinstance(event, Resumed)] == [2]
        plans = tuple(report.micro_batches for report in resumed.history)
        assert same(state_of(resumed), state_of(trainer(plans, epochs=3).fit()))

    @pytest.mark.parametrize("place", ["first pass", "loss", "second pass"])
    def test_killed_within_a_window(self, place: str, tmp_path: Path) -> None:
        """The run goes on from the window before, and ends as the run that was never killed."""
        code = (
            "import sys; from pathlib import Path; from tests.laws.test_laws_window_losses import killed; "
            "killed(Path(sys.argv[1]), sys.argv[2])"
        )
        # With as many threads as this process, for sums are added in another order by more.
        environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        child = subprocess.run([sys.executable, "-c", code, str(tmp_path), place], check=False, env=environment)
        assert child.returncode == -signal.SIGKILL
        resumed = trainer(5, run_dir=tmp_path, **OF_KILLED).fit()
        assert [event.step for event in resumed.events if isinstance(event, Resumed)] == [2]
        assert same(state_of(resumed), state_of(trainer(5, epochs=OF_KILLED["epochs"]).fit()))


OF_KILLED: dict[str, Any] = {"epochs": 3, "checkpoint_every": 1, "cache": False}


def killed(run_dir: Path, place: str) -> None:
    """Train until the third window is in this place, and kill this process there."""
    # Of three micro-batches, each of which is run in the first pass, and all but the last in the second.
    at = {"first pass": (TwoPasses._embed, 2), "loss": (TwoPasses._loss_of, 1), "second pass": (TwoPasses._embed, 5)}
    function, number = at[place]
    met: list[int] = []

    def killing(self: TwoPasses, *arguments: Any) -> Any:
        met.append(running.step)
        if met.count(2) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(self, *arguments)

    setattr(TwoPasses, function.__name__, killing)
    running = trainer(5, run_dir=run_dir, **OF_KILLED)
    running.fit()
