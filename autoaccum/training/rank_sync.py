"""Keeps the ranks of a run the same: they begin alike, share windows, and end after the same one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from autoaccum.data import batches, randomness
from autoaccum.data.base import Source, Window
from autoaccum.data.digests import digest_of
from autoaccum.distributed.balance import Balance, Shares, Stint
from autoaccum.distributed.fsdp import is_distributed, units_of
from autoaccum.distributed.group import Group
from autoaccum.distributed.shards import Share
from autoaccum.errors import ArgumentError
from autoaccum.events import Shared
from autoaccum.step.across_ranks import ShardedTransaction
from autoaccum.training.options import FitArguments

Mark = tuple[tuple[int, ...], str] | None
"""The shape of a tensor, and what tells its value from another one; None of one that stands still."""


class Followed:
    """What forwards may write to beside gradients: buffers, and frozen parameters, as of a momentum encoder."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Begin with the modules, whose buffers may be others later."""
        self._modules = modules
        self._versions: dict[int, int] = {}  # of frozen parameters, which may be large and mostly stand still

    def tensors(self) -> list[torch.Tensor]:
        """Return them as they are now, each once, in an order that all ranks have."""
        buffers = {id(b): b for module in self._modules for b in module.buffers()}
        parameters = [p for module in self._modules for p in module.parameters()]
        # Of what is sharded each rank has a part of its own, and nothing is to be the same.
        frozen = {id(p): p for p in parameters if not p.requires_grad and not is_distributed(p)}
        return [*buffers.values(), *frozen.values()]

    @torch.no_grad()
    def marks(self) -> list[Mark]:
        """Return what tells the value of each from another one; of a frozen parameter that stands still nothing."""
        found: list[Mark] = []
        for tensor in self.tensors():
            # A kernel that writes running statistics raises no version: buffers are looked at in each window.
            is_frozen = isinstance(tensor, nn.Parameter)
            if is_frozen and self._versions.get(id(tensor), tensor._version) == tensor._version:
                found.append(None)
            else:
                wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
                found.append((tuple(tensor.shape), f"{wide.sum().item()!r} {wide.abs().square().sum().item()!r}"))
            if is_frozen:
                self._versions[id(tensor)] = tensor._version
        return found

    def make_same(self, group: Group, marks: Sequence[Sequence[Mark]]) -> None:
        """Give the first rank's values to all, of those that are not the same by the marks of all ranks.

        Raises:
            ArgumentError: ranks have other buffers, or of other shapes.
        """
        # One that stands still here may have moved elsewhere, so that no shape is told of it.
        shapes = [[mark and mark[0] for mark in of_rank] for of_rank in marks]
        are_alike = len({len(of_rank) for of_rank in shapes}) == 1
        if not are_alike or any(len({*of_one} - {None}) > 1 for of_one in zip(*shapes, strict=True)):
            raise ArgumentError("model", "a buffer", "the same buffers on all ranks, of the same shapes")
        tensors = self.tensors()
        group.spread([tensors[i] for i, each in enumerate(zip(*marks, strict=True)) if len({*each}) > 1])
        self._versions |= {id(tensor): tensor._version for tensor in tensors if isinstance(tensor, nn.Parameter)}


def refuse(arguments: FitArguments) -> None:
    """Refuse data that ranks would share out twice.

    Raises:
        ArgumentError: they are given.
    """
    for name, data in (("data", arguments.data), ("validation_data", arguments.validation_data)):
        if isinstance(data, DataLoader) and (sampler := _sharing(data)) is not None:
            cure = (
                "Windows are cut of all samples, and shared out then: pass the DataLoader with shuffle= in its place."
            )
            raise ArgumentError(name, type(sampler).__name__, "a sampler that draws the same on all ranks", cure)
    if units_of(arguments.model):
        _refuse_sharded(arguments)


def refuse_options(modules: Sequence[nn.Module], min_micro_batch: int | None) -> None:
    """Refuse what ranks cannot do together where each has a part of a batch alone.

    Raises:
        ArgumentError: it was asked for.
    """
    for module in modules:
        if units_of(module):
            cure = "Pass it to fit, whose ranks run as many micro-batches each, or do not call fully_shard."
            raise ArgumentError("model", type(module).__name__, "a model that each rank has all of", cure)
    if min_micro_batch not in (None, 1):
        cure = "No rank has all samples of the batch: leave it out, or use fit, whose ranks read all of the data."
        raise ArgumentError("min_micro_batch", min_micro_batch, "nothing of the kind with several ranks", cure)


def _refuse_sharded(arguments: FitArguments) -> None:
    """Refuse what ranks cannot do with a model that is sharded over them."""
    refused = {
        "noise_scale": arguments.noise_scale,
        # A scaler of one rank knows nothing of an overflow on another.
        "precision": arguments.precision == "fp16",
        "compile": arguments.compile,
        # All ranks run as many micro-batches, whose sizes follow from that.
        "min_micro_batch": (arguments.min_micro_batch or 1) > 1,
        "micro_batch": not isinstance(arguments.micro_batch, int | str),
        "balance": arguments.balance != "equal",
        # What FSDP2 adds up gradients in, fully_shard is told: MixedPrecisionPolicy(reduce_dtype=...).
        "compression": arguments.compression != "none",
    }
    for name, is_asked_for in refused.items():
        if is_asked_for:
            cure = "A sharded model is not trained so yet: leave it out, or do not call fully_shard."
            raise ArgumentError(name, getattr(arguments, name), "nothing of the kind with a sharded model", cure)


def _sharing(loader: DataLoader[Any]) -> Any:
    """Return the sampler of a DataLoader that draws other samples on each rank; None where there is none."""
    # By what those of PyTorch and of others have, and not by their class: they would leave each rank a part of which
    # it computes a share, so that most samples are never seen.
    samplers = [loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler]
    for sampler in samplers:
        size = getattr(sampler, "num_replicas", 1)
        if isinstance(size, int) and size > 1:
            return sampler
    return None


def begin(group: Group, run: Any, arguments: FitArguments, source: Source, num_steps: int | None) -> None:
    """Make all ranks begin as the first one does: in weights, buffers, the optimizer's state, and where it goes on.

    Args:
        group: the ranks.
        run: of this one, which the first rank has put where it goes on.
        arguments: those of this rank.
        source: its data.
        num_steps: of the run, where they are known.

    Raises:
        ArgumentError: a rank trains something else.
    """
    transaction = run.step.transaction
    parameters = transaction.trained()
    sharded = transaction.sharded if isinstance(transaction, ShardedTransaction) else None
    if sharded is None:
        group.summing.prepare([p for p in parameters if p.requires_grad], arguments.compression)
    given = {
        "model": [tuple(p.shape) for p in parameters],
        "data": f"{source.num_samples} samples",
        # A function is another object on each rank; what it asks for is compared in each window.
        "effective_batch": _shown(arguments.effective_batch),
        "min_micro_batch": arguments.min_micro_batch,
        "seed": arguments.seed,
        "compression": arguments.compression,
        "steps": num_steps,
        # One that changes the learning rate on one rank alone would part them, in silence.
        "callbacks": run.callbacks.of_all_ranks(),
    }
    compare(group, given)
    if sharded is None:
        take_from_first(group, run)
    else:  # each rank has parts of its own
        sharded.refuse_other_copies()
        group.spread(list(arguments.model.buffers()))


def compare(group: Group, given: dict[str, Any]) -> None:
    """Compare what ranks were given, by the names of the arguments.

    Raises:
        ArgumentError: a rank was given something else than rank 0.
    """
    # What differs would show in no error: each rank would compute the gradient of another run, and add it up.
    told = group.exchange(given)
    for rank, found in enumerate(told):
        for name, value in found.items():
            if value != told[0][name]:
                raise ArgumentError(name, value, f"what rank 0 was given, {told[0][name]} (this is of rank {rank})")


def take_from_first(group: Group, run: Any) -> None:
    """Put all ranks where the first one is."""
    # By what a checkpoint holds, so that a run that goes on is told in the same way as one that begins. What the first
    # rank has found out about memory comes with it, and is judged by the limit of each.
    weights, state = group.from_first(run.state_dict)
    if not group.is_first:
        run.load_state_dict(weights, state)


def same_window(group: Group, window: Window | None) -> None:
    """Compare a window of data that cannot be counted, which each rank has read by itself, with that of the others.

    Raises:
        ArgumentError: they have read different samples, or other numbers of them.
    """
    # By one sample of each: a stream that every rank reads a part of differs in all of them.
    content = None
    if window is not None:
        with randomness.preserved_randomness():  # a collate_fn may draw
            content = digest_of(batches.flatten(window.samples([0]))[0])
    told = group.exchange((0 if window is None else window.num_samples, content))
    for rank, (num_samples, found) in enumerate(told):
        if (num_samples, found) != told[0]:
            given = f"a window of {num_samples} samples on rank {rank} and of {told[0][0]} on rank 0, which differ"
            cure = "Each rank reads all of it and computes its share: do not split it by rank, or shuffle it by chance."
            raise ArgumentError("data", given, "the same samples in the same order on all ranks", cure)


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, int | str) else type(value).__name__


def seed(group: Group, device: torch.device, of_run: int, step: int) -> None:
    """Seed what this rank draws in a window: other numbers than other ranks, the same when it is run after a resume."""
    # By the step, and not by what was drawn before: a checkpoint has the random states of the first rank alone.
    randomness.seed_all(randomness.mix(of_run, step, group.rank) >> 1, device)


Wish = tuple[str | None, list[Mark]]
"""Why a rank wishes the run to end, if it does, and what it tells of what forwards write to."""


def agreed(group: Group, told: Sequence[Wish], followed: Followed) -> str | None:
    """Return why the run ends, if any rank wishes it to; make what forwards write to the same on all."""
    # A wish is no end yet: a rank that ended by itself would leave the others waiting in their next window.
    followed.make_same(group, [marks for _, marks in told])
    return next((found for found, _ in told if found is not None), None)


class Sharing:
    """The shares of one run, as one of its ranks sees them."""

    def __init__(self, group: Group, balance: Balance, smallest: int) -> None:
        """Begin with equal shares; see ``Shares``."""
        self._group = group
        self._shares = Shares(group.size, balance, smallest)
        self._stints: Sequence[Stint] = ()  # of the last of the largest windows
        self._busy, self._waited = [0.0] * group.size, [0.0] * group.size
        self._was: tuple[int, ...] = ()  # the shares of a full window that were told last

    def share(self, window: Window) -> Share:
        """Return what this rank computes of a window."""
        return Share(window, self._shares.of(window.num_samples), self._group.rank)

    def own_samples(self, num_samples: int) -> int:
        """Return how many samples of such a window this rank computes."""
        return self._shares.of(num_samples)[self._group.rank]

    def saw(self, stints: Sequence[Stint]) -> None:
        """Take what each rank did of a window."""
        # The short one at an epoch's end does not show how others are cut.
        if _samples(stints) >= _samples(self._stints):
            self._stints = stints
        for rank, stint in enumerate(stints):
            self._busy[rank] += stint.seconds
            self._waited[rank] += stint.waited_seconds
        self._shares.saw(stints)

    def have_changed(self, num_samples: int) -> bool:
        """Return whether full windows of so many samples are shared out in another way than when it was asked last."""
        was, self._was = self._was, self._shares.of(num_samples)
        return bool(was) and sum(was) == num_samples and was != self._was

    def told(self, step: int) -> Shared | None:
        """Return what each rank has done since this was asked last; None where there was no window."""
        if not self._stints:
            return None
        found = Shared(
            step=step,
            micro_batches=tuple(stint.sizes for stint in self._stints),
            peak_bytes=tuple(stint.peak_bytes for stint in self._stints),
            limit_bytes=tuple(stint.limit_bytes for stint in self._stints),
            busy_seconds=tuple(self._busy),
            waited_seconds=tuple(self._waited),
        )
        size = self._group.size
        self._stints, self._busy, self._waited = (), [0.0] * size, [0.0] * size
        return found


def _samples(stints: Sequence[Stint]) -> int:
    return sum(sum(stint.sizes) for stint in stints)
