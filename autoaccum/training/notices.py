"""Notices of a run (cause, consequence, cure): how it begins, what is odd about its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch.utils.data import BatchSampler, DataLoader

from autoaccum.data import lists
from autoaccum.events import Notice
from autoaccum.training.options import FitArguments


def other_steps(taken: int, foreseen: int | None) -> Notice:
    """Say that the budget came to another number of steps than a scheduler was told of."""
    return Notice(
        cause=f"The run took {taken} steps instead of the {foreseen} that were foreseen",
        consequence="A learning rate scheduler was told of too many or too few",
        cure="Let the function passed as effective_batch depend on nothing but its Progress",
    )


def changed_late() -> Notice:
    """Say that a loop clips the gradient of a step that was taken."""
    return Notice(
        cause="Gradients were clipped, or scaled, after accumulator.step had stepped on them",
        consequence="The step is one on the gradient as it was before",
        cure="Pass clip_norm= to the Accumulator, or call accumulator.backward(batch), change them, and step yourself",
    )


def lost_attributes(optimizer: str, names: Sequence[str]) -> Notice:
    """Say what an optimizer keeps on itself that no checkpoint holds."""
    return Notice(
        cause=f"{optimizer} changes {', '.join(names)} of its own with its steps, which a checkpoint cannot hold",
        consequence="A run that resumes begins with these as they are made",
        cure="Have the optimizer keep them in its state or in its param_groups, or return them from its state_dict()",
    )


def cannot_resume(problem: str) -> Notice:
    """Say that the first checkpoint could not be loaded into a copy of what is trained."""
    return Notice(
        cause=f"The first checkpoint was read back into a copy of the run, which cannot resume from it: {problem}",
        consequence="If this run is killed, it cannot go on from its checkpoints. Their weights can be read",
        cure="Mend load_state_dict of the layer or the optimizer that the message names, or take another one",
    )


def already_finished(path: Path | None, step: int, arguments: FitArguments, is_spent: bool) -> Notice:
    """Say that a run that is started again has had its budget, and can have no larger one where it has a scheduler.

    Args:
        path: its directory.
        step: the steps that it has taken.
        arguments: those of the call.
        is_spent: whether it has had its budget; a callback has stopped it where it has not.
    """
    anew = "another run_dir to begin anew"
    cure = f"Allow a larger budget to go on, or choose {anew}"
    if not is_spent:
        cure = f"Let the callback allow more, as EarlyStopping with a larger patience does, or choose {anew}"
    elif arguments.lr_scheduler is not None:
        cure = f"Its lr_scheduler was made for so many steps and has ended: choose {anew}"
    has_ended = (
        f"is finished: it has taken its {step} steps" if is_spent else f"was stopped by a callback, after {step} steps"
    )
    return Notice(
        cause=f"The run in {path} {has_ended}",
        consequence="Nothing is trained",
        cure=cure,
    )


def no_noise(step: int, smallest: int) -> Notice:
    """Say that a window was not cut and so shows no noise; no micro-batch is smaller than ``smallest``."""
    return Notice(
        cause=f"Window {step} was one micro-batch, and it takes two to estimate the noise scale",
        consequence="Until windows are cut, noise_scale is None, and an effective batch that follows it stays as it is",
        cure=f"Leave micro_batch out, or pass at most half of an effective batch of {2 * smallest} samples or more",
    )


# Estimates take micro-batches for random parts of their window. Sorted by length, one has the short samples and another
# the long ones, so what tells these apart counts as noise between samples.
NOISE_OF_SORTED = Notice(
    cause="Windows are sorted by length, so their micro-batches are no random parts of them",
    consequence="What long and short samples differ in counts as noise, and the noise scale may come out several times "
    "too large",
    cure="Pad all samples to one length where the noise scale matters",
)


def heeding(arguments: FitArguments) -> FitArguments:
    """Return arguments with the ``drop_last`` of a DataLoader: a short batch there is a short window here."""
    return replace(arguments, drop_last=True) if _loader_drops(arguments.data) else arguments


def of_data(arguments: FitArguments) -> list[Notice]:
    """Return what is to be said of the data."""
    said = []
    is_said = arguments.split is not None or arguments.batch_dim != 0
    for argument in ("data", "validation_data"):
        data = getattr(arguments, argument)
        # Whoever collates has samples, and whoever says how batches are cut has batches.
        if isinstance(data, list) and data and not is_said and arguments.collate_fn is None:
            said += [lists.notice(argument)] if lists.read_list(data, argument).is_new else []
    return said


def _loader_drops(data: object) -> bool:
    """Return whether data is a DataLoader that leaves out a short batch."""
    if not isinstance(data, DataLoader):
        return False
    # One that is given a BatchSampler says False itself. Of other batch samplers the batches are taken as they are.
    batch_sampler = data.batch_sampler
    return bool(data.drop_last or (type(batch_sampler) is BatchSampler and batch_sampler.drop_last))
