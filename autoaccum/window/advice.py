"""Advice for when nothing fits: what would make the smallest micro-batch fit, each cure with the bytes that it needs.

    needed = what is in use before it (parameters, optimizer state, data) + gradients + the most that is held at once

The first two are known; the last is read off the tape of one forward, which is run again only to be measured.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoaccum.data.batches import flatten
from autoaccum.errors import Advice, NothingFitsError
from autoaccum.loss.stated import LossOf, total
from autoaccum.memory.base import Memory
from autoaccum.window.blocks import NOTHING_SAVED, SavedAlready, blocks_of
from autoaccum.window.job import Job
from autoaccum.window.offloading import ABOVE_BYTES, has_host_memory
from autoaccum.window.optimizers import sparsely_trained
from autoaccum.window.precision import Precision, autocast
from autoaccum.window.tape import Entry, most_held, no_trace, record

WORTH_SAYING = 0.01
"""Leave out a cure that saves less than this share of the bytes needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """The smallest micro-batch, which did not fit, and what it was trained with; memory is as before it."""

    model: Any
    """The object that ``loss_of`` is called with."""
    modules: Sequence[nn.Module]
    """The model, and the loss if it is one too."""
    optimizer: torch.optim.Optimizer
    """The optimizer of their parameters, its state allocated."""
    loss_of: LossOf
    """(model, batch) -> loss."""
    batch: Callable[[], Any]
    """() -> the micro-batch."""
    precision: Precision
    """The precision of the forward."""
    device: torch.device
    """The device that it ran on."""
    memory: Memory
    """The memory of that device."""
    limit_bytes: int
    """Bytes that may be used."""
    peak_bytes: int | None
    """The most bytes that were in use; None if that was not read."""
    saved: SavedAlready = NOTHING_SAVED
    """How memory was saved already."""


def advised(
    error: NothingFitsError,
    job: Job,
    batch: Callable[[int], Any],
    memory: Memory,
    limit_bytes: int,
    saved: SavedAlready = NOTHING_SAVED,
) -> NothingFitsError:
    """Return an error with what would make the smallest micro-batch of a job fit, and with the cause that it had.

    Args:
        error: what the job was refused with.
        job: as it was run.
        batch: (samples) -> the micro-batch.
        memory: of the job's device.
        limit_bytes: what may be used of it.
        saved: how memory was saved.
    """
    samples = error.micro_batch or 1
    refused = Refused(
        model=job.model,
        modules=job.modules,
        optimizer=job.optimizer,
        loss_of=job.loss_of,
        batch=lambda: batch(samples),
        precision=job.precision,
        device=job.device,
        memory=memory,
        limit_bytes=limit_bytes,
        peak_bytes=error.peak_bytes,
        saved=saved,
    )
    found = error.advised(advise(refused), saved.told)
    found.__cause__ = error.__cause__
    return found


def advise(refused: Refused) -> tuple[Advice, ...]:
    """Return what saves memory, largest saving first; and last all of it together, where no one thing is enough.

    It leaves no trace and raises nothing: what cannot be measured is left out, or has no ``needed_bytes``.
    """
    # Advice is added to an error that is on its way: whatever fails here, the user is to hear of what did not fit.
    try:
        found = _advise(refused)
    except Exception:
        found = ()
    # A forward that failed may have left tensors in reference cycles.
    gc.collect()
    return found


def _advise(refused: Refused) -> tuple[Advice, ...]:
    """Return the advice of ``advise``, without its guard."""
    saved = refused.saved
    # A smaller state makes no more room where none of it is on the device.
    states = [] if saved.level.offloads else _smaller_states(refused.optimizer)
    trained = _densely_trained(refused)
    measured = _measure(refused, refused.precision)
    if measured is None:
        # Not even a forward that keeps nothing can be run. What the optimizer's state takes is known without one.
        known_bytes = refused.memory.used() + sum(p.nbytes for p in trained)
        return tuple(
            Advice(name=name, saves_bytes=saves, needed_bytes=None, fits=False, how=how)
            for name, saves, how in states
            if saves > WORTH_SAYING * known_bytes
        )
    used_bytes, tape = measured
    tapes = [tape]
    in_bf16 = _measure(refused, "bf16") if _can_take_bf16(refused) else None
    if in_bf16 is not None:
        tapes.append(in_bf16[1])
    # What is done already is done under each of the other cures. By hand, small tensors are moved as well.
    above_bytes = -1 if saved.how_to_offload == "" else ABOVE_BYTES

    def held_by(entries: Sequence[Entry], blocks: Sequence[str], *, elsewhere: bool = saved.level.offloads) -> int:
        """Return the most held for a backward."""
        return most_held(entries, checkpointed=blocks, elsewhere=elsewhere, above_bytes=above_bytes)

    twice = saved.level.blocks
    held = held_by(tape, twice)
    # Needed in all = ``rest``, which no cure below makes smaller but a smaller state, + the most held for a backward.
    # Gradients that are there already are in what is used.
    rest = used_bytes - _away_bytes(refused) + sum(p.nbytes for p in trained if p.grad is None)
    # It did not fit, so what is not reckoned (workspaces, fragments) makes up the difference; no cure makes it smaller.
    rest = max(rest, refused.limit_bytes + 1 - held, (refused.peak_bytes or 0) - held)
    now = rest + held

    def cure(name: str, needed: int, how: str) -> Advice:
        """Make the advice that needs so many bytes in all."""
        return Advice(
            name=name, saves_bytes=now - needed, needed_bytes=needed, fits=needed <= refused.limit_bytes, how=how
        )

    how_twice, how_elsewhere = saved.how_to_compute_twice, saved.how_to_offload
    blocks = {} if how_twice is None else blocks_of(refused.modules)
    offloads = has_host_memory(refused.device) and how_elsewhere is not None
    cures = [cure(name, now - saves, how) for name, saves, how in states]
    if blocks:
        kinds = " and ".join(dict.fromkeys(type(block).__name__ for block in blocks.values()))
        how = how_twice or _how_to_checkpoint(refused.model, kinds)
        cures.append(cure("activation checkpointing", rest + held_by(tape, tuple(blocks)), how))
    if offloads and how_elsewhere:
        # The state too, which has to be back for the step.
        away = max((saves for _, saves, _ in states), default=0)
        needed = max(rest, rest - away + held_by(tape, twice, elsewhere=True))
        cures.append(cure("offload", needed, how_elsewhere))
    elif offloads:
        how = "with torch.autograd.graph.save_on_cpu(pin_memory=True): around the forward"
        cures.append(cure("save_on_cpu", rest + held_by(tape, twice, elsewhere=True), how))
    if in_bf16 is not None:
        cures.append(cure("bf16", rest + held_by(in_bf16[1], twice), "precision='bf16'"))
    cures = sorted((c for c in cures if c.saves_bytes > WORTH_SAYING * now), key=lambda c: -c.saves_bytes)
    # All together is worth saying only where it may be the one way out.
    if not cures or any(c.fits for c in cures):
        return tuple(cures)
    state = max((saves for _, saves, _ in states), default=0)
    choices = [twice, tuple(blocks)] if blocks else [twice]
    ways = {saved.level.offloads, saved.level.offloads or offloads}
    least = min(held_by(of, blocks, elsewhere=way) for of in tapes for blocks in choices for way in ways)
    together = cure("all together", rest + least - state, "these at once, with SGD" if state else "these at once")
    if together.saves_bytes > max(c.saves_bytes for c in cures):
        cures.append(together)
    return tuple(cures)


def _measure(refused: Refused, precision: Precision) -> tuple[int, tuple[Entry, ...]] | None:
    """Return the bytes in use beside the micro-batch, and the tape of its forward; None if it cannot be run even so."""
    refused.memory.release()
    try:
        with no_trace(refused.modules, refused.device), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what there is to warn of was said before
            batch = refused.batch()
            used_bytes = refused.memory.used()
            blocks = blocks_of(refused.modules)
            with autocast(precision, refused.device)():
                forward = lambda: total(refused.loss_of(refused.model, batch))  # noqa: E731
                return used_bytes, record(forward, refused.modules, batch, refused.device, blocks)
    except Exception:
        return None


def _can_take_bf16(refused: Refused) -> bool:
    """Return whether bf16 is another choice, and one that the device has."""
    kind = refused.device.type
    if refused.precision != "fp32" or not torch.amp.is_autocast_available(kind):
        return False
    # Older cards emulate it, which takes longer and saves nothing.
    return kind != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def _densely_trained(refused: Refused) -> list[torch.Tensor]:
    """Return the parameters that get gradients of their own size, each once."""
    sparse = {id(weight) for weight in sparsely_trained(refused.modules)}
    # The optimizer may hold parameters of no module, and modules some that no optimizer holds: a backward fills both.
    found = {id(p): p for group in refused.optimizer.param_groups for p in group["params"]}
    for module in refused.modules:
        found |= {id(p): p for p in module.parameters()}
    return [p for p in found.values() if p.requires_grad and id(p) not in sparse]


def _smaller_states(optimizer: torch.optim.Optimizer) -> list[tuple[str, int, str]]:
    """Return the optimizers that keep less: the name, the bytes that it saves, how to get it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    # Some keep their step counts on the CPU: those take none of the device's memory.
    kinds = {p.device.type for p in parameters}
    state = flatten(list(optimizer.state.values()))[0]
    now = sum(v.nbytes for v in state if isinstance(v, torch.Tensor) and v.device.type in kinds)
    how = "optimizer=lambda params: torch.optim."
    found = [("SGD", now, f"{how}SGD(params, lr=...), which keeps no state without momentum")]
    # PyTorch's Adafactor refuses complex parameters.
    if hasattr(torch.optim, "Adafactor") and not any(p.is_complex() for p in parameters):
        found.append(("Adafactor", now - sum(map(_adafactor_bytes, parameters)), f"{how}Adafactor(params)"))
    return [(name, saves, words) for name, saves, words in found if saves > 0]


def _adafactor_bytes(parameter: torch.Tensor) -> int:
    """Return the bytes of one parameter's second moments as Adafactor keeps them: rows and columns of matrices.

    Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (2018), section 3.
    """
    if parameter.dim() < 2:
        return parameter.nbytes
    *batch, rows, columns = parameter.shape
    return math.prod(batch) * (rows + columns) * parameter.element_size()


def _how_to_checkpoint(model: Any, blocks: str) -> str:
    """Return the code that checkpoints those blocks: the model's own method, where it has one."""
    for method in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):  # transformers renamed it
        if callable(getattr(model, method, None)):
            return f"model.{method}()"
    return f"torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) for each {blocks}"


def _away_bytes(refused: Refused) -> int:
    """Return the bytes of the optimizer's state that is on the host while a window runs."""
    if not refused.saved.level.offloads:
        return 0
    state = flatten(list(refused.optimizer.state.values()))[0]
    tensors = [value for value in state if isinstance(value, torch.Tensor)]
    return sum(one.nbytes for one in tensors if one.device == refused.device and one.nbytes > ABOVE_BYTES)
