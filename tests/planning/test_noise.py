"""The noise scale hits the truth: of simulated gradients, of a model whose noise is known in closed form, of two ranks."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from autoaccum.planning.noise import Noise, Part, Smoothed, estimate
from autoaccum.step.loss_functions import loss_function
from autoaccum.step.step import Step
from autoaccum.training.setup import GivenBatch
from tests.processes import in_turn
from tests.step.making import step_of

CPU = torch.device("cpu")


def mean_of(found: Sequence[Noise | None]) -> tuple[float, float]:
    """(squared norm of the gradient, variance), averaged over windows."""
    there = [noise for noise in found if noise is not None]
    assert len(there) == len(found)
    return (
        sum(noise.gradient_squared for noise in there) / len(there),
        sum(noise.gradient_variance for noise in there) / len(there),
    )


class TestEstimate:
    TRUE_SQUARED, TRACE, DIMENSIONS = 1.0, 12.0, 24

    def windows(
        self, sizes: Sequence[int], items: Sequence[float], counted: Sequence[float]
    ) -> tuple[tuple[float, float], float]:
        """Estimates averaged over simulated windows, and the variance of the windows' gradients.

        A sample of n items adds n times the true gradient, and noise, to the sum; ``counted`` is told as the items.
        """
        random = numpy.random.default_rng(0)
        true = numpy.full(self.DIMENSIONS, (self.TRUE_SQUARED / self.DIMENSIONS) ** 0.5)
        total = sum(counted)
        found = []
        gradients = []
        for _ in range(4000):
            shares = []
            for size, there in zip(sizes, items, strict=True):
                noise = random.normal(0, (self.TRACE / self.DIMENSIONS) ** 0.5, (size, self.DIMENSIONS))
                shares.append((there * true + noise.sum(0)) / total)
            window = sum(shares)
            parts = [(b, w, float(h @ h)) for b, w, h in zip(sizes, counted, shares, strict=True)]
            found.append(estimate(parts, float(window @ window)))
            gradients.append(window)
        return mean_of(found), float(numpy.var(gradients, axis=0).sum())

    @pytest.mark.parametrize(
        ("sizes", "items"),
        [
            ([4, 4, 4, 4], [4, 4, 4, 4]),
            ([6, 6], [6, 6]),
            ([1, 7, 3, 5], [1, 7, 3, 5]),
            ([4, 4, 4], [2, 12, 7]),
            ([1, 7, 3, 5], [5.5, 4, 0.5, 6]),
        ],
    )
    def test_it_hits_the_truth_whatever_the_sizes(self, sizes: list[int], items: list[float]) -> None:
        (squared, variance), spread = self.windows(sizes, items, items)
        num_samples = sum(sizes)
        expected = num_samples**2 * self.TRACE / sum(items) ** 2
        assert variance == pytest.approx(expected, rel=0.02)
        assert variance / num_samples == pytest.approx(spread, rel=0.02)
        assert squared == pytest.approx(self.TRUE_SQUARED, rel=0.03)

    def test_a_sum_has_the_scale_of_the_mean(self) -> None:
        """Its gradient is as many times as large as there are samples, its noise too."""
        sizes = [1, 7, 3, 5]
        random = numpy.random.default_rng(0)
        mean, total = [], []
        for _ in range(20):
            sums = [random.normal(1, 1, (size, 3)).sum(0) for size in sizes]
            squares = [float(h @ h) for h in sums]
            whole = float(sum(sums) @ sum(sums))
            total.append(estimate(list(zip(sizes, sizes, squares, strict=True)), whole))
            mean.append(estimate([(b, b, h / 256) for b, h in zip(sizes, squares, strict=True)], whole / 256))
        assert mean_of(total) == pytest.approx([256 * value for value in mean_of(mean)], rel=1e-12)

    def test_two_equal_parts_are_the_papers_formulas(self) -> None:
        small, big = 5, 10
        first, second = numpy.random.default_rng(0).normal(0.3, 1, (2, 7))
        whole = (first + second) / 2
        square_small, square_big = float(first @ first + second @ second) / 2, float(whole @ whole)
        found = estimate([(small, small, float(h @ h) / 4) for h in (first, second)], square_big)
        assert found is not None
        assert found.gradient_squared == pytest.approx(
            (big * square_big - small * square_small) / (big - small), rel=1e-12
        )
        assert found.gradient_variance == pytest.approx((square_small - square_big) / (1 / small - 1 / big), rel=1e-12)

    def test_without_noise_there_is_none(self) -> None:
        found = estimate([(2, 2, 4 * 0.04), (8, 8, 4 * 0.64)], 4.0)
        assert found is not None
        assert found.gradient_squared == pytest.approx(4.0)
        assert found.gradient_variance == pytest.approx(0.0, abs=1e-12)

    def test_the_unit_of_the_items_does_not_matter(self) -> None:
        parts: list[Part] = [(3, 2, 0.5), (4, 9, 0.25), (1, 4, 1.0)]
        other = [(samples, 0.25 * items, square) for samples, items, square in parts]
        assert estimate(parts, 1.5) == estimate(other, 1.5)

    @pytest.mark.every(2)
    @pytest.mark.parametrize("sizes", [[1] * 20, [4] * 5, [10, 10]])
    @pytest.mark.parametrize("lengths", [[0, 1, 2, 3, 4, 5], [1, 50]])
    def test_samples_of_more_items_may_be_noisier(self, sizes: list[int], lengths: list[int]) -> None:
        """Items each with noise of their own: what is found does not depend on how windows are cut."""
        random = numpy.random.default_rng(0)
        true = numpy.full(20, 0.15)
        ends = numpy.cumsum(sizes)
        found, gradients = [], []
        for _ in range(6000):
            items = random.choice(lengths, size=20)
            total = items.sum()
            noise = random.normal(0, 1, (20, 20)) * numpy.sqrt(items)[:, None]
            samples = (items[:, None] * true + noise) / total
            parts = [
                (size, float(items[end - size : end].sum()), samples[end - size : end].sum(0))
                for size, end in zip(sizes, ends, strict=True)
            ]
            window = samples.sum(0)
            found.append(estimate([(b, w, float(h @ h)) for b, w, h in parts], float(window @ window)))
            gradients.append(window)
        squared, variance = mean_of(found)
        assert variance == pytest.approx(20 * float(numpy.var(gradients, axis=0).sum()), rel=0.1)
        assert squared == pytest.approx(float(true @ true), rel=0.05)

    def test_parts_without_items_are_samples_that_add_nothing(self) -> None:
        """As when they are in one part with others."""
        found = estimate([(4, 4, 0.5), (4, 0, 0.0), (4, 4, 0.5)], 1.25)
        assert found is not None
        assert found.gradient_variance == pytest.approx(12 * (0.25 - 1.25 / 8) / 1.5 * 12)

    @pytest.mark.parametrize(
        ("parts", "square"),
        [
            ([], 1.0),
            ([(4, 4, 1.0)], 1.0),
            ([(4, 4, 1.0), (4, 0, 0.0)], 1.0),
            ([(4, 4, 1.0), (4, -4, 1.0)], 1.0),
            ([(1, 8, 1.0), (7, 1, 1.0)], 1.0),
            ([(4, 4, 1.0), (4, math.nan, 1.0)], 1.0),
            ([(4, 4, 1.0), (4, math.inf, 1.0)], 1.0),
            ([(4, 4, 1.0), (4, 4, math.inf)], math.inf),
            ([(4, 4, 1.0), (4, 4, math.nan)], 1.0),
            ([(4, 4, 1.0), (4, 4, 1.0)], math.nan),
        ],
    )
    def test_where_nothing_can_be_told(self, parts: list[Part], square: float) -> None:
        assert estimate(parts, square) is None


class TestSmoothed:
    def test_numerator_and_denominator_are_averaged_apart(self) -> None:
        smoothed = Smoothed(smoothing=0.75)
        assert smoothed.scale is None
        smoothed.observe(Noise(gradient_squared=2.0, gradient_variance=6.0))
        assert smoothed.scale == 3.0
        smoothed.observe(Noise(gradient_squared=-1.0, gradient_variance=10.0))
        assert smoothed.scale == (0.75 * 6 + 10) / (0.75 * 2 - 1)

    def test_no_gradient_that_shows(self) -> None:
        smoothed = Smoothed(smoothing=0.5)
        smoothed.observe(Noise(gradient_squared=-1.0, gradient_variance=6.0))
        assert smoothed.scale == math.inf

    def test_no_noise_that_shows(self) -> None:
        smoothed = Smoothed(smoothing=0.5)
        smoothed.observe(Noise(gradient_squared=1.0, gradient_variance=-6.0))
        assert smoothed.scale == 0.0

    def test_two_numbers_are_its_state(self) -> None:
        first = Smoothed(smoothing=0.9)
        first.observe(Noise(gradient_squared=2.0, gradient_variance=6.0))
        second = Smoothed(
            smoothing=0.9, gradient_squared=first.gradient_squared, gradient_variance=first.gradient_variance
        )
        for smoothed in (first, second):
            smoothed.observe(Noise(gradient_squared=1.0, gradient_variance=-1.0))
        assert first == second
        assert first.scale == second.scale


INPUTS, RESIDUAL, NOISE = 6, 0.5, 1.0
SQUARED = INPUTS * RESIDUAL**2
"""|g|^2 of half the squared error of a linear model, whose weights are all ``RESIDUAL`` off."""
TRACE = SQUARED * (INPUTS + 2) + INPUTS * NOISE**2 - SQUARED
"""A sample's gradient is x (x.d - e), x ~ N(0, I), e ~ N(0, NOISE^2): E|.|^2 = |d|^2 (n + 2) + n NOISE^2."""


def linear(
    loss: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32, penalty: float = 0.0
) -> Step:
    """Over a model that stays as it is; ``loss`` reduces what is off in each sample, or token."""
    model = nn.Linear(INPUTS, 1, bias=False, dtype=dtype)
    nn.init.constant_(model.weight, RESIDUAL)  # the true weights are 0

    def step(model: Any, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        off = loss(model(inputs).squeeze(-1) - targets)
        return off + penalty * model.weight.square().sum() if penalty else off

    return step_of(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        loss_of=loss_function(None, step),
        micro_batch=1000,
        full_window=None,
        noise_scale=True,
    )


def samples(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    """Inputs (*shape, INPUTS) and targets (*shape,)."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(*shape, INPUTS, generator=generator, dtype=dtype)
    return inputs, NOISE * torch.randn(*shape, generator=generator, dtype=dtype)


def ignore(batch: Any, lengths: Sequence[int]) -> Any:
    """Without the tokens of each sample beyond its length."""
    inputs, targets = batch
    for row, length in enumerate(lengths):
        targets[row, length:] = math.nan
    return inputs, targets


def half_mean(off: torch.Tensor) -> torch.Tensor:
    return 0.5 * off.square().mean()


def half_sum(off: torch.Tensor) -> torch.Tensor:
    return 0.5 * off.square().sum()


def half_mean_of_tokens(off: torch.Tensor) -> torch.Tensor:
    there = ~off.isnan()
    return 0.5 * (off.nan_to_num().square() * there).sum() / there.sum()


class TestLinearModel:
    """The scale of a model whose noise is known, through windows as training runs them."""

    def of(self, made: Step, batch: Callable[[int], Any], plan: Sequence[int]) -> tuple[float, float]:
        """(squared norm of the gradient, noise scale), averaged over windows of many samples."""
        found = [made.run(GivenBatch(batch(seed), sum(plan), CPU), plan)[0].noise for seed in range(300)]
        smoothed = Smoothed(smoothing=0.999)
        for noise in found:
            assert noise is not None
            smoothed.observe(noise)
        assert smoothed.scale is not None
        return mean_of(found)[0], smoothed.scale

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("plan", [(32, 32, 32, 32), (12, 60, 8, 48)])
    def test_of_a_mean(self, plan: tuple[int, ...], dtype: torch.dtype) -> None:
        squared, scale = self.of(linear(half_mean, dtype), lambda seed: samples(seed, 128, dtype=dtype), plan)
        assert squared == pytest.approx(SQUARED, rel=0.05)
        assert scale == pytest.approx(TRACE / SQUARED, rel=0.1)

    def test_of_a_sum(self) -> None:
        squared, scale = self.of(linear(half_sum), lambda seed: samples(seed, 128), (12, 60, 8, 48))
        assert squared == pytest.approx(128**2 * SQUARED, rel=0.05)
        assert scale == pytest.approx(TRACE / SQUARED, rel=0.1)

    @pytest.mark.parametrize("factor", [-1.0, 1e-3])
    def test_of_a_mean_times_a_constant(self, factor: float) -> None:
        """Whose counts are negative, or large."""
        made = linear(lambda off: factor * half_mean(off))
        squared, scale = self.of(made, lambda seed: samples(seed, 128), (32, 32, 64))
        assert squared == pytest.approx(factor**2 * SQUARED, rel=0.05)
        assert scale == pytest.approx(TRACE / SQUARED, rel=0.1)

    def test_of_a_mean_over_tokens(self) -> None:
        """The window's gradient is that of its tokens, so its noise is theirs; samples share them out."""
        lengths = 4 * [4, 6, 5, 2, 6, 3, 1, 5, 4, 5, 6, 6, 3, 2, 5, 3]

        def batch(seed: int) -> Any:
            return ignore(samples(seed, 64, 6), lengths)

        squared, scale = self.of(linear(half_mean_of_tokens), batch, (16, 16, 20, 12))
        assert squared == pytest.approx(SQUARED, rel=0.05)
        assert scale == pytest.approx(TRACE / SQUARED * len(lengths) / sum(lengths), rel=0.1)

    def test_a_penalty_on_the_weights_is_no_noise(self) -> None:
        batch = samples(0, 32, dtype=torch.float64)
        found = [
            linear(half_mean, torch.float64, penalty).run(GivenBatch(batch, 32, CPU), (3, 15, 2, 12))[0].noise
            for penalty in (0.0, 7.3)
        ]
        assert found[0] is not None
        assert found[1] is not None
        assert found[1].gradient_squared > 2 * found[0].gradient_squared
        assert found[1].gradient_variance == pytest.approx(found[0].gradient_variance, rel=1e-9)


RANKS = ((4, 6), (3, 8, 3))
"""The plans of two ranks; a window's first samples are the first one's."""
LENGTHS = [1, 6, 3, 5, 4, 2, 6, 6, 5, 3, 4, 4, 2, 6, 3, 5, 4, 6, 5, 4, 1, 6, 3, 5]
RANK_WINDOWS = 200


def token_window(seed: int) -> Any:
    return ignore(samples(seed, len(LENGTHS), 6, dtype=torch.float64), LENGTHS)


def run_rank(rank: int, folder: Path) -> None:
    """A rank of two: its part of each window, the gradient of both by one all-reduce; writes down the estimates."""
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    made = linear(half_mean_of_tokens, torch.float64)
    (weight,) = (p for group in made.job.optimizer.param_groups for p in group["params"])
    plan, first = RANKS[rank], sum(RANKS[0]) * rank
    found = []
    for seed in range(RANK_WINDOWS):
        inputs, targets = token_window(seed)
        here = slice(first, first + sum(plan))
        gradient = made.run(GivenBatch((inputs[here], targets[here]), sum(plan), CPU), plan)[0]
        gathered: list[Any] = [None, None]
        torch.distributed.all_gather_object(gathered, (gradient.items, gradient.parts))
        total = sum(items for items, _ in gathered)
        whole = weight.grad * (gradient.items / total)
        torch.distributed.all_reduce(whole)
        parts = [
            (size, count, square * (items / total) ** 2) for items, parts in gathered for size, count, square in parts
        ]
        noise = estimate(parts, float(whole.square().sum()))
        assert noise is not None
        found.append((noise.gradient_squared, noise.gradient_variance))
    torch.distributed.barrier()
    (folder / str(rank)).write_text(json.dumps(found))
    os._exit(0)  # threads of gloo may still be waiting, which would end the process with an abort


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@in_turn
def test_two_ranks_find_what_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    running = []
    for rank in range(2):
        if (pid := os.fork()) == 0:
            try:
                run_rank(rank, tmp_path)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        running.append(pid)
    codes = []
    while running:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                codes.append(os.waitstatus_to_exitcode(status))
        if any(codes):  # the other would wait for it
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    assert codes == [0, 0]
    first, second = (json.loads((tmp_path / str(rank)).read_text()) for rank in range(2))
    assert first == second
    made = linear(half_mean_of_tokens, torch.float64)
    for seed in range(20):
        noise = made.run(GivenBatch(token_window(seed), len(LENGTHS), CPU), RANKS[0] + RANKS[1])[0].noise
        assert noise is not None
        assert first[seed] == pytest.approx([noise.gradient_squared, noise.gradient_variance], rel=1e-9)
    squared, variance = numpy.mean(first, axis=0)
    assert squared == pytest.approx(SQUARED, rel=0.1)
    assert variance / squared == pytest.approx(TRACE / SQUARED * len(LENGTHS) / sum(LENGTHS), rel=0.1)


def test_an_estimate_stands_for_the_windows_before_it() -> None:
    one, four = Smoothed(smoothing=0.5), Smoothed(smoothing=0.5)
    noise = Noise(gradient_squared=2.0, gradient_variance=8.0)
    for _ in range(4):
        one.observe(noise)
    four.observe(noise, 4)
    assert four == one
