"""Notices of a step (cause, consequence, cure), each announced once as an event and a warning."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Sequence

from autoaccum._units import format_bytes
from autoaccum.errors import AutoaccumWarning
from autoaccum.events import Event, Joined, Notice


def nothing_counts(step: int) -> Notice:
    """Say that a window has no item to learn from."""
    return Notice(
        cause=f"Nothing in window {step} counts: every target is ignored, num_items is 0, or no micro-batch has a "
        "loss by itself, as where samples are compared and there is one",
        consequence="Such windows take no step, and their loss is nan",
        cure="Look at the targets if there should be some; of samples that are compared, compute the loss of the whole "
        "window",
    )


def not_saved(names: Sequence[str]) -> Notice:
    """Say that forwards change attributes of these names, which checkpoints cannot store."""
    shown = ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
    return Notice(
        cause=f"Forwards change {shown}, which checkpoints cannot store",
        consequence="A resumed run starts with the values that the constructor sets",
        cure="Keep such state in buffers (register_buffer), or in attributes that hold numbers, texts, tensors, lists "
        "or dicts",
    )


def more_than_there_are(effective_batch: int, num_samples: int) -> Notice:
    """Say that a step asks for more samples than the data has."""
    return Notice(
        cause=f"effective_batch={effective_batch} is more than the data's {num_samples} samples",
        consequence=f"Every epoch is one window of {num_samples} samples",
        cure=f"Pass effective_batch={num_samples} to say so, or more data",
    )


def comes_twice() -> Notice:
    """Say that gradients are added up after the backward, for it cannot be told within it when one is whole."""
    return Notice(
        cause="The gradient of a parameter comes in several parts in one backward, as with reentrant checkpointing",
        consequence="Ranks add up gradients after the last backward, and not while it runs: the sum is the same",
        cure="Pass use_reentrant=False to torch.utils.checkpoint.checkpoint",
    )


def not_measured() -> Notice:
    """Say that nobody compares cut windows of a sharded model with whole ones."""
    return Notice(
        cause="The model is sharded over ranks, of which none can run it alone",
        consequence="What the loss averages over is read off its graph, and is not measured",
        cure="Run autoaccum.check on one process, with a model of the same loss that is small enough for it",
    )


def compiles_on(micro_batches: int, sizes: Sequence[int], seconds: float, limit: int) -> Notice:
    """Say that one micro-batch after the other has something compiled anew."""
    shown = ", ".join(map(str, sizes[:8])) + (", ..." if len(sizes) > 8 else "")
    return Notice(
        cause=f"Something that the loss calls was compiled anew in {micro_batches} micro-batches, of {shown} samples, "
        f"which took {seconds:.0f} s",
        consequence=f"Each costs its compilation, and after {limit} of one function PyTorch runs it uncompiled",
        cure="Compile without dynamic=False, so that one compilation does for all sizes, or pass micro_batch; "
        "TORCH_LOGS=recompiles tells why each was needed",
    )


def above_limit(limit_bytes: int, least_bytes: int) -> Notice:
    """Say that the limit has fallen below what the smallest micro-batch needs, which goes on all the same."""
    return Notice(
        cause=f"The limit is {format_bytes(limit_bytes)} now, and the smallest micro-batch needs "
        f"{format_bytes(least_bytes)}",
        consequence="Training goes on above the limit while the device lets it",
        cure="Allow more, or stop the run",
    )


def over_limit(step: int, peak_bytes: int, limit_bytes: int, *, is_expected: bool = False) -> Notice:
    """Say that a window has taken more than it may, or is expected to, on a device that refuses nothing."""
    takes = "is expected to take" if is_expected else "took"
    return Notice(
        cause=f"Window {step} {takes} {format_bytes(peak_bytes)} where the limit is {format_bytes(limit_bytes)}",
        consequence="On this device nothing but the plan keeps it, which is made smaller where that happens twice",
        cure="Pass a lower memory_limit or a larger headroom if that is too much; allow more if nothing smaller fits",
    )


def cache_emptied(strain: str) -> Notice:
    """Say that an allocator keeps giving its cache back and taking it again."""
    return Notice(
        cause=strain[:1].upper() + strain[1:],
        consequence="Each time the device waits, and memory is taken from it anew",
        cure="Set PYTORCH_ALLOC_CONF=expandable_segments:True where the device has it, or leave more memory free",
    )


def killed_at_the_smallest(micro_batch: int) -> Notice:
    """Say that the last process was killed in a micro-batch than which none is smaller."""
    return Notice(
        cause=f"The kernel killed the last process for its memory, in a micro-batch of {micro_batch}",
        consequence="None is smaller, so this one may end like that too",
        cure="Allow more memory, or train a smaller model",
    )


def not_finite(step: int, loss: float) -> Notice:
    """Say that a loss after the first window is not finite."""
    return Notice(
        cause=f"The loss of window {step} is {loss}",
        consequence="The step was taken, and the parameters may not be finite any more",
        cure="Look for NaN in the data and for log(0) or a division by 0 in the loss; else lower lr, or pass clip_norm",
    )


def not_repeatable(kinds: Sequence[str], reason: str) -> Notice:
    """Say that blocks are not computed twice, for their gradient would be another one."""
    return Notice(
        cause=f"Blocks were to be computed once more in backward, which memory asks for. {reason}",
        consequence=f"No forward of {', '.join(kinds)} is computed twice in this run",
        cure="Let it draw from PyTorch's generators, change no state but its own, and write to none of its inputs",
    )


def not_compared(saving: str) -> Notice:
    """Say that the gradient of blocks that are computed twice was not compared, for want of memory."""
    return Notice(
        cause=f"Blocks are computed once more in backward ({saving}), and there was no memory to compare their "
        "gradient with the plain one",
        consequence="Whether it is the same is not measured for some blocks in this run",
        cure="Raise memory_limit, or train a smaller model of the same blocks once, with memory_saving='checkpoint'",
    )


def not_offloaded(reason: str) -> Notice:
    """Say that nothing is kept on the host, for forwards fail so."""
    return Notice(
        cause=f"Tensors were to be kept on the host until backward, which memory asks for. {reason}",
        consequence="Nothing is kept on the host in this run",
        cure="Pass memory_saving='checkpoint', and write to no tensor once a forward has used it",
    )


def nothing_to_save(mode: str | Sequence[str], reason: str) -> Notice:
    """Say that memory cannot be saved as it was asked for."""
    return Notice(
        cause=f"memory_saving={as_written(mode)} was passed, and {reason}",
        consequence="Nothing is computed twice or kept on the host, and nothing is saved by that",
        cure='Pass memory_saving="off", or call torch.utils.checkpoint.checkpoint in the model',
    )


def as_written(mode: str | Sequence[str]) -> str:
    """Return a way of saving memory as it is written in a program."""
    return json.dumps(mode)


def not_joined(found: Joined) -> Notice:
    """Return that joined steps have another gradient than full batches."""
    opened = f" ({', '.join(found.opened[:3])} ran on the full batch already)" if found.opened else ""
    return Notice(
        cause=f"Joined micro-batches have a gradient with a relative error of {found.error:.1%} on "
        f"{found.samples} samples{opened}",
        consequence="The model does something in each forward that micro-batches cannot repeat, such as hooks that "
        "change gradients, counters, or draws of another library",
        cure="Pass micro_batch= the effective batch if it fits, or move that code out of the model's forward",
    )


def not_measured_joined(why: str) -> Notice:
    """Return that it could not be measured whether joined steps are exact."""
    return Notice(
        cause=f"Joined micro-batches could not be compared with full batches: {why}",
        consequence="Their gradient may differ from the full batch's",
        cure="Call autoaccum.check with other samples",
    )


def compiled_whole() -> Notice:
    """Return that a step is compiled as a whole, so that it is not run compiled where it is to be joined."""
    return Notice(
        cause="The step is compiled as a whole, so that no call of a module in it can be split",
        consequence="From here on the run is joined and not compiled, which may be slower",
        cure="Compile the model and not the step: model = torch.compile(model)",
    )


def saved_uncompiled() -> Notice:
    """Return that forwards run uncompiled where their blocks are computed again."""
    return Notice(
        cause="memory_saving recomputes blocks of the model in backward, which needs forwards that are not compiled",
        consequence="From here on the run is not compiled, which may be slower",
        cure="To stay compiled, pass memory_saving='off' and set torch._functorch.config.activation_memory_budget to "
        "0.5, by which PyTorch's compiler recomputes",
    )


def joined_does_not_fit(reason: str) -> Notice:
    """Return that joined steps do not fit, so that micro-batches are weighted although that is not exact."""
    return Notice(
        cause=f"Joined micro-batches hold the model's outputs for the full batch, which does not fit. Weighted ones "
        f"are not exact: {reason}",
        consequence="The gradient is not the full batch's from here on",
        cure="Use a smaller effective batch, a loss that takes hidden states and holds no logits "
        "(torch.nn.functional.linear_cross_entropy), or raise memory_limit",
    )


class Announcer:
    """Remembers what was said."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        """Set up; ``emit`` takes the events."""
        self._emit = emit
        self._said: set[str] = set()  # consequences: the same one may have causes that differ in a number

    def tell(self, event: Event) -> None:
        """Emit an event; announce it where it is a notice, once."""
        if isinstance(event, Notice):
            self.say_once(event)
        else:
            self._emit(event)

    def say_once(self, notice: Notice) -> None:
        """Announce a notice, unless one of the same consequence was announced by this."""
        if notice.consequence not in self._said:
            self._said.add(notice.consequence)
            self.say(notice)

    def say(self, notice: Notice) -> None:
        """Announce a notice whatever was said before."""
        # Both: the event is for callbacks and records, and the warning for whoever looks at neither.
        self._emit(notice)
        # The warning is to point at the first line that is neither ours nor PyTorch's.
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("autoaccum", "torch"):
            level, frame = level + 1, frame.f_back
        warnings.warn(str(notice), AutoaccumWarning, stacklevel=level)

    def state_dict(self) -> list[str]:
        """Return what was said, for a checkpoint: a resumed run does not say it again."""
        return sorted(self._said)

    def load_state_dict(self, said: list[str]) -> None:
        """Add what an earlier process has said."""
        self._said.update(said)
