"""A model that is sharded over the ranks by FSDP2, run so that a rank that fails in a micro-batch hangs no other.

::

    sharded = Sharded(model, group)
    plans = sharded.tell(own_sizes)             # what each rank means to run
    while not are_done:
        # A rank without samples left runs a micro-batch that weighs nothing, for all run as many.
        are_done = all(sharded.run(lambda: backward_of(micro_batch), lambda: is_my_last))
    sharded.scale(guess / items)

Each micro-batch sums its gradient over the ranks, unlike those of a model that each rank has all of. Where memory runs
out on one of them all hear of it, as of ``Elsewhere``, and begin the window anew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autoaccum.distributed.collectives import MICRO_BATCH, Collectives, Gathers, Scatters
from autoaccum.distributed.group import Group
from autoaccum.errors import ArgumentError, RankError
from autoaccum.memory.oom import is_out_of_memory, without_frames


def is_unit(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was called on a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # which is slow to import, and is there where it was used
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def units_of(model: nn.Module) -> list[Any]:
    """Return the modules of a model that ``fully_shard`` was called on, in the order of its modules."""
    return [module for module in model.modules() if is_unit(module)]


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module; of one that ``fully_shard`` was called on that which it had before."""
    # FSDP2 gives each such module a class of its own, made of a class of its own and that one.
    return next(kind for kind in type(module).__mro__ if not (is_unit(module) and _is_of_fsdp(kind)))


def _is_of_fsdp(kind: type) -> bool:
    return issubclass(kind, sys.modules["torch.distributed.fsdp"].FSDPModule)


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in parts on several ranks, of which this one has but its own."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what of a tensor lies on this rank: all of it, unless it is distributed."""
    return tensor.to_local() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def check(model: nn.Module, units: Sequence[Any], num_ranks: int) -> None:
    """Refuse models that are sharded otherwise than by FSDP2 over all ranks.

    Raises:
        ArgumentError: the model is one of these.
    """
    for unit in units[:1]:
        if not hasattr(unit, "reset_iter_state"):
            raise ArgumentError("model", f"torch {torch.__version__}", "PyTorch 2.13 for a model sharded by FSDP2")
    for name, p in model.named_parameters():
        if not is_distributed(p):
            cure = "Call fully_shard on the whole model, after its blocks."
            raise ArgumentError("model", name, "parameters that are all sharded, where any is", cure)
        # The last dimension of a mesh is that of the parts, and what comes before it of copies. Tensor parallelism has
        # parts in both, and ranks that read the same samples.
        mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
        is_known = placements[-1].is_shard() and all(placement.is_replicate() for placement in placements[:-1])
        if mesh.size() != num_ranks or mesh.size(-1) < 2 or mesh.ndim > 2 or not is_known:
            accepted = f"a model sharded over all {num_ranks} ranks, by FSDP2 alone"
            raise ArgumentError("model", f"{name}: {placements} over {tuple(mesh.shape)}", accepted)


def forget(unit: Any) -> None:
    """Drop what FSDP2 keeps of a micro-batch, and ``reset_iter_state`` leaves there.

    A gradient that autograd has made of a unit, and that was not scattered, would be added to the next one.
    """
    # There is no public name for these. Parameters as a forward finds them live as long as the model.
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        for part in group.fsdp_params:
            if hasattr(part, "_unsharded_param"):
                part._unsharded_param.grad = None
            part.unsharded_accumulated_grad = None
            part.grad_offload_event = None
            # Gathered, and left before it was used: its memory would stay.
            part.free_unsharded_param()


class Elsewhere(Exception):
    """Another rank begins the window anew, and so do all."""


class Sharded:
    """The units of a sharded model, whose collectives are noted and made up for."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        """Take over the collectives of a model's units, which from now on add up gradients, and average nothing.

        Raises:
            ArgumentError: some of the model is not sharded, or in another way.
        """
        self._group = group
        self._units = units_of(model)
        check(model, self._units, group.size)
        self.parameters: list[Any] = [p for p in model.parameters() if p.requires_grad]
        """What is trained of the model, of which each rank has a part."""
        within = {id(module) for unit in self._units for module in unit.modules() if module is not unit}
        self._roots = [unit for unit in self._units if id(unit) not in within]
        self._collectives = Collectives(group.channel)
        for index, unit in enumerate(self._units):
            self._take_over(unit, index)

    def _take_over(self, unit: Any, index: int) -> None:
        """Make a unit add up gradients by collectives that are noted, in each backward, and keep nothing after it."""
        # Weights that sum to one over all ranks make it exact; the mean over ranks would divide once more. By sums
        # alone, for gloo multiplies by nothing on the way.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_requires_gradient_sync(True, recurse=False)
        unit.set_reshard_after_backward(True, recurse=False)
        unit.set_is_last_backward(True)
        own: Any = next((p for p in unit.parameters(recurse=True) if is_distributed(p)), None)
        mesh = own.device_mesh
        scatters = Scatters(self._collectives, index, mesh.get_group(0) if mesh.ndim > 1 else None)
        unit.set_custom_all_gather(Gathers(self._collectives, index))
        unit.set_custom_reduce_scatter(scatters)
        if mesh.ndim > 1:
            unit.set_all_reduce_hook(scatters.summed)

    @property
    def is_rehearsed(self) -> bool:
        """Return whether a micro-batch has come to its end on all ranks, so that others can be made up for."""
        return self._collectives.are_known

    @property
    def has_begun(self) -> bool:
        """Return whether this rank has launched anything of the micro-batch that runs."""
        return bool(self._collectives.launched)

    def tell(self, told: Any) -> list[Any]:
        """Tell all ranks something that is not None, and return what each of them has told.

        Raises:
            Elsewhere: one of them has given up.
            RankError: one of them has failed, or is gone.
        """
        heard = self._group.exchange(told)
        if None in heard:
            self.reset()
            raise Elsewhere
        return heard

    def give_up(self) -> None:
        """Tell all ranks, in what they are about to tell each other, that the window has to begin anew."""
        self._group.exchange(None)

    def run(
        self,
        compute: Callable[[], None],
        told: Callable[[], Any],
        survives: Callable[[BaseException], bool] = is_out_of_memory,
        kind: str = MICRO_BATCH,
    ) -> list[Any]:
        """Run the forward and backward of a micro-batch, in which all ranks take part; return what each has told.

        Args:
            compute: what runs it.
            told: returns what to tell where it holds, which is not None.
            survives: whether the window may begin anew after an error, which the others are then told.
            kind: of what is run, each of which launches something else: a forward alone, say.

        Errors of ``compute`` come through when nobody waits for this rank any more. Of one that is not survived the
        others are yet to hear: see ``Group.fail``.

        Raises:
            Elsewhere: one of the others has given up.
            RankError: one of them has failed, or is gone; or this one has failed where they cannot be let go on.
        """
        self._collectives.begin(kind)
        failure: BaseException | None = None
        try:
            compute()
        except BaseException as error:
            if not survives(error):
                self._drain(error)
                self.reset()
                raise
            failure = error
        # Out here, where no error that is handled pins the memory of the micro-batch.
        if failure is not None:
            without_frames(failure)
            self._drain(failure)
            self.reset()
            self.give_up()
            raise failure
        heard = self.tell(told())
        self._collectives.keep()
        return heard

    def pass_over(self, cause: BaseException) -> None:
        """Take part in a micro-batch of the others, after an error between two of this rank's."""
        self._collectives.begin()
        self._drain(cause)
        self.reset()

    def _drain(self, cause: BaseException) -> None:
        """Launch what the others wait for in a micro-batch that an error has ended.

        Raises:
            RankError: it is not known; or another rank is gone.
        """
        try:
            self._collectives.drain()
        except BaseException as error:
            # The others are in collectives of the model, and hear nothing: an exchange would wait for them for ever.
            self._group.leave()
            if isinstance(cause, RankError):
                if cause.rank == self._group.rank:  # memory has run out in a collective
                    self._group.channel.call(str(cause.__cause__))
                return
            # As of a sum over copies of the model, which FSDP2 launches itself.
            if isinstance(cause, RuntimeError) and not is_out_of_memory(cause):
                found = self._group.channel.heard()
                if found is not None:
                    raise found from cause
            # They hear it where they wait.
            self._group.channel.call(f"{type(cause).__name__}: {cause}")
            raise error from cause

    def reset(self) -> None:
        """Forget all that the units hold of a micro-batch that was not ended, or is not to count."""
        for root in self._roots:
            root.reset_iter_state()
        for unit in self._units:
            forget(unit)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply this rank's part of all gradients, in one launch."""
        parts = [p.grad.to_local() for p in self.parameters if p.grad is not None]
        if parts:
            torch._foreach_mul_(parts, factor)

    @torch.no_grad()
    def refuse_other_copies(self) -> None:
        """Refuse copies of the model that are not the same: their gradients are added up as if they were.

        Raises:
            ArgumentError: they are not.
        """
        mesh = self.parameters[0].device_mesh
        parts = [p.to_local() for p in self.parameters] if mesh.ndim > 1 else []
        place = mesh.get_local_rank(mesh.ndim - 1)
        marks = [f"{float(part.sum())!r} {float(part.square().sum())!r}" for part in parts]
        told = self._group.exchange((place, marks))
        if any(found != dict(told)[place] for place, found in told):
            cure = "Initialise it after torch.manual_seed, or load the same weights on all ranks."
            raise ArgumentError("model", "a sharded model", "the same weights in each of its copies", cure)

    @torch.no_grad()
    def squares(self) -> float:
        """Return this rank's part of the sum of the gradients' squares."""
        # Of what several copies of the model hold each has a part of the same sum.
        parts = [(p.grad.to_local(), p.device_mesh.size(-1)) for p in self.parameters if p.grad is not None]
        wide = [torch.promote_types(part.dtype, torch.float32) for part, _ in parts]
        norms = [torch.linalg.vector_norm(part, dtype=dtype) for (part, _), dtype in zip(parts, wide, strict=True)]
        # Read together, for each read waits for the device.
        values: list[float] = torch.stack(norms).tolist() if norms else []
        total: float = sum(value * value * copies for value, (_, copies) in zip(values, parts, strict=True))
        return total / self._group.size
