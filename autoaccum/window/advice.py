"""What would make the smallest micro-batch fit, for the user to choose from: each cure with the bytes that it needs.

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
from autoaccum.errors import Advice
from autoaccum.loss.functions import LossOf
from autoaccum.memory.base import Memory
from autoaccum.window.optimizers import sparsely_trained
from autoaccum.window.precision import Precision, autocast
from autoaccum.window.tape import Entry, lists_of_blocks, most_held, no_trace, record

WORTH = 0.01
"""What saves less than this share of the bytes needed is not said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """The smallest micro-batch, which did not fit, and what it was trained with; memory is as before it."""

    model: Any
    """What ``loss_of`` is called with."""
    modules: Sequence[nn.Module]
    """The model, and the loss if it is one too."""
    optimizer: torch.optim.Optimizer
    """Over their parameters, its state allocated."""
    loss_of: LossOf
    """(model, batch) -> loss."""
    batch: Callable[[], Any]
    """Makes the micro-batch."""
    precision: Precision
    """Of the forward."""
    device: torch.device
    """Where it ran."""
    memory: Memory
    """Of that device."""
    limit_bytes: int
    """What may be used."""
    peak_bytes: int | None
    """The most that was in use; None if that was not read."""


def advise(refused: Refused) -> tuple[Advice, ...]:
    """What saves memory, largest saving first; and last all of it together, where no one thing is enough.

    It leaves no trace and raises nothing: what cannot be measured is left out, or has no ``needed_bytes``.
    """
    try:
        found = _advise(refused)
    except Exception:  # whatever it is: the user is to hear of what did not fit
        found = ()
    gc.collect()  # what a forward that failed has left in reference cycles
    return found


def _advise(refused: Refused) -> tuple[Advice, ...]:
    states = _smaller_states(refused.optimizer)
    trained = _trained(refused)
    before = _measure(refused, refused.precision)
    if before is None:
        known = refused.memory.used() + sum(p.nbytes for p in trained)
        return tuple(
            Advice(name=name, saves_bytes=saves, needed_bytes=None, fits=False, how=how)
            for name, saves, how in states
            if saves > WORTH * known
        )
    used_bytes, tape = before
    halved = _measure(refused, "bf16") if _halves(refused) else None
    rest = used_bytes + sum(p.nbytes for p in trained if p.grad is None)
    # It did not fit, so what is not reckoned (workspaces, fragments) makes up the difference; no cure makes it smaller.
    rest = max(rest, refused.limit_bytes + 1 - most_held(tape), (refused.peak_bytes or 0) - most_held(tape))
    now = rest + most_held(tape)

    def cure(name: str, needed: int, how: str) -> Advice:
        return Advice(
            name=name, saves_bytes=now - needed, needed_bytes=needed, fits=needed <= refused.limit_bytes, how=how
        )

    blocks = list(lists_of_blocks(refused.modules))
    offloads = refused.device.type != "cpu"
    cures = [cure(name, now - saves, how) for name, saves, how in states]
    if blocks:
        best = min(blocks, key=lambda name: most_held(tape, checkpointed=name))
        how = _how_to_checkpoint(refused.model, best)
        cures.append(cure("activation checkpointing", rest + most_held(tape, checkpointed=best), how))
    if offloads:
        how = "with torch.autograd.graph.save_on_cpu(pin_memory=True): around the forward"
        cures.append(cure("save_on_cpu", rest + most_held(tape, elsewhere=True), how))
    if halved is not None:
        cures.append(cure("bf16", rest + most_held(halved[1]), "precision='bf16'"))
    cures = sorted((c for c in cures if c.saves_bytes > WORTH * now), key=lambda c: -c.saves_bytes)
    least = min(
        most_held(entries, checkpointed=name, elsewhere=elsewhere)
        for entries in ([tape] if halved is None else [tape, halved[1]])
        for name in (None, *blocks)
        for elsewhere in {False, offloads}
    )
    state = max((saves for _, saves, _ in states), default=0)
    together = cure("all together", rest + least - state, "these at once, with SGD" if state else "these at once")
    if cures and not any(c.fits for c in cures) and together.saves_bytes > max(c.saves_bytes for c in cures):
        cures.append(together)
    return tuple(cures)


def _measure(refused: Refused, precision: Precision) -> tuple[int, tuple[Entry, ...]] | None:
    """Bytes in use beside the micro-batch, and the tape of its forward; None if it cannot be run even so."""
    refused.memory.release()
    try:
        with no_trace(refused.modules, refused.device), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what there is to warn of was said before
            batch = refused.batch()
            used_bytes = refused.memory.used()
            with autocast(precision, refused.device)():
                forward = lambda: refused.loss_of(refused.model, batch)  # noqa: E731
                return used_bytes, record(forward, refused.modules, batch, refused.device)
    except Exception:
        return None


def _halves(refused: Refused) -> bool:
    """Whether bf16 is another choice, and one that the device has."""
    kind = refused.device.type
    if refused.precision != "fp32" or not torch.amp.is_autocast_available(kind):
        return False
    return kind != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def _trained(refused: Refused) -> list[torch.Tensor]:
    """What gets gradients of its own size."""
    held = [p for group in refused.optimizer.param_groups for p in group["params"]]
    sparse = {id(weight) for weight in sparsely_trained(refused.modules)}
    found = {id(p): p for p in (*held, *(p for module in refused.modules for p in module.parameters()))}
    return [p for p in found.values() if p.requires_grad and id(p) not in sparse]


def _smaller_states(optimizer: torch.optim.Optimizer) -> list[tuple[str, int, str]]:
    """Optimizers that keep less: the name, the bytes that it saves, how to get it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    kinds = {p.device.type for p in parameters}
    state = flatten(list(optimizer.state.values()))[0]
    now = sum(v.nbytes for v in state if isinstance(v, torch.Tensor) and v.device.type in kinds)
    how = "optimizer=lambda params: torch.optim."
    found = [("SGD", now, f"{how}SGD(params, lr=...), which keeps no state without momentum")]
    if hasattr(torch.optim, "Adafactor") and not any(p.is_complex() for p in parameters):
        found.append(("Adafactor", now - sum(map(_factored, parameters)), f"{how}Adafactor(params)"))
    return [(name, saves, words) for name, saves, words in found if saves > 0]


def _factored(parameter: torch.Tensor) -> int:
    """Bytes of the second moments of one parameter as Adafactor keeps them: rows and columns of matrices."""
    if parameter.dim() < 2:
        return parameter.nbytes
    *batch, rows, columns = parameter.shape
    return math.prod(batch) * (rows + columns) * parameter.element_size()


def _how_to_checkpoint(model: Any, blocks: str) -> str:
    for method in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):  # transformers renamed it
        if callable(getattr(model, method, None)):
            return f"model.{method}()"
    return f"torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) for each block of {blocks}"
