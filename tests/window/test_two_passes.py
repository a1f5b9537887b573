"""The two passes over a window: what each of them runs, what is kept between them, and what is refused."""

from __future__ import annotations

import copy
import functools
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.errors import ArgumentError, ArgumentTypeError, AutoaccumWarning, NothingFitsError
from autoaccum.events import Notice
from autoaccum.planning.noise import estimate
from autoaccum.testing import simulated_memory
from autoaccum.window.job import Job
from autoaccum.window.two_passes import TwoPasses
from tests.devices import DEVICE
from tests.models import mlp, noisy

WINDOW = 12


class Log(list[Any]):
    """Remembers what both passes do: what a plain list that a function holds has got in the second one is undone."""


def loss_fn(z: torch.Tensor) -> torch.Tensor:
    return cross_entropy(z @ z.T, torch.arange(len(z), device=z.device))


def fit(embed: Callable[..., Any], loss: Callable[..., Any] = loss_fn, **options: Any) -> autoaccum.FitResult:
    model = options.pop("model", None) or mlp()
    generator = torch.Generator().manual_seed(1)
    arguments = {"micro_batch": 5, "steps": 1, "verify": False, **options}
    return autoaccum.fit(
        model, (torch.randn(2 * WINDOW, 8, generator=generator),), effective_batch=WINDOW, loss_scope="window",
        embed=embed, loss_fn=loss, device=DEVICE, progress=False, **arguments,
    )  # fmt: skip


@pytest.mark.parametrize(("micro_batch", "calls"), [(12, [(12, True)]), (6, [(6, False), (6, True), (6, True)])])
def test_each_but_the_last_is_run_twice(micro_batch: int, calls: list[tuple[int, bool]]) -> None:
    """The graph of the last one is kept; a window of one micro-batch is one pass."""
    met = Log()

    def embed(model: Any, batch: Any) -> Any:
        met.append((len(batch[0]), torch.is_grad_enabled()))
        return model(batch[0])

    # The first window's forwards are looked at, by their graphs.
    fit(embed, micro_batch=micro_batch, steps=101)
    assert met[-len(calls) :] == calls


def test_in_eval_mode_both_passes_choose_the_same_kernels() -> None:
    """Without a graph attention takes a shorter way there, and rounds otherwise."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    layer.eval()
    model = nn.Sequential(nn.Unflatten(1, (1, 8)), layer, nn.Flatten())
    met = Log()

    def embed(called: Any, batch: Any) -> Any:
        layer.eval()
        found = called(batch[0])
        met.append(found.detach().clone())
        return found

    fit(embed, model=model, micro_batch=6)
    first, _, second = met[-3:]
    assert torch.equal(first, second)


def test_what_a_function_counts_is_counted_once_per_micro_batch() -> None:
    calls: list[int] = []

    def embed(model: Any, batch: Any) -> Any:
        calls.append(len(batch[0]))
        return model(batch[0])

    fit(embed, micro_batch=4)
    assert calls == [4, 4, 4]


def test_results_that_change_between_the_passes_are_refused() -> None:
    count = iter(range(10**6))

    def widening(model: Any, batch: Any) -> Any:
        return model(batch[0]).repeat(1, 1 + next(count) // 3)

    with pytest.raises(
        ArgumentError, match="the same embeddings for the same samples in both passes|rows of one shape"
    ):
        fit(widening)


@pytest.mark.parametrize(
    ("embed", "match"),
    [
        (lambda model, batch: model(batch[0]).mean(0), "for 4 samples"),
        (lambda model, batch: model(batch[0]) if len(batch[0]) > 2 else [model(batch[0])], "the same structure"),
        (lambda model, batch: "nothing", "a result with a str"),
    ],
)
def test_what_is_no_embedding_is_refused(embed: Any, match: str) -> None:
    plans = [(4, 4, 2, 2)] if "structure" in match else 4
    with pytest.raises(ArgumentError, match=match):
        fit(embed, micro_batch=plans)


def test_a_parameter_that_is_written_to_later_is_refused() -> None:
    """The first window shows which ones are; all are followed with ``state="window"``."""

    calls = Log()

    def embed(model: Any, batch: Any) -> Any:
        calls.append(1)
        if len(calls) > 12:
            with torch.no_grad():
                model[2].bias.add_(1e-3)
        return model(batch[0])

    with pytest.raises(ArgumentError, match="a parameter written to that was not before.*state='window'"):
        fit(embed, steps=9)


def test_it_is_of_jobs_with_such_a_loss() -> None:
    model = mlp()
    job = Job(
        model=model, modules=(model,), optimizer=torch.optim.SGD(model.parameters()), loss_of=lambda m, b: m(b).sum(),
        device=torch.device("cpu"),
    )  # fmt: skip
    with pytest.raises(ArgumentTypeError, match="loss_scope"):
        TwoPasses(job)


def test_running_statistics_move_once_per_micro_batch() -> None:
    model = noisy()
    with pytest.warns(AutoaccumWarning, match="BatchNorm"):
        fit(lambda called, batch: called(batch[0]), model=model, micro_batch=4)
    assert model[1].num_batches_tracked == 3


def test_what_a_loss_draws_is_drawn_once() -> None:
    """Between the passes; so the second one must not go on from there, and the run must."""

    def drawing(z: torch.Tensor) -> torch.Tensor:
        return loss_fn(z * torch.rand(1, device=z.device))

    found = []
    for micro_batch in (12, 5):
        result = fit(lambda called, batch: called(batch[0]), drawing, micro_batch=micro_batch, steps=2)
        found.append([report.loss for report in result.history])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_example_learns_in_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(autoaccum.__file__).parent.parent / "examples" / "contrastive.py"
    example = runpy.run_path(str(path))
    monkeypatch.setitem(example["train"].__globals__, "STEPS", 6)
    accuracy, micro_batch = example["train"](64)
    assert accuracy > 0.5
    assert micro_batch <= 64


def test_a_loss_that_takes_too_much_is_named() -> None:
    """The smallest micro-batch is what does not fit then, which would mislead."""

    def square(z: torch.Tensor) -> torch.Tensor:
        return loss_fn(z.repeat(40, 1))

    with simulated_memory("400KiB"), pytest.raises(NothingFitsError) as caught:
        fit(lambda called, batch: called(batch[0]), square)
    assert any("autoaccum.loss.contrastive.in_chunks" in note for note in caught.value.__cause__.__notes__)


class TestNoise:
    """What each micro-batch adds through its own embeddings, all others being as they are."""

    @pytest.mark.filterwarnings("ignore:The noise scale is estimated")
    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_it_is_that_of_the_parts_of_the_gradient(self, precision: Any) -> None:
        model = nn.Linear(8, 4).double()
        scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        model.register_parameter("scale", scale)
        rows = torch.randn(WINDOW, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

        def loss(z: torch.Tensor, of: Any = model) -> torch.Tensor:
            return loss_fn(z * of.scale) + 2 * (of.scale * z).mean()  # so that there is more than noise

        whole = model(rows)
        cotangent, of_scale = torch.autograd.grad(loss(whole), (whole, scale))
        parts = []
        for start, size in ((0, 5), (5, 4), (9, 3)):
            piece = model(rows[start : start + size])
            found = torch.autograd.grad(piece, [model.weight, model.bias], cotangent[start : start + size])
            share = size / WINDOW
            parts.append((size, size, sum(float(one.square().sum()) for one in found) + float(share * of_scale) ** 2))
        model.zero_grad()
        loss(model(rows)).backward()
        square = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
        expected = estimate(parts, square)
        assert expected is not None

        results = []
        for noise_scale in (True, False):
            trained = copy.deepcopy(model).to(DEVICE)
            result = autoaccum.fit(
                trained, (rows,), effective_batch=WINDOW, loss_scope="window", noise_scale=noise_scale, steps=1,
                embed=lambda called, batch: called(batch[0]), loss_fn=functools.partial(loss, of=trained),
                micro_batch=[(5, 4, 3)], shuffle=False, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), device=DEVICE,
                progress=False, precision=precision,
            )  # fmt: skip
            results.append((trained, result))
        tolerance = 1e-12 if precision == "fp32" else 0.1
        found = results[0][1].history[0].noise_scale
        assert found == pytest.approx(expected.gradient_variance / expected.gradient_squared, rel=tolerance)
        for p, plain in zip(results[0][0].parameters(), results[1][0].parameters(), strict=True):
            torch.testing.assert_close(p, plain, rtol=0, atol=1e-14 if precision == "fp32" else 1e-2)
        said = [event.cause for event in results[0][1].events if isinstance(event, Notice)]
        assert said == ["The noise scale is estimated beside loss_scope='window'"]
