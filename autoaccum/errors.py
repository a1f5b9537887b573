"""Every error that autoaccum raises on purpose, with the facts that it carries.

::

    AutoaccumError
    ├── ArgumentError (ValueError)            an argument that cannot be used: .argument .value .accepted
    │   ├── ArgumentTypeError (TypeError)     ... because of its type
    │   ├── ConflictingArgumentsError         ... beside another one that was given: .conflicts_with
    │   ├── NoTrainableParametersError        ... a model with nothing to train
    │   ├── ForeignOptimizerError             ... an optimizer that holds none of the model's parameters
    │   ├── UnknownDeviceError                ... a device that this machine does not have
    │   ├── NoHistoryError                    ... a run's directory without the record of one
    │   └── ValuesNeededError                 ... a model that reads values; an estimate has none: .operation
    ├── DataError (ValueError)                data that cannot be cut into windows
    │   ├── EmptyDatasetError                 ... no sample in it
    │   ├── RaggedBatchError                  ... tensors of one batch disagree on dim 0: .sizes
    │   └── AmbiguousBatchError               ... a list in it may hold samples, or parts of a batch: .samples .rows
    ├── LossError (ValueError)                a loss that cannot be trained on
    │   ├── NonScalarLossError                ... .shape
    │   ├── LossWithoutGradError              ... detached from the model
    │   ├── LossSideEffectError               ... computing it changes gradients
    │   ├── NonFiniteLossError                ... NaN or inf in the first window: .loss
    │   ├── OutputError                       ... what stands beside it is no number and no tensor: .output
    │   └── NotExactError                     ... cut windows have another gradient than whole ones: .error .cause
    ├── MemoryLimitError                      memory that no plan can get round: .micro_batch .peak_bytes .limit_bytes
    │   ├── NothingFitsError                  ... one sample is too many
    │   ├── LimitBelowModelError              ... the model alone is too much
    │   └── OptimizerOutOfMemoryError         ... inside optimizer.step
    ├── CheckpointError                       a checkpoint that cannot be written or read: .path
    │   ├── CheckpointStateError              ... a state holds what cannot be kept: .key
    │   ├── CheckpointWriteError              ... the disk is full, or refuses: .needed_bytes
    │   ├── CheckpointCorruptError            ... a file is torn, changed or missing, or an entry of it wrong: .entry
    │   ├── CheckpointUnsafeError             ... a file that could run code
    │   ├── CheckpointLockedError             ... another run writes to the same directory: .pid
    │   └── ResumeError                       ... of another run than the one that is to go on: .differences
    ├── AlreadyRunningError (RuntimeError)    a second run in a process that has one: .running
    ├── AlreadySteppedError (RuntimeError)    a second step of the optimizer on one gradient
    ├── RankError (RuntimeError)              another rank has failed, or is gone: .rank
    ├── MissingExtraError (ImportError)       a package that an optional part needs: .package .extra
    └── RecipeError                           a recipe file that cannot be used
        ├── RecipeNotFoundError               ... no such file, module or function
        └── RecipeResultError                 ... its function returned something else than fit's arguments

    StopTraining                              not an error: a callback raises it to end the run after the window
    AutoaccumWarning (UserWarning)            what is said once and does not stop the run

>>> raise ArgumentError("effective_batch", 0, "an int of at least 1", "Pass the samples of a step.")
Traceback (most recent call last):
    ...
autoaccum.errors.ArgumentError: effective_batch=0: expected an int of at least 1. Pass the samples of a step.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoaccum._units import format_bytes, shown


class AutoaccumError(Exception):
    """The root: ``except AutoaccumError`` catches everything that autoaccum raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle what was made, not how: the constructors take facts, and an exception keeps its message."""
        # Exception's own way is to call the class with ``args``, the message. Most constructors here would refuse that,
        # and the error could not come back from a worker process.
        return _remake, (type(self), self.args, self.__dict__)


def _remake(cls: type[AutoaccumError], args: tuple[object, ...], facts: dict[str, object]) -> AutoaccumError:
    """Make an error again from its message and its facts, without its constructor."""
    error = cls.__new__(cls, *args)
    error.__dict__.update(facts)
    return error


# Arguments. They are ValueErrors too, and of a wrong type TypeErrors, for code that catches those.


class ArgumentError(AutoaccumError, ValueError):
    """An argument that cannot be used: its name, its value, what is accepted and what to do."""

    # Facts stay attributes, so that no code has to read them out of a text; ``fact`` replaces the general sentence.

    def __init__(self, argument: str, value: object, accepted: str, cure: str = "", *, fact: str = "") -> None:
        self.argument, self.value, self.accepted = argument, value, accepted
        fact = fact or f"{argument}={shown(value)}: expected {accepted}."
        super().__init__(f"{fact} {cure}".rstrip())


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument of a type that cannot be used."""


class ConflictingArgumentsError(ArgumentError):
    """Two arguments of which at most one may be given."""

    def __init__(self, argument: str, value: object, conflicts_with: str, cure: str) -> None:
        self.conflicts_with = conflicts_with
        super().__init__(argument, value, f"at most one of {argument} and {conflicts_with}", cure)


class NoTrainableParametersError(ArgumentError):
    """A model none of whose parameters requires a gradient."""

    def __init__(self, model: object) -> None:
        # Its class, for the repr of a model fills a screen.
        super().__init__(
            "model",
            type(model).__name__,
            "a model with at least one parameter that requires a gradient",
            "Call requires_grad_(True) on what is to be trained, or pass an optimizer over tensors of your own.",
        )


class ForeignOptimizerError(ArgumentError):
    """An optimizer that holds none of the model's trainable parameters."""

    def __init__(self, optimizer: object) -> None:
        super().__init__(
            "optimizer",
            type(optimizer).__name__,
            "an optimizer over this model's parameters",
            "It holds none of them, so no step would change the model: build it from model.parameters(), or pass fit "
            "a function (params) -> Optimizer.",
        )


class UnknownDeviceError(ArgumentError):
    """A device that this machine, or this build of PyTorch, does not have."""

    def __init__(self, device: object, available: Sequence[str], why: str, cure: str) -> None:
        super().__init__(
            "device", device, f"one of {', '.join(available)}", cure, fact=f"device={shown(device)} {why}."
        )


class NoHistoryError(ArgumentError):
    """A directory in which no run has kept its records."""

    def __init__(self, run_dir: object, name: str, rest: str = ", or the folder in which a RecordWriter wrote") -> None:
        # As a text: it may be any path, and a repr would name its class.
        cure = f"Pass the run_dir that was passed to fit{rest}."
        super().__init__("run_dir", str(run_dir), f"a directory that holds {name}", cure)


class ValuesNeededError(ArgumentError):
    """A model that no estimate can be made of: ``operation`` depends on values, and is run without any."""

    def __init__(self, model: object, operation: str) -> None:
        self.operation = operation
        accepted = f"a model whose step can be run without values, and {operation} depends on them"
        super().__init__("model", type(model).__name__, accepted, "Measure it on the device, with autoaccum probe.")


# Data.


class DataError(AutoaccumError, ValueError):
    """Data that cannot be cut into windows."""


class EmptyDatasetError(DataError):
    """Data with no sample in it."""

    def __init__(self, argument: str, detail: str) -> None:
        self.argument = argument
        super().__init__(f"{argument} holds no sample: {detail}")


class RaggedBatchError(DataError):
    """A batch whose tensors disagree on dim 0, so that it has no number of samples."""

    def __init__(self, sizes: dict[str, int], argument: str = "data", hint: str = "") -> None:
        self.sizes = sizes
        # The name of a batch that is one tensor is empty.
        listed = ", ".join(f"{name or 'batch'}: {size}" for name, size in sizes.items())
        super().__init__(
            f"{argument}: the tensors of one batch disagree on dim 0, the samples ({listed}). Give every tensor one "
            f"row a sample, or keep what is shared by all samples out of the batch (in the model, or in a closure)."
            f"{hint or _OTHER_FORMS}"
        )


_OTHER_FORMS = (
    " What is cut otherwise is said with split=(batch, start, size) -> micro-batch, or one of autoaccum.splits: "
    ".samples for lists of samples."
)


class AmbiguousBatchError(DataError):
    """A batch with a list of tensors that may hold one for each sample, or be parts that have a row for each."""

    def __init__(self, samples: int, rows: int, found: str, argument: str, cure: str) -> None:
        self.samples = samples
        """Samples in the batch, if its lists hold one entry for each."""
        self.rows = rows
        """Samples in it, if what its lists hold has a row for each."""
        super().__init__(
            f"{argument}: a batch holds {found}, which may be {samples} sample{'s' * (samples != 1)}, or parts of a "
            f"batch of {rows}: their shapes fit both, and a wrong guess would cut an image between its channels. Say "
            f"which: {cure}"
        )


# The loss.


class LossError(AutoaccumError, ValueError):
    """A loss that cannot be trained on."""

    # ``source``, where a subclass takes it, is what the user can mend: loss_fn, training_step or the model.


class NonScalarLossError(LossError):
    """A loss with more than one element, or one that is not a tensor at all."""

    def __init__(self, source: str, found: str, cure: str = "Reduce it, for example with .mean().") -> None:
        super().__init__(
            f"{source} returned {found}: expected one scalar tensor, a mean or sum over the micro-batch. {cure}"
        )


class LossWithoutGradError(LossError):
    """A loss that no parameter's gradient can come from."""

    def __init__(self, source: str) -> None:
        # All that is known is that the graph ends before the parameters: the usual breaks are listed.
        super().__init__(
            f"{source} returned a loss without a gradient: it does not depend on any trainable parameter. Look for "
            f".detach(), .item(), torch.no_grad() or an argmax on the way from the model to the loss."
        )


class LossSideEffectError(LossError):
    """Computing the loss changed the gradients that are being collected."""

    def __init__(self, source: str, did: str = "changed the .grad of parameters") -> None:
        super().__init__(
            f"{source} {did}: it must only compute and return the loss. Leave backward(), "
            f"zero_grad(), step() and clipping (pass clip_norm=) out of it: autoaccum calls them for you."
        )


class NonFiniteLossError(LossError):
    """A NaN or infinite loss in the very first window: no step was taken. Later ones are reported."""

    def __init__(self, loss: float, sizes: Sequence[int] = ()) -> None:
        self.loss = loss
        least, few = min(sizes, default=0), ""
        if len(sizes) > 1:
            few = f" The full batch was split into micro-batches of {least} and more samples: if the loss needs more of"
            few += f" them, as a standard deviation does, leave accumulate out or pass min_micro_batch={least + 1}."
        super().__init__(
            f"the loss of the first window is {loss}; no step was taken and the model is as it was. Check the inputs "
            f"for NaN, the targets for values out of range, and the loss for log(0) or a division by 0, as of a mean "
            f"over nothing; torch.autograd.set_detect_anomaly(True) names the operation.{few}"
        )


class OutputError(LossError):
    """An output beside the loss of which a window can have no value."""

    def __init__(self, output: str, found: str, accepted: str, cure: str = "") -> None:
        self.output = output
        super().__init__(
            f"The output {output!r} beside the loss is {found}: expected {accepted}.{' ' if cure else ''}{cure}"
        )


class NotExactError(LossError):
    """A loss whose cut windows were measured to have another gradient than whole ones, in a run that is ``strict``."""

    def __init__(self, cause: str, consequence: str, cure: str, error: float | None) -> None:
        self.cause = cause
        self.error = error
        """Relative error of the gradient; None where it could not be measured."""
        super().__init__(f"{cause}. {consequence}. {cure}. No step was taken on it; strict=False goes on all the same.")


# Memory. What a smaller plan can get round raises nothing; these are what is left.


class MemoryLimitError(AutoaccumError):
    """Memory that no plan can get round, with the numbers: samples tried, bytes reached, bytes allowed."""

    def __init__(
        self, message: str, *, micro_batch: int | None, peak_bytes: int | None, limit_bytes: int | None
    ) -> None:
        # None of what is not known, or was never tried: no number is better than one that is made up.
        self.micro_batch = micro_batch
        self.peak_bytes = peak_bytes
        self.limit_bytes = limit_bytes
        super().__init__(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One thing that makes the smallest micro-batch need less memory; ``autoaccum.estimate`` counts how much less."""

    name: str
    """``activation checkpointing``, ``offload``, ``save_on_cpu``, ``bf16``, ``Adafactor`` or ``SGD``."""
    how: str
    """What to write, and where."""

    def __str__(self) -> str:
        return f"{self.name}: {self.how}"


class NothingFitsError(MemoryLimitError):
    """Not even the smallest micro-batch fits; ``advice`` says what takes less memory and was not tried."""

    def __init__(
        self,
        *,
        phase: str,
        micro_batch: int,
        peak_bytes: int | None,
        limit_bytes: int | None,
        min_micro_batch: int | None = None,
        advice: tuple[Advice, ...] = (),
        tried: str = "",
    ) -> None:
        self.phase, self.advice = phase, advice
        # A single sample is not to blame on it, as the only one of a short window is.
        self.min_micro_batch = min_micro_batch if micro_batch > 1 else None
        # Either is left out where it is not known.
        reached = "" if peak_bytes is None else f", {format_bytes(peak_bytes)} in use"
        allowed = "" if limit_bytes is None else f" (limit {format_bytes(limit_bytes)})"
        smallest, cure = "the smallest there is", ""
        if self.min_micro_batch is not None:
            smallest = f"the smallest that min_micro_batch={min_micro_batch} allows"
            cure = "Lower min_micro_batch: fewer samples may fit. Otherwise: "
        cure += "Raise memory_limit or free the device for this process, make the samples smaller, "
        if advice:
            cure += "\n  ".join(["or choose (autoaccum.estimate counts what each needs):", *map(str, advice)])
        else:
            cure += "use precision='bf16', wrap blocks in torch.utils.checkpoint, "
            cure += "or take an optimizer that keeps less state."
        super().__init__(
            f"{phase}: a micro-batch of {micro_batch}, {smallest}, does not fit{reached}{allowed}{tried}. {cure}",
            micro_batch=micro_batch,
            peak_bytes=peak_bytes,
            limit_bytes=limit_bytes,
        )

    def advised(self, advice: tuple[Advice, ...], tried: str = "") -> NothingFitsError:
        """Return the same error with advice and what was tried: made only once it is known that the run ends."""
        names = ("phase", "peak_bytes", "limit_bytes", "min_micro_batch")
        kept: dict[str, Any] = {name: getattr(self, name) for name in names}
        return NothingFitsError(**kept, micro_batch=self.micro_batch or 1, advice=advice, tried=tried)


class LimitBelowModelError(MemoryLimitError):
    """The limit is below what the process needs before the first sample: model, gradients, optimizer state.

    With ``is_least`` memory ran out before all of it was there, and it needs more than ``needed_bytes`` say.
    """

    def __init__(self, *, needed_bytes: int, limit_bytes: int, model_bytes: int, is_least: bool = False) -> None:
        self.needed_bytes, self.model_bytes = needed_bytes, model_bytes
        needed = f"{format_bytes(needed_bytes)} {'or more ' if is_least else ''}"
        what, cure = "the process and the model, its gradients, the optimizer's state", ", or train a smaller model"
        if 0 < 2 * model_bytes < needed_bytes - limit_bytes:  # an optimizer keeps as much again
            what, cure = f"the process, and {format_bytes(model_bytes)} by parameters and gradients", ""
        super().__init__(
            f"memory_limit: {format_bytes(limit_bytes)} may be used, but {needed}are needed before the first sample "
            f"({what}). Allow {format_bytes(needed_bytes)} and what a sample takes{cure}.",
            micro_batch=None,  # no sample was tried
            peak_bytes=needed_bytes,
            limit_bytes=limit_bytes,
        )


class OptimizerOutOfMemoryError(MemoryLimitError):
    """Memory ran out inside ``optimizer.step``: some parameters may have been stepped and others not."""

    # The one failure that is not replayed. To undo half of a step takes a copy of parameters and state, for which there
    # is no memory either; the last checkpoint is whole.

    def __init__(self, *, optimizer: str, step: int, peak_bytes: int | None, limit_bytes: int | None) -> None:
        self.step = step
        super().__init__(
            f"{optimizer}.step ran out of memory in step {step}. The parameters may be half-stepped: continue from "
            "your last checkpoint. Leave more headroom, or take an optimizer whose step allocates nothing (fused=True, "
            "or foreach=False).",
            micro_batch=None,
            peak_bytes=peak_bytes,
            limit_bytes=limit_bytes,
        )

    def name_checkpoint(self, path: object) -> None:
        """Add to the message where the run goes on from."""
        self.args = (f"{self.args[0]} Started again, the run goes on from {path}.",)


# Checkpoints and runs on the disk.


class CheckpointError(AutoaccumError):
    """A checkpoint that cannot be written or read; ``path`` is its file or directory, empty where there is none yet."""

    def __init__(self, message: str, *, path: object = "") -> None:
        self.path = str(path)
        super().__init__(message)


class CheckpointStateError(CheckpointError):
    """A state that holds what cannot be kept in files that execute no code; ``key`` says where in it."""

    def __init__(self, key: str, found: str, cure: str = "") -> None:
        # The way to it from the top of the state, such as ``sampler.seen[3]``.
        self.key = key
        cure = cure or (
            "Have its state_dict() return numbers, strings, bytes, tensors and NumPy arrays, in dicts, lists and "
            "tuples, and make the rest anew when the run is resumed."
        )
        super().__init__(f"{key} is {found}, which a checkpoint cannot hold. {cure}")


class CheckpointWriteError(CheckpointError):
    """A checkpoint that could not be written: what was begun is removed, and the older ones are whole."""

    def __init__(self, path: object, needed_bytes: int, reason: str, *, has_begun: bool = True) -> None:
        self.needed_bytes = needed_bytes
        older = "The checkpoints before it are whole. " if has_begun else ""  # else nobody has looked for any
        if needed_bytes:  # else not even a directory could be made, and room is not what is missing
            needed = f"; {format_bytes(needed_bytes)} were to be written"
            cure = (
                "Free that much (one more than is kept is on the disk for a moment), or choose a directory elsewhere."
            )
        else:
            needed, cure = "", "Choose a directory that can be written to."
        super().__init__(f"{path}: {reason}{needed}. {older}{cure}", path=path)


class CheckpointCorruptError(CheckpointError):
    """A checkpoint that is not what was written; ``entry`` names the entry of its state, empty where a file is torn."""

    def __init__(self, path: object, problem: str, *, entry: str = "", cure: str = "") -> None:
        # Such as ``optimizer.state[3].exp_avg``.
        self.entry = entry
        self.problem = problem
        where = f"{path}: {entry}".removeprefix(": ") if entry else str(path)
        cure = cure or "Resume from another checkpoint; this one cannot be trusted."
        super().__init__(f"{where} {problem}. {cure}", path=path)


class CheckpointUnsafeError(CheckpointError):
    """A checkpoint with a file that could execute code, which autoaccum does not write."""

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(
            f"{path} {problem}: refused, and nothing in it was executed. Find out who put it there.", path=path
        )


class CheckpointLockedError(CheckpointError):
    """A directory that another run writes its checkpoints to; ``pid`` is that run's process, None when not known."""

    def __init__(self, path: object, pid: int | None) -> None:
        self.pid = pid  # of this process too, where two runs in it share a directory
        super().__init__(
            f"{path} belongs to a run that is going on, in process {pid or '(unknown)'}. Wait for it or end it, or "
            f"choose another directory.",
            path=path,
        )


class ResumeError(CheckpointError):
    """A run directory that holds another run than the one that was started; ``differences`` tells in what."""

    def __init__(self, path: object, differences: Sequence[str]) -> None:
        self.differences = tuple(differences)
        # Another model differs in every layer: the first twenty say so.
        listed = "\n".join(f"  {difference}" for difference in differences[:20])
        more = f"\n  and {len(differences) - 20} more" if len(differences) > 20 else ""
        super().__init__(
            f"{path} holds a run that this one cannot go on from (then -> now):\n{listed}{more}\n"
            f"Start it as it was, choose another run_dir, or pass resume=False to begin anew.",
            path=path,
        )


# Sweeps, optional parts and recipes.


class AlreadyRunningError(AutoaccumError, RuntimeError):
    """A run that would disturb another one in the same process; ``running`` is what goes on."""

    def __init__(self, refused: str, running: str, *, is_within: bool) -> None:
        self.running = running
        where = "which has called it (in a callback, a metric or a loss, say)" if is_within else "in another thread"
        super().__init__(
            f"{refused} cannot begin while {running} goes on in this process, {where}. Both would draw from the same "
            f"random states, put them back and read the same memory, so that neither would train what it trains alone. "
            "Call it when the other has returned, or in a process of its own."
        )


class AlreadySteppedError(AutoaccumError, RuntimeError):
    """An ``optimizer.step()`` that an Accumulator has done already."""


class RankError(AutoaccumError, RuntimeError):
    """A rank of the same run, mostly another one, has failed or is gone; ``rank`` is its number, where it is known."""

    def __init__(self, rank: int | None, reason: str) -> None:
        self.rank = rank
        who = "another rank has ended" if rank is None else f"rank {rank} has failed"
        super().__init__(
            f"{who}: {reason}. All ranks end with it, for a gradient is that of all of them. Its own output says more; "
            f"with run_dir the same call goes on from the last checkpoint."
        )


class MissingExtraError(AutoaccumError, ImportError):
    """A package that an optional part of autoaccum needs, and that is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self.package = package
        self.extra = extra
        # The package itself, as autoaccum is on no package index; for this interpreter, as "python" may be another.
        python = shlex.quote(sys.executable or "python")
        super().__init__(f"{purpose} needs {package}, which is not installed. Run: {python} -m pip install {package}")


class RecipeError(AutoaccumError):
    """A recipe that cannot be used."""


class RecipeNotFoundError(RecipeError):
    """No such recipe file, module or function."""


class RecipeResultError(RecipeError):
    """A recipe's function returned something else than a dict of fit's arguments."""


# No errors. StopTraining is no AutoaccumError, so that code that catches those does not keep a run going by accident.


class StopTraining(Exception):
    """Raised by a callback to end the run cleanly after the window."""


class AutoaccumWarning(UserWarning):
    """Said once, with the cause, the consequence and the cure; the run goes on. Filters can name this class."""
