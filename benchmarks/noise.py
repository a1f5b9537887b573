"""What ``noise_scale=True`` costs, and how near it comes to the truth; what normalisation layers alone would say.

    python benchmarks/noise.py

Cost: the same run with and without it take turns in one process, by ``fit``. With ``every window`` each is measured, as
those at a run's begin are; ``one in 64`` are the windows after the first 1,000, as it is. Seconds are those of the
process, on one thread, so that what else the machine does counts for little.

Agreement: models train on windows of 64 samples, in 8 parts, and the gradient of each sample is computed by itself, by
``torch.func``. So what every estimate would be is known, with all parameters or those of normalisation layers alone
(Gray et al. 2024, "Normalization Layer Per-Example Gradients are Sufficient to Predict Gradient Noise Scale in
Transformers", who measure these per sample), and so is the truth: the scale over 1,500 samples, every 20 windows.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from overhead import small_gpt, tiny_mlp
from results import write_table
from sklearn.datasets import load_digits
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import autoaccum
from autoaccum.planning.noise import Noise, Smoothed, estimate, is_due, worth
from autoaccum.training import trainer as training_noise

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from char_gpt import ALPHABET, Block, CharGPT, encode, read_text

WINDOW, PARTS, SAMPLES, LOOK_EVERY = 64, 8, 1500, 20
Made = tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], Callable[..., torch.Tensor]]
Samples = dict[str, torch.Tensor]
"""The gradient of each sample, by the name of its parameter."""


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    found = load_digits()
    return torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)


def text() -> tuple[torch.Tensor, torch.Tensor]:
    ids = encode(read_text(100_000))
    return ids[:-1].unfold(0, 32, 32)[:2048].clone(), ids[1:].unfold(0, 32, 32)[:2048].clone()


def mean_of_tokens(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs.flatten(0, -2), targets.flatten())


class RMSBlock(nn.Module):
    """A block as Llama has it, but for rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out, self.gate, self.up = (nn.Linear(width, times * width, bias=False) for times in (3, 1, 2, 2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        inner = self.norm2(x)
        return x + self.down(silu(self.gate(inner)) * self.up(inner))  # type: ignore[no-any-return]


class Tokens(nn.Module):
    """Tokens, or patches of an image, through blocks to a head."""

    def __init__(self, embed: nn.Module, blocks: Sequence[nn.Module], norm: nn.Module, classes: int) -> None:
        super().__init__()
        self.embed, self.blocks, self.norm = embed, nn.Sequential(*blocks), norm
        self.positions, self.head = nn.Parameter(torch.randn(32, 32) * 0.1), nn.Linear(32, classes)
        self.is_image = isinstance(embed, nn.Conv2d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = x.flatten(2).transpose(1, 2) if self.is_image else x
        x = self.norm(self.blocks(x + self.positions[: x.shape[1]]))
        return self.head(x.mean(1) if self.is_image else x)  # type: ignore[no-any-return]


def gpt() -> Made:
    return CharGPT(width=32, depth=3, dropout=0.0), text(), mean_of_tokens


def llama() -> Made:
    blocks = [RMSBlock(32, 4) for _ in range(3)]
    return Tokens(nn.Embedding(len(ALPHABET), 32), blocks, nn.RMSNorm(32), len(ALPHABET)), text(), mean_of_tokens


def vit() -> Made:
    blocks = [Block(32, 4, 0.0) for _ in range(3)]
    return Tokens(nn.Conv2d(1, 32, 2, 2), blocks, nn.LayerNorm(32), 10), digits(), cross_entropy


def conv() -> Made:
    layers: list[nn.Module] = []
    for inside, outside, stride in ((1, 16, 1), (16, 32, 2), (32, 32, 2)):
        layers += [nn.Conv2d(inside, outside, 3, stride, 1), nn.GroupNorm(4, outside), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return model, digits(), cross_entropy


def mlp() -> Made:
    layers = [layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 10)), digits(), cross_entropy


AGREEING: dict[str, Callable[[], Made]] = {
    "small GPT, LayerNorm": gpt,
    "small Llama, RMSNorm": llama,
    "small ViT, LayerNorm": vit,
    "conv net, GroupNorm": conv,
    "MLP, LayerNorm": mlp,
}


def of_samples(model: nn.Module, loss_fn: Callable[..., torch.Tensor], *batch: torch.Tensor) -> Iterator[Samples]:
    """Gradients of samples, 64 at once."""

    def loss(parameters: Samples, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_fn(functional_call(model, parameters, (x[None],)), y[None])

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    for x, y in zip(*(tensor.split(64) for tensor in batch), strict=True):
        yield vmap(grad(loss), (None, 0, 0))(parameters, x, y)


def truth(found: Iterator[Samples], names: Sequence[str]) -> float:
    """The noise scale over all samples there are, by these parameters."""
    total, squares, count = torch.zeros(()), 0.0, 0
    for gradients in found:
        rows = torch.cat([gradients[name].flatten(1) for name in names], 1).double()
        total, squares, count = total + rows.sum(0), squares + float(rows.square().sum()), count + len(rows)
    mean = float((total / count).square().sum())
    variance = (squares - count * mean) / (count - 1)
    return variance / max(mean - variance / count, 1e-12)


def estimated(gradients: Samples, names: Sequence[str], parts: int) -> Noise:
    rows = torch.cat([gradients[name].flatten(1) for name in names], 1)
    size = len(rows) // parts
    shares = rows.unflatten(0, (parts, size)).sum(1) / len(rows)
    squares = shares.square().sum(1).tolist()
    found = estimate([(size, size, square) for square in squares], float(rows.mean(0).square().sum()))
    assert found is not None
    return found


def agreement(make: Callable[[], Made], windows: int) -> list[str]:
    """The cells of one row: how the scale of the norms relates to that of all, and how far off each estimate is."""
    torch.manual_seed(0)
    model, (inputs, targets), loss_fn = make()
    layers = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
    norms = {id(p) for m in model.modules() if isinstance(m, layers) for p in m.parameters()}
    of_all = [name for name, _ in model.named_parameters()]
    of_norms = [name for name, p in model.named_parameters() if id(p) in norms]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    every, seldom, norm, norm_then = (Smoothed(smoothing=0.95) for _ in range(4))
    ratios, errors = [], {label: list[float]() for label in ("every", "seldom", "norms", "calibrated")}
    order: list[int] = []
    for number in range(windows):
        if len(order) < WINDOW:
            order = torch.randperm(len(inputs)).tolist()
        batch, order = torch.tensor(order[:WINDOW]), order[WINDOW:]
        if number % LOOK_EVERY == LOOK_EVERY // 2 and number > LOOK_EVERY:
            looked = inputs[:SAMPLES], targets[:SAMPLES]
            true, true_norms = (truth(of_samples(model, loss_fn, *looked), names) for names in (of_all, of_norms))
            ratios.append((true, true_norms))
            calibrated = None
            if norm.scale and seldom.scale and norm_then.scale:
                calibrated = norm.scale * seldom.scale / norm_then.scale
            scales = {"every": every.scale, "seldom": seldom.scale, "norms": norm.scale, "calibrated": calibrated}
            for label, scale in scales.items():
                # What is infinite, or none, counts as ten times off.
                factor = 10.0 if not scale or not math.isfinite(scale) else scale / true
                errors[label].append(min(abs(math.log(factor)), math.log(10)))
        (gradients,) = of_samples(model, loss_fn, inputs[batch], targets[batch])
        found, by_norms = estimated(gradients, of_all, PARTS), estimated(gradients, of_norms, WINDOW)
        every.observe(found)
        norm.observe(by_norms)
        if is_due(number):
            seldom.observe(found, worth(number))
            norm_then.observe(by_norms, worth(number))
        for name, p in model.named_parameters():
            p.grad = gradients[name].mean(0)
        optimizer.step()
    quotients = [of_norm / of_all_ for of_all_, of_norm in ratios]
    logs = torch.tensor(ratios).log().T
    off = [f"{math.exp(statistics.fmean(error**2 for error in errors[label]) ** 0.5):.2f}" for label in errors]
    spread = f"{min(quotients):.2f} / {statistics.median(quotients):.2f} / {max(quotients):.2f}"
    return [spread, f"{float(torch.corrcoef(logs)[0, 1]):.2f}", *off]


def conv_net() -> Made:
    model, (inputs, targets), loss_fn = conv()
    return model, (inputs[:1024], targets[:1024]), loss_fn


COSTS: dict[str, tuple[Callable[[], Any], int, int | None, int, int]] = {
    "tiny MLP, windows that fit": (tiny_mlp, 64, None, 1000, 1640),
    "tiny MLP, cut into 8": (tiny_mlp, 64, 8, 1000, 1640),
    "conv net, cut into 8": (conv_net, 64, 8, 30, 50),
    "small GPT, cut into 8": (small_gpt, 64, 8, 12, 16),
}
"""(model, effective batch, micro-batch, windows that are left out, windows in all)"""


def run(name: str, *, noise: bool) -> list[float]:
    """When each window ended, and before the first of them: in seconds of this process, for others run beside it."""
    make, effective_batch, micro_batch, _, windows = COSTS[name]
    torch.manual_seed(0)
    model, data, loss_fn = make()
    stamps = [time.process_time()]

    def stamp(record: Any) -> None:
        if isinstance(record, autoaccum.StepReport):
            stamps.append(time.process_time())

    autoaccum.fit(
        model, data, effective_batch=effective_batch, micro_batch=micro_batch or "auto", loss_fn=loss_fn,
        steps=windows, noise_scale=noise, device="cpu", progress=False, callbacks=[stamp],
    )  # fmt: skip
    return stamps


def cost(name: str, rounds: int) -> list[str]:
    """The cells of one row: µs of a window without, and the ratios with it."""
    left_out, is_long = COSTS[name][3], COSTS[name][4] > 1000
    plain, every, seldom, begin = [], [], [], []

    def seconds(stamps: list[float]) -> float:
        taken = [after - before for before, after in zip(stamps[left_out:], stamps[left_out + 1 :], strict=False)]
        return statistics.fmean(sorted(taken)[: -max(1, len(taken) // 100)])  # without those that were interrupted

    for _ in range(rounds):
        without = run(name, noise=False)
        plain.append(seconds(without))
        training_noise.is_due = lambda number, most=0: True  # type: ignore[assignment]
        every.append(seconds(run(name, noise=True)) / plain[-1])
        training_noise.is_due = is_due
        if is_long:
            stamps = run(name, noise=True)
            seldom.append(seconds(stamps) / plain[-1])
            begin.append((stamps[1000] - stamps[0]) / (without[1000] - without[0]))
    middle = statistics.median
    one_in_64 = f"{middle(seldom):.3f}" if is_long else f"{1 + (middle(every) - 1) / 64:.4f}, by arithmetic"
    in_begin = f"{middle(begin):.3f}" if is_long else ""
    return [name, f"{middle(plain) * 1e6:.0f}", f"{middle(every):.3f}", one_in_64, in_begin]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=240)
    options = parser.parse_args()
    torch.set_num_threads(1)
    costs = [cost(name, options.rounds) for name in COSTS]
    header = ["model", "norms / all: least, median, most", "correlation of logs", "every window", "as it is"]
    header += ["norm layers alone", "norm layers, calibrated"]
    with sdpa_kernel(SDPBackend.MATH):
        rows = [[name, *agreement(make, options.windows)] for name, make in AGREEING.items()]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))
    text = (
        "How far off the noise scale is, as a factor (the root of the mean square of its logarithm, a factor of ten at "
        f"most; averages of smoothing 0.95), over {options.windows} windows of {WINDOW} samples in {PARTS} parts; the "
        "truth is that of 1,500 samples, every 20 windows. *Norm layers* are measured per sample in every window; "
        "*calibrated* by the quotient of both in the windows that are measured with all parameters. First how their "
        "true scale relates to that of all parameters.\n\n"
        + table
        + "\n\nCPU time of a window with the noise scale beside one "
        f"without; medians of {options.rounds} rounds. *Every window*: each is measured, and cut in two where it fits. "
        "*One in 64*: as it is from window 1,000 on. *The first 1,000*: as it is."
    )
    write_table(
        "noise", text, ["model", "µs without", "every window", "one in 64", "the first 1,000"], costs, threads=1
    )


if __name__ == "__main__":
    main()
