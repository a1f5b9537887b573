"""What only a card can say of memory, waiting and kernels: stage a of ``gpu.py``."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import itertools
import re
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_checks import Row, not_run, row
from gpu_models import (
    MIB,
    Case,
    Watched,
    adamw,
    fraction,
    furthest,
    gpt,
    images,
    is_cuda,
    is_small,
    same,
    statistic,
    tiny_mlp,
    total_bytes,
    train,
)
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import autoaccum
from autoaccum.errors import AutoaccumError
from autoaccum.events import StepReport

ROOT = Path(__file__).parent.parent
NEEDS_CUDA = "needs CUDA"


def tests() -> list[Row]:
    """Run those that need a device; on the stand-in, where CI runs all of them, the quick ones of one file."""
    for package in ("pytest", "xdist", "hypothesis"):
        if importlib.util.find_spec(package) is None:
            return [not_run(f"{package} is not installed", "all pass")]
    small = ["-n0", "-m", "gpu", "--device", "standin", "tests/laws/test_laws_gpu.py", "-k", "not every_operation"]
    command = [sys.executable, "-m", "pytest", "-q", *(small if is_small() else ["--device", "cuda", "-n8"])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout[-5000:], done.stderr[-5000:], flush=True)
    counted = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout)}
    figures = ", ".join(f"{number} {kind}" for kind, number in counted.items()) or f"exit {done.returncode}"
    failures = re.findall(r"^(?:FAILED|ERROR) \S*::(\S+)", done.stdout, re.MULTILINE)
    return [row("; ".join([figures, *failures]), "all pass", done.returncode == 0 and counted.get("passed", 0) > 0)]


def limit_beside_fraction() -> list[Row]:
    """The allocator enforces either: settled windows give nothing back, and take as long."""
    case, effective_batch = gpt(256), 192 if is_small() else 512
    share = case.share if is_small() else 0.5
    _, watched = train(case, 12, effective_batch, memory_limit=share)
    size = max(watched.history[-1].micro_batches)
    frees, ratios = [], []
    rounds, windows = 5, 8
    for _ in range(rounds):
        seconds = []
        for by_hand in (False, True):
            with fraction(share if by_hand else 1.0):
                options = {} if by_hand else {"memory_limit": share}
                _, one = train(case, windows, effective_batch, micro_batch=size, **options)
            seconds.append(statistics.median(report.seconds for report in one.history[2:]))
            if not by_hand:
                frees.append(one.frees[-1] - one.frees[1])
        ratios.append(seconds[0] / seconds[1])
    ratio = statistics.median(ratios)
    return [
        row(
            f"{sum(frees) / (rounds * (windows - 2)):.2f} device frees a settled window of {effective_batch}",
            "0",
            sum(frees) == 0,
        ),
        row(f"{ratio:.3f} of the time below a fraction set by hand, micro-batches of {size}", "1.01", ratio <= 1.01),
    ]


def _rows_of_memory(watched: Watched, effective_batch: int) -> list[Row]:
    windows, peak = len(watched.history), watched.filled()
    retries = watched.retries[-1] - watched.retries[watched.settled]
    about = f"{windows} windows of {effective_batch}, micro-batches of {max(watched.history[-1].micro_batches)}"
    return [
        row(f"{watched.ooms} out-of-memory errors; {about}", "at most 1", watched.ooms <= 1),
        row(f"prediction error {watched.error():.1%}", "5 %", watched.error() <= 0.05),
        row(f"peak of settled windows {peak:.1%} of the limit", "100 %", peak <= 1),
        row(f"{retries} retries in settled windows", "none in 9 of 10 windows", retries <= windows // 10),
    ]


def no_limit() -> list[Row]:
    effective_batch, windows = (192, 100) if is_small() else (1024, 25)
    _, watched = train(gpt(256), windows, effective_batch)
    return _rows_of_memory(watched, effective_batch)


def within_8_gib() -> list[Row]:
    case = gpt(256)
    with fraction(case.share if is_small() else 8 * 1024 * MIB / total_bytes()):
        _, watched = train(case, 100, 96)
    return _rows_of_memory(watched, 96)


class Texts(Dataset[Tensor]):
    """Of log-normal lengths."""

    def __init__(self, samples: int) -> None:
        case, generator = gpt(), torch.Generator().manual_seed(2)
        self._longest = case.data(1)[0].shape[1]
        scale = torch.randn(samples, generator=generator).mul(0.8).exp()
        self._lengths = (scale * self._longest / 6).long().clamp(4, self._longest).tolist()
        self._ids = torch.randint(1, 97, (self._longest,), generator=generator)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> Tensor:
        return self._ids[: self._lengths[index]].roll(index)


def _pad(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True)


def _loss_of_texts(model: Any, ids: Tensor) -> Tensor:
    return cross_entropy(model(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), ignore_index=0)


def lengths() -> list[Row]:
    case, watched, windows = gpt(), Watched(), 300 if is_small() else 160
    with fraction(case.share * 0.8 if is_small() else 0.1):
        autoaccum.fit(
            case.model(), Texts(64 * windows), effective_batch=64, steps=windows, training_step=_loss_of_texts,
            collate_fn=_pad, optimizer=adamw, precision="bf16", progress=False, cache=False, callbacks=[watched],
        )  # fmt: skip
    pieces = [len(report.micro_batches) for report in watched.history]
    early, late = statistics.mean(pieces[50:100]), statistics.mean(pieces[-50:])
    retries, replays = watched.retries[-1], sum(report.replays for report in watched.history)
    counted = f"{retries} retries, {replays} replays"
    figures = f"{early:.2f} micro-batches a window after 50, {late:.2f} after {windows - 50}; {counted}"
    return [row(figures, "a tenth more at most, 3 replays", late <= 1.1 * early and replays <= 3)]


def lengths_expandable() -> list[Row]:
    return lengths() if is_cuda() else [not_run(NEEDS_CUDA)]


def _weighted(model: Any, batch: Any) -> Tensor:
    weights = batch[0][:, 0].abs()
    return (cross_entropy(model(batch[0]), batch[1], reduction="none") * weights).sum() / weights.sum()


def _masked(model: Any, batch: Any) -> Tensor:
    mask = (batch[0][:, 0] > -1).float()
    return (cross_entropy(model(batch[0]), batch[1], reduction="none") * mask).sum() / mask.sum()


LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    "mse": lambda model, batch: mse_loss(model(batch[0]), batch[0][:, :10]),
    "cross entropy": lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
    "label smoothing": lambda model, batch: cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1),
    "sample weights": _weighted,
    "masked mean": _masked,
}


@contextmanager
def _waits() -> Iterator[Callable[[], int]]:
    """Count what has made the host wait for the device: by CUDA's debug mode, or by the stand-in's log."""
    if is_cuda():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield lambda: sum("synchronizing CUDA operation" in str(one.message) for one in caught)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    else:
        from tests import standin

        with standin.stacks_of("sync") as found:
            yield lambda: sum(what != "synchronize an event" for _, what, _ in found)


def waiting() -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(1024, 32, generator=generator), torch.randint(0, 10, (1024,), generator=generator)
    figures, most = [], 0.0
    for name, loss_of in LOSSES.items():
        seen: list[int] = []
        with _waits() as count, warnings.catch_warnings():
            if not is_cuda():
                warnings.simplefilter("ignore")

            def look(record: object, seen: list[int] = seen, count: Callable[[], int] = count) -> None:
                if isinstance(record, StepReport):
                    seen.append(count())

            autoaccum.fit(
                tiny_mlp(), data, training_step=loss_of, effective_batch=64, micro_batch=4, steps=130, optimizer=adamw,
                progress=False, callbacks=[look],
            )  # fmt: skip
        # The first hundred are looked at and measured, and one in ten later.
        each = statistics.median(after - before for before, after in itertools.pairwise(seen[104:]))
        figures.append(f"{name} {each:.0f}")
        most = max(most, each)
    return [row("waits a window of 16 micro-batches: " + ", ".join(figures), "1", most <= 1)]


def tiny() -> list[Row]:
    from gpu_overhead import beside_by_hand

    return [beside_by_hand("tiny MLP", 1.30), beside_by_hand("tiny MLP, cut", 1.10)]


def _replayed(case: Case, name: str) -> list[Row]:
    rows = []
    effective_batch = 192 if is_small() or "conv" not in name else 256
    share = case.share * (0.75 if is_small() else 0.1)
    for deterministic in (True, False):
        torch.use_deterministic_algorithms(deterministic)
        models, seen, plans = [], [], effective_batch
        for _ in range(2):
            with fraction(share):
                result, watched = train(case, 3, effective_batch, micro_batch=plans)
                models.append(result.model.cpu())  # what is kept is not to be in the way of the other
                del result
            seen.append(watched.ooms)
            plans = [report.micro_batches for report in watched.history]
        apart = furthest(*models)
        ooms = f"{seen[0]} out-of-memory errors of the device, {seen[1]} when repeated from the recorded plan"
        if deterministic:
            met = seen[0] > 0 and seen[1] == 0 and same(*models)
            rows.append(row(f"{name}, deterministic: {ooms}; {apart:.1e} apart", "same to the bit", met))
        else:
            met = seen[0] > 0 and seen[1] == 0 and apart < 1e-3
            rows.append(row(f"{name}, default kernels: {ooms}; {apart:.1e} apart", "1e-3", met))
    torch.use_deterministic_algorithms(False)
    return rows


def recorded_plans() -> list[Row]:
    return _replayed(gpt(256), "GPT") + _replayed(images(), "conv net")


def _in_small_steps(case: Case, size: int) -> tuple[list[str], int, int]:
    """(untyped errors, fractions below which memory ran out, others) around what two windows of this size take."""
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    train(case, 2, size, micro_batch=size)
    peak, errors, short, ample = torch.accelerator.max_memory_reserved(), [], 0, 0
    for percent in range(80, 141, 5):
        with fraction(peak * percent / 100 / total_bytes()):
            try:
                has_run_out = train(case, 2, size, micro_batch=size, patience=0.0)[1].ooms > 0
            except AutoaccumError:
                has_run_out = True  # nothing fits, which it says
            except Exception as error:
                errors.append(f"{percent} %: {type(error).__name__}: {str(error)[:80]}")
                continue
        short, ample = short + has_run_out, ample + (not has_run_out)
    return errors, short, ample


def fractions() -> list[Row]:
    rows = []
    for benchmark in (False, True):
        name = "cudnn.benchmark" if benchmark else "default"
        if benchmark and not is_cuda():
            rows.append(not_run(f"{name}: {NEEDS_CUDA}"))
            continue
        torch.backends.cudnn.benchmark = benchmark
        errors, short, ample = _in_small_steps(images(), 64)
        figures = f"{name}: {len(errors)} untyped errors; memory ran out below {short} fractions, not below {ample}"
        rows.append(row("; ".join([figures, *errors[:2]]), "0, and both", not errors and short > 0 and ample > 0))
    return rows


def backend() -> str:
    """Return what compiles for this device: nothing does for the stand-in, whose graphs are run as they are traced."""
    return "aot_eager" if is_small() else "inductor"


def compiled() -> list[Row]:
    case = gpt(256)
    made = dataclasses.replace(case, model=lambda: torch.compile(case.model(), backend=backend()))
    _, watched = train(made, 12, 96)
    from torch._dynamo.utils import counters

    graphs = counters["stats"]["unique_graphs"]
    sizes = {size for report in watched.history for size in report.micro_batches}
    rows = [row(f"{graphs} graphs for micro-batches of {len(sizes)} sizes ({backend()})", "4", 0 < graphs <= 4)]
    gradients = []
    device = torch.accelerator.current_accelerator()
    for is_compiled in (False, True):
        model: Any = case.model().to(device)
        called: Any = torch.compile(model, backend=backend()) if is_compiled else model
        accumulator = autoaccum.Accumulator(called, adamw(model.parameters()), loss_fn=case.loss_fn, micro_batch=8)
        accumulator.backward(case.data(16))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    apart = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
    rows.append(row(f"compiled gradient {apart:.1e} from the eager one", "1e-4", apart <= 1e-4))
    if not is_cuda():
        return [*rows, not_run(f"reduce-overhead: {NEEDS_CUDA}", "refused")]
    try:
        train(dataclasses.replace(case, model=lambda: torch.compile(case.model(), mode="reduce-overhead")), 2, 16)
        return [*rows, row("reduce-overhead trained", "refused", False)]
    except autoaccum.errors.ArgumentError as error:
        return [*rows, row(f"reduce-overhead: {str(error)[:100]}", "refused", True)]


class _TooMuch(torch.autograd.Function):
    """Asks the device for more than it has in its first backward, and is the identity."""

    left = 0

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if _TooMuch.left:
            _TooMuch.left -= 1
            torch.empty(2 * total_bytes(), dtype=torch.uint8, device=gradient.device)
        return gradient


def fifty_ooms() -> list[Row]:
    case = gpt(256, checkpoints=True)
    model = case.model().to(torch.accelerator.current_accelerator())
    optimizer, batch = adamw(model.parameters()), case.data(16)
    model.blocks[0].register_forward_hook(lambda module, _, output: _TooMuch.apply(output))
    allocated, replayed, begun = [], 0, statistic("num_ooms")
    gc.collect()
    gc.freeze()  # each error has garbage collected, which is not to look at all of torch
    for number in range(51):
        _TooMuch.left = min(number, 1)  # none in the first, which makes the optimizer's state
        events: list[Any] = []
        accumulator = autoaccum.Accumulator(
            model, optimizer, loss_fn=case.loss_fn, micro_batch=8, precision="bf16", verify=False,
            callbacks=[events.append],
        )  # fmt: skip
        accumulator.step(batch)
        replayed += any(isinstance(event, autoaccum.events.OutOfMemory) for event in events)
        optimizer.zero_grad()
        del accumulator
        gc.collect()
        torch.accelerator.synchronize()
        allocated.append(torch.accelerator.memory_allocated())
    left = allocated[-1] - allocated[0]
    ooms = statistic("num_ooms") - begun
    figures = f"{replayed} windows run again after {ooms} errors in backward, {left} bytes left of them"
    return [row(figures, "50 windows, 0 bytes", replayed == 50 and left == 0)]


def pinned_buffer() -> list[Row]:
    """A batch of one's own in pinned memory may be overwritten as soon as a step has returned."""
    models = []
    batches = [(torch.randn(4096, 32), torch.randint(0, 10, (4096,))) for _ in range(20)]
    for is_pinned in (False, True):
        model = tiny_mlp().to(torch.accelerator.current_accelerator())
        accumulator = autoaccum.Accumulator(model, adamw(model.parameters()), loss_fn=cross_entropy, micro_batch=512)
        buffer = tuple(part.clone().pin_memory() for part in batches[0])
        for batch in batches:
            for part, read in zip(buffer, batch, strict=True):
                part.copy_(read)
            accumulator.step(buffer if is_pinned else batch)
            for part in buffer:
                part.zero_()
        models.append(model)
    apart = furthest(*models)
    return [row(f"20 steps, {apart:.1e} apart from batches of their own", "0", apart == 0)]
