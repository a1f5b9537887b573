"""Runs forwards and backwards that leave no trace: what they change in modules is taken away again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoaccum.distributed.gradients import type_of_gradient
from autoaccum.errors import LossSideEffectError
from autoaccum.step.python_state import Attributes
from autoaccum.step.snapshot import SMALL_BYTES, Snapshot, State


def _refuse_step(*args: Any) -> None:
    raise LossSideEffectError("a hook, loss_fn, training_step or the model", "called optimizer.step()")


@contextmanager
def no_trace(
    modules: Sequence[nn.Module],
    optimizer: object,
    device: torch.device,
    tensors: Sequence[torch.Tensor] = (),
    functions: Sequence[object] = (),
) -> Iterator[None]:
    """Undo, at its end, whatever forwards, backwards and ``allocate_state`` have done within it.

    Within it nothing has a gradient; those that were there are put back. Values of parameters are remembered of frozen
    ones, where these are small.

    Args:
        modules: those that take part.
        optimizer: may hold parameters that no module does; anything else than an optimizer is left alone.
        device: where the modules may be moved to within it.
        tensors: others that may get gradients.
        functions: of the user's, which may count, keep or draw by what they hold.

    Raises:
        LossSideEffectError: within it an optimizer steps, as of hooks that step in a backward.
    """
    everything = {id(m): m for module in modules for m in module.modules()}.values()
    # A forward may write to frozen ones, as to a teacher; what is large is a backbone, mostly, and has no copy.
    own = [p for m in everything for p in m.parameters(recurse=False)]
    frozen = [p for p in own if not p.requires_grad and p.layout is torch.strided]
    written = frozen if sum(p.nbytes for p in frozen) <= SMALL_BYTES else []
    # Before anything moves. Of layers that these hold too, what is below knows more.
    outside = State((), functions, device, (), written, without=set(everything))
    snapshot = Snapshot(modules, device)
    snapshot.take()
    # Parameters of the modules, and those that only the optimizer holds: gradients of both are taken away.
    parameters = [p for module in everything for p in module.parameters(recurse=False)]
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else ()
    trained = [p for group in groups for p in group["params"]]
    trained += [tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
    elsewhere = [
        (p, p.data) for p in (*parameters, *trained) if p.device != device
    ]  # will be moved to the device, and back
    gradients = [(p, p.grad, type_of_gradient(p)) for p in (*parameters, *trained)]
    # Taken away and not zeroed: the caller's own may be there, and would be added to.
    for p, *_ in gradients:
        p.grad = None
    owners = [*everything, *([optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [])]
    attributes = Attributes(owners)
    # Before it writes anything: of large parameters nobody has a copy.
    refusing = register_optimizer_step_pre_hook(_refuse_step)
    try:
        yield
    finally:
        refusing.remove()
        # First, for a gradient has to lie where its parameter does, and have its shape.
        for p, *_ in gradients:
            p.grad = None
        for p, value in elsewhere:
            p.data = value
        for p, gradient, dtype in gradients:
            if type_of_gradient(p) is not dtype:
                p.grad_dtype = dtype
            p.grad = gradient
        # Attributes know which tensors stood where, the snapshot what was in those that are buffers.
        attributes.restore()
        snapshot.restore()
        outside.restore()
