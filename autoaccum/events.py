"""What a run tells: one ``StepReport`` per window, and an event for everything else that happens to it.

Callbacks are called with each of these, in order, as it happens; ``FitResult`` keeps them. All are frozen values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Records of runs are written field by field (runs/records.py) and read by later versions: a field that is added needs a
# default, and its type is one that records can hold.

HYPOTHESES: dict[str, str] = {
    "num_items": "a mean over what num_items counts",
    "items": "a mean over its items",
    "sum": "a sum over samples",
}
"""What people are told of ``Verified.hypothesis``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One window that committed."""

    step: int
    """Optimizer steps taken so far, this one included: the first is 1."""
    epoch: int
    """The pass over the data that the window belongs to: the first is 0."""
    num_samples: int
    """Samples trained on so far, this window's included."""
    effective_batch: int
    """Samples in this window."""
    # The reports' sizes are the recorded plans that ``fit(micro_batch=...)`` takes to repeat a run bit for bit.
    micro_batches: tuple[int, ...]
    """The sizes that committed, in order; they sum to ``effective_batch``."""
    loss: float
    """Mean over the window's items; their sum where the loss is one."""
    lr: float
    """Learning rate of the first parameter group in this step."""
    grad_norm: float | None
    """2-norm of the window's gradient before clipping; None where nothing in it counts."""
    seconds: float
    """Wall time of the window: waiting for its data, its replays and the optimizer step included."""
    peak_bytes: int
    """Most device memory in use at once since it was last read, which is up to 50 times a second."""
    limit_bytes: int
    """Bytes this process might use then, the headroom included."""
    replays: int
    """How often the window was rolled back and run again."""
    # These came later than the others, and so have defaults: records of older runs lack them.
    noise_scale: float | None = None
    """Gradient noise scale in samples, smoothed over the windows that were measured; None before the first of them."""
    gradient_squared: float | None = None
    """Unbiased estimate, from this window, of the squared 2-norm of the true gradient.

    None where not asked for, where the window was not measured, and where it was one micro-batch."""
    gradient_variance: float | None = None
    """Unbiased estimate, from this window, of the trace of the covariance of a sample's gradient; None likewise."""
    # Floats and tensors: records are read without torch, whose import takes seconds, and so it is not named here.
    outputs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What was returned beside the loss, by name: means, which are floats, and on the host ``torch.Tensor``s, joined in
    the order in which the window's samples are served; empty where nothing was. Of a loss that is returned as several,
    each is among them: ``loss/NAME``."""
    memory_saving: str = "off"
    """How memory was saved, in the words of ``MemorySaving``."""

    def __eq__(self, other: object) -> bool:
        """Return whether all fields are equal; tensors are by their values, for they have no truth value."""
        if other.__class__ is not self.__class__:
            return NotImplemented
        return all(_plain(getattr(self, name)) == _plain(getattr(other, name)) for name in self.__slots__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """Training begins; every argument was accepted."""

    # Also in a run that goes on from a checkpoint: a ``Resumed`` follows, and says from where.
    num_steps: int | None
    """Optimizer steps to come; None when the data's length is unknown and the budget is in epochs."""
    num_samples: int | None
    """Samples to come; None likewise."""
    device: str
    limit_bytes: int
    """Bytes this process may use on the device, the headroom included."""
    used_bytes: int
    """Bytes in use before the first sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The search has settled: windows are cut like this from now on."""

    # It may come again: after a ``Replanned``, once the fastest of the plans that are left is known.

    step: int
    sizes: tuple[int, ...]
    reason: str
    """Why no micro-batch is larger."""
    predicted_bytes: int | None
    """The memory model's peak for the largest size; None when there is no model."""
    prediction_error: float | None
    """How far the model's last prediction was from what was measured then, as a fraction of that."""
    limit_bytes: int
    memory_saving: str = "off"
    """How memory is saved, in the words of ``MemorySaving``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replanned:
    """A window's plan was given up for another one."""

    # ``old`` and ``new`` have the same sum, unless it is the effective batch that has changed.

    step: int
    old: tuple[int, ...]
    new: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """The device ran out of memory, and nothing was lost."""

    # In training a ``Replanned`` follows, with the plan in which the window is run again; none where it is run again as
    # it was, for nothing smaller is left to try.

    step: int
    phase: str
    """``"training"`` or ``"validation"``."""
    micro_batch: int
    """Samples in the micro-batch that failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySaving:
    """From this window on memory is saved in another way, which changes no number."""

    # Down where not even the smallest micro-batch fits, and up as memory comes back. Sizes are then found out anew.

    step: int
    old: str
    """``"off"``, or which blocks compute their forward once more in backward, and what is kept on the host."""
    new: str
    """Likewise."""
    reason: str
    blocks: int
    """How many blocks compute their forward twice now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recomputed:
    """The gradient of blocks that are computed twice was compared with the plain one, and is the same."""

    step: int
    saving: str
    """How memory was saved, in the words of ``MemorySaving``."""
    blocks: int
    """How many blocks were compared in this window, each in its first call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """The smallest micro-batch there is ran out of memory that may come back, and is tried again until it does."""

    # Once for each window or validation that has to wait. A ``NothingFitsError`` follows where it was in vain.

    step: int
    phase: str
    """``"training"`` or ``"validation"``."""
    micro_batch: int
    """Samples in the micro-batch that failed."""
    needed_bytes: int
    """What it needs at least, as far as that is known."""
    limit_bytes: int
    """Bytes this process may use on the device now."""
    seconds: float
    """How long is waited at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """PyTorch compiled something while a micro-batch ran: the model, a part of it, its loss, or anything they call."""

    # One for each size of a window in which that was so. Validations, and the optimizer's step, are none of it.

    step: int
    """The window."""
    micro_batch: int
    """Samples in the micro-batch."""
    compilations: int
    """Functions, or parts of one between graph breaks, that were compiled; 0 for a backward alone."""
    seconds: float
    """Wall time that it took, backwards included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Validated:
    """One pass over the validation data."""

    step: int
    epoch: int
    loss: float
    """Mean over the validation data's items; their sum where the loss is one."""
    # A mapping has no hash: events are equal by their metrics too, and are hashed without them.
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Mean over all values that each metric function returned; NaN where it returned none."""
    num_samples: int
    micro_batch: int
    """Largest micro-batch of the pass; independent of training's."""
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSkipped:
    """A window's gradient was not applied."""

    # In float16 a gradient that overflowed: the loss scale is lowered. In all precisions a window without any item.

    step: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """Something that cannot be exact, or is probably not what was meant; said once."""

    # What is said once is told by the consequence: the cause may hold a number that differs from window to window.
    cause: str
    consequence: str
    cure: str

    def __str__(self) -> str:
        return f"{self.cause}. {self.consequence}. {self.cure}."


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """The gradient of cut windows was compared with that of whole ones, on a few samples of a window."""

    # Not only where they agree: where they do not, a ``Notice`` says why.

    step: int
    """The window that the samples are of."""
    hypothesis: str
    """What the loss is: ``"num_items"`` or ``"items"``, a mean over what the user, or its graph, counts, or ``"sum"``,
    a sum over samples."""
    error: float
    """How far the gradient of the worst cut is off, as a fraction of the whole one's norm, or of its worst tensor's."""
    tolerance: float
    """Up to which error they are the same."""
    tensor: str | None
    """The name of the parameter that is off the most; None where none is."""
    samples: int
    """How many there were."""
    cuts: tuple[tuple[int, ...], ...]
    """How they were cut: the sizes of each cut's parts."""
    seconds: float
    """Wall time that it took."""

    @property
    def passed(self) -> bool:
        """Return whether they are the same."""
        return self.error <= self.tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """From this step on the loss is computed once, on the joined outputs of all micro-batches."""

    step: int
    """The first such step."""
    reason: str
    """Why micro-batches are not weighted."""
    error: float
    """Relative error of the joined gradient, on a few samples: of the whole, or of its worst tensor."""
    tolerance: float
    """Up to which error gradients are the same."""
    tensor: str | None
    """The name of the parameter with the largest error; None where there is none."""
    samples: int
    """How many samples were measured."""
    held: float
    """Bytes that a joined step holds for backward, its micro-batch excluded, as a fraction of the full batch's."""
    opened: tuple[str, ...]
    """Modules whose own code runs on the full batch, so that only their children are split."""
    seconds: float
    """Wall time of the measurement."""

    @property
    def passed(self) -> bool:
        """Return whether the gradients are the same."""
        return self.error <= self.tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """What each of several ranks has done: at the end of each epoch, and when windows are shared out anew."""

    # By rank, from rank 0 on. Seconds are those since the last such event.

    step: int
    micro_batches: tuple[tuple[int, ...], ...]
    """How each cut its part of the last full window, or of the largest where there was none."""
    peak_bytes: tuple[int, ...]
    """The most that each had in use at once, as of its last reading."""
    limit_bytes: tuple[int, ...]
    busy_seconds: tuple[float, ...]
    """Wall time of each in forwards and backwards, replays included."""
    waited_seconds: tuple[float, ...]
    """Wall time of each in collectives, most of it waiting for the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint was taken: it is on the disk before the next one is taken, and when the run has ended."""

    step: int
    path: str
    seconds: float
    """Wall time that the run waited for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """The run goes on from a checkpoint: what was recorded before this, of steps after that one, is void."""

    step: int
    """Optimizer steps taken when it was saved."""
    num_samples: int
    """Samples trained on then."""
    checkpoint: str
    """Its path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The run is over."""

    # A record without one is that of a run that was killed, or is still going on.

    step: int
    reason: str
    """``"budget"``, ``"interrupted"`` (a signal) or ``"stopped"`` (a callback); in records the name of an error too."""
    stopped_by: str = ""
    """Name of the callback that raised ``StopTraining``, if it was one of the first rank's."""


def _plain(value: Any) -> Any:
    """Return a field's value with a list in place of each tensor."""
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


# Whatever is added here is written to records as it is; how people are told of it is up to ``reporting.lines``.
Event = (
    Started
    | Planned
    | Replanned
    | OutOfMemory
    | MemorySaving
    | Recomputed
    | Waiting
    | Compiled
    | Validated
    | StepSkipped
    | Notice
    | Verified
    | Joined
    | Shared
    | Saved
    | Resumed
    | Finished
)
Record = StepReport | Event
