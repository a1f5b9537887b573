"""What a run does where not even its smallest micro-batch fits: it saves memory, level by level and to the same bits.

Blocks compute their forward twice; then, on an accelerator, tensors go to the host as well. Which blocks there are
and how they do it, ``checkpointing`` says; how tensors go to the host, ``offloading``; when, ``planning.limits``.
A level is stepped on at once, for a window that needs it cannot be run without it. The gradient of each block, computed
twice, is compared with the plain one in its first call, in which there is room for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from autoaccum.data.batches import num_bytes
from autoaccum.errors import Advice, AutoaccumError
from autoaccum.events import MemorySaving, Notice, Recomputed
from autoaccum.memory.oom import drop_what_is_due, without_frames
from autoaccum.planning.limits import Ladder, SavingMode, kinds_asked_for
from autoaccum.step import notices
from autoaccum.step.checkpointing import (
    NOTHING_SAVED,
    OFF,
    Level,
    NotRepeatableError,
    Recomputing,
    SavedAlready,
    blocks_of,
    is_refusal,
    levels_of,
    named_submodules,
)
from autoaccum.step.job import Job, Precision
from autoaccum.step.offloading import Offloading, has_host_memory
from autoaccum.step.terms import LossOf


class NotSaved(NamedTuple):
    """An attempt at a window in which it showed that memory cannot be saved as it was to be."""

    error: Exception
    """Without frames, so that it pins nothing of what must be freed."""


class Computes(Protocol):
    """What computes losses."""

    def compute_by(self, loss_of: LossOf) -> None:
        """Compute them by this from now on."""


class Saving:
    """The levels of one run, and the one that it stands on."""

    def __init__(
        self,
        job: Job,
        mode: SavingMode,
        *,
        kinds: frozenset[str],
        users: Sequence[Computes] = (),
    ) -> None:
        """Set up on the highest level.

        Args:
            job: what is computed, with the loss as it is written.
            mode: as the user wants it.
            kinds: in which ways memory can be saved: nothing is moved to the host where that is the device, say.
            users: what computes losses, and is told by which function.
        """
        self._job = job
        self._mode = mode
        self._had = kinds  # whatever the user wants
        self._asked = kinds_asked_for(mode)
        self._kinds = frozenset() if mode == "off" else kinds & (self._asked or kinds)
        self._recomputing = Recomputing(job.modules, job.functions, job.device)
        self._offloading = Offloading(job.modules, job.device)
        self._users = users
        self.uncompile: Callable[[], None] = lambda: None
        """Makes forwards run uncompiled, as recomputed blocks need; set by the step."""
        self._level = OFF
        self.name = OFF.name
        """The name of the level."""
        self.is_off = True
        """Whether nothing is saved, as in nearly all windows of nearly all runs."""
        self.wants_begin = bool(self._asked and self._kinds)
        """Whether the first window has to begin on a lower level: see ``begin``."""
        self._ladder = Ladder()
        self._why = "the model repeats no block that could be computed again"  # there is no level
        self._refused: set[str] = set()  # names of classes whose forward cannot be computed again
        self._done = 0  # the lowest level on which a window has committed

    @property
    def is_asked_for(self) -> bool:
        """Return whether the user wants memory to be saved, whatever fits."""
        return bool(self._asked)

    @property
    def has_risen(self) -> bool:
        """Return whether there is a lower level that has done before."""
        return self._done > self._ladder.level

    @property
    def saved(self) -> SavedAlready:
        """Return what is saved already, and how to have more saved than that."""
        return SavedAlready(self._level, self._how_to("checkpoint"), self._how_to("offload"))

    def _how_to(self, kind: str) -> str | None:
        """Return how to have memory saved in a way; empty where that cannot be had, None where it was tried."""
        if kind not in self._had:
            return ""
        if self._mode == "off":
            return 'memory_saving="auto"'
        is_left_out = bool(self._asked) and kind not in self._asked
        return 'memory_saving=["checkpoint", "offload"]' if is_left_out else None

    def _levels(self) -> list[Level]:
        """Return the levels below the highest."""
        found = levels_of(self._job.modules, self._kinds, self._refused)
        # Who asks for a way of saving memory asks for all of it.
        return found[-1:] if self._asked else found

    # Changes of the level. Each returns what is to be told of it.

    def begin(self, step: int) -> MemorySaving | Notice:
        """Go to the level that the user wants, before the first window; say so where there is none."""
        self.wants_begin = False
        wanted = self._mode if isinstance(self._mode, str) else list(self._mode)
        # Not an error: until this window nobody knew, and the run itself is fine.
        if not self._levels():
            self._kinds = frozenset()
            return notices.nothing_to_save(wanted, self._why)
        # As if the plain one had failed under a limit of nothing; how much there is makes no difference to who asks.
        self._ladder.fall(0, 0)
        return self._moved(step, f"memory_saving={notices.as_written(wanted)} was passed")

    def lower(self, step: int, limit_bytes: int, needed_bytes: int) -> MemorySaving | None:
        """Go down a level, memory being as it was before the window; return None where there is none.

        Args:
            step: the number of the window.
            limit_bytes: what may be used.
            needed_bytes: what the smallest micro-batch, which did not fit, needs at least.
        """
        if self._ladder.level == len(self._levels()):
            return None
        self._ladder.fall(limit_bytes, needed_bytes)
        return self._moved(step, "out of memory at the smallest micro-batch")

    def look(self, limit_bytes: int, step: int) -> MemorySaving | None:
        """Look at the memory before a window, and go up a level if there has been enough of it for long enough."""
        if self._mode != "auto" or not self._ladder.look(limit_bytes):
            return None
        self._ladder.rise()
        return self._moved(step, "memory has come back")

    def _moved(self, step: int, reason: str) -> MemorySaving:
        before = self.name
        self._stand()
        return MemorySaving(step=step, old=before, new=self.name, reason=reason, blocks=len(self._level.blocks))

    def _stand(self) -> None:
        """Have losses computed as the ladder's level has it."""
        self._level = level = [OFF, *self._levels()][self._ladder.level]
        self.is_off, self.name = level is OFF, level.name
        named = named_submodules(self._job.modules)
        self._recomputing.blocks = [named[name] for name in level.blocks]
        # Where nothing is saved it is the user's own function again, and nothing around it.
        loss_of = self._job.loss_of
        if level.blocks:
            self.uncompile()
            loss_of = self._recomputing.of_loss(loss_of)
        # Around the other, so that what the blocks are given goes to the host as well.
        if level.offloads:
            loss_of = self._offloading.of_loss(loss_of)
        for user in self._users:
            user.compute_by(loss_of)

    # Windows.

    def committed(self, step: int) -> Recomputed | Notice | None:
        """Take it that a window has committed; return what was compared in it."""
        # What has done once is gone back to without any wait.
        self._done = max(self._done, self._ladder.level)
        compared, self._recomputing.compared = self._recomputing.compared, []
        if self._recomputing.lacks_memory:
            self._recomputing.lacks_memory = False
            return notices.not_compared(self.name)
        return Recomputed(step=step, saving=self.name, blocks=len(compared)) if compared else None

    def not_saved(self, error: Exception) -> NotSaved:
        """Return what an error in a window says of how memory is saved; raise it where it says nothing of that."""
        # One that is new with the level is taken for it: without it the window does not fit, whatever it raises. What
        # this library raises says itself what is wrong.
        is_of_level = is_refusal(error) or self._done < self._ladder.level
        if self.is_off or isinstance(error, AutoaccumError) or not is_of_level:
            raise error
        refused = NotSaved(without_frames(error))
        drop_what_is_due()
        return refused

    def refuse(self, error: Exception, step: int) -> tuple[Notice, MemorySaving]:
        """Give up the level, which is not exact; others may be found. Return what is to be told."""
        reason = f"{error}".partition("\n")[0]
        if self._level.offloads and not is_refusal(error):
            self._kinds -= {"offload"}
            notice, self._why = notices.not_offloaded(reason), "tensors cannot be kept on the host"
        else:
            # Checkpoint does not say which block it was: then all of them are given up.
            at_fault = [error.block] if isinstance(error, NotRepeatableError) else self._recomputing.blocks
            kinds = sorted({type(block).__name__ for block in at_fault})
            self._refused.update(kinds)
            notice = notices.not_repeatable(kinds, reason)
            self._why = f"{', '.join(sorted(self._refused))} cannot be computed again"
        self._done = 0
        self._ladder.give_up()
        return notice, self._moved(step, self._why)

    def state_dict(self) -> dict[str, Any]:
        """Return the level that the run stands on, and what was refused; nothing where that says nothing."""
        # So that checkpoints of runs that fit are what they were before there was anything to save.
        if self.is_off and not self._refused:
            return {}
        return {"saving": {"level": self.name, "refused": sorted(self._refused), **self._ladder.state_dict()}}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Put back what ``state_dict`` returned; return whether this stands on the level of then.

        It does not where the model has no such blocks, or where the user wants another level by now.
        """
        found = state.get("saving", {"level": OFF.name, "refused": (), "wanted": ()})
        self._refused = set(found["refused"])
        names = [OFF.name, *(level.name for level in self._levels())]
        number = len(found["wanted"])
        # Sizes that were found on one level are not those of another.
        if names[number : number + 1] != [found["level"]] or (self._asked and number != 1):
            return False
        self._ladder.load_state_dict(found)
        self._done = number
        self.wants_begin = False
        self._stand()
        return True


_OFTEN_LARGE = 0.5
"""Advise optimizers that keep less where the state takes more than this share of the parameters' bytes."""


def advise(
    modules: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    device: torch.device,
    saved: SavedAlready = NOTHING_SAVED,
) -> tuple[Advice, ...]:
    """Return what takes less memory than the smallest micro-batch did. It runs nothing.

    Args:
        modules: the model, and the loss if it is one too.
        optimizer: of their parameters, its state allocated.
        precision: of the forward that did not fit.
        device: that it ran on.
        saved: how memory was saved already.
    """
    found = []
    blocks = {} if saved.how_to_compute_twice is None else blocks_of(modules)
    if blocks:
        kinds = " and ".join(dict.fromkeys(type(block).__name__ for block in blocks.values()))
        how = saved.how_to_compute_twice or _how_to_checkpoint(modules[0], kinds)
        found.append(Advice(name="activation checkpointing", how=how))
    if saved.how_to_offload:
        found.append(Advice(name="offload", how=saved.how_to_offload))
    elif saved.how_to_offload is not None and has_host_memory(device):
        how = "with torch.autograd.graph.save_on_cpu(pin_memory=True): around the forward"
        found.append(Advice(name="save_on_cpu", how=how))
    if _can_take_bf16(precision, device):
        found.append(Advice(name="bf16", how="precision='bf16'"))
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if _keeps_much(optimizer, parameters):
        make = "optimizer=lambda params: torch.optim."
        # PyTorch's Adafactor refuses complex parameters.
        if not any(p.is_complex() for p in parameters):
            found.append(Advice(name="Adafactor", how=f"{make}Adafactor(params)"))
        found.append(Advice(name="SGD", how=f"{make}SGD(params, lr=...), which keeps no state without momentum"))
    return tuple(found)


def _can_take_bf16(precision: Precision, device: torch.device) -> bool:
    """Return whether bf16 is another choice, and one that the device has."""
    if precision != "fp32" or not torch.amp.is_autocast_available(device.type):
        return False
    # Older cards emulate it, which takes longer and saves nothing.
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def _keeps_much(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether the optimizer's state takes about as much memory as the parameters, or more."""
    state_bytes = num_bytes(list(optimizer.state.values()))
    return state_bytes > _OFTEN_LARGE * sum(p.nbytes for p in parameters)


def _how_to_checkpoint(model: Any, blocks: str) -> str:
    """Return the code that checkpoints those blocks: the model's own method, where it has one."""
    for method in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):  # transformers renamed it
        if callable(getattr(model, method, None)):
            return f"model.{method}()"
    return f"torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) for each {blocks}"
