"""What PyTorch compiles while micro-batches run: noticed whoever asked for it, counted, told, spared where it can be.

A compiled model, a submodule, a loss function and a function that is found nowhere in any of them are all the same to
PyTorch's compiler, which says when it begins and when it is done. So that is listened to, rather than looked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from autoaccum.data.batches import flatten
from autoaccum.errors import ArgumentError
from autoaccum.events import Compiled, Event, Notice
from autoaccum.loss.stated import LossOf
from autoaccum.planning.attempts import Piece, Reading
from autoaccum.window import notices
from autoaccum.window.meter import Heard
from autoaccum.window.precision import Autocast
from autoaccum.window.surroundings import surroundings_of

RECURRING = 4
"""Say what may be done about it once so many micro-batches of a run have had something compiled, and then one more.

A first size, a second one for which sizes become symbols, and single samples, which never do, are three.
"""
CURE = "Compile it with mode='default' or 'max-autotune-no-cudagraphs': graphs keep nothing between calls."
"""What to do instead of CUDA graphs."""


class Compilations:
    """Watches what is compiled in the micro-batches of one run."""

    def __init__(self, device: torch.device, expect: Callable[[], None], *, are_known: bool = False) -> None:
        """Set up for a device.

        Args:
            device: where micro-batches run.
            expect: called when something was compiled, for each size may cost as much.
            are_known: whether something of the run was found to be compiled.
        """
        self._device = device
        self._expect = expect
        self.size = 0
        """The samples of the micro-batch that runs at this moment; 0 while none does."""
        self.of_window: dict[int, Heard] = {}
        """What was compiled in this window, by the samples of the micro-batch: then its time tells nothing."""
        self._has_graphs = keeps_graphs(device)  # somebody else's, by now
        self._total = Heard()  # in all windows
        self._sizes: list[int] = []  # of all micro-batches in which a forward was compiled
        self._are_known = are_known
        self.allowed: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Makes the context of forwards, in which compiled code runs or, where it is forgone, what it was made of."""

    # Called where something was compiled, and not for each micro-batch: see ``Meter.compiled``.

    def note(self, piece: Piece, reading: Reading, new: Heard) -> None:
        """Note what was compiled while a piece ran, and that its reading then tells of that rather than of the piece.

        Raises:
            ArgumentError: CUDA graphs were captured, and the next micro-batch writes over their memory.
        """
        had_graphs, self._has_graphs = self._has_graphs, keeps_graphs(self._device)
        # Found out by what happens: nothing that holds them need be in reach of whoever looks for them beforehand.
        if new.recordings or (self._has_graphs and not had_graphs):
            raise graphs_refused("a function that records CUDA graphs")
        if reading.piece is not None:  # what is not measured shares one that nothing is written to
            reading.is_cold = True
        self.of_window[piece.size] = self.of_window.get(piece.size, Heard()).and_(new)
        if new.compilations:  # else a backward, whose forward was counted before
            self._sizes.append(piece.size)
            self._total = self._total.and_(new)
        self._expect()

    def tell(self, step: int, emit: Callable[[Event], None], say_once: Callable[[Notice], None]) -> None:
        """Tell what was compiled in a window, and what may be done where there is no end to it."""
        for size, new in self.of_window.items():
            emit(Compiled(step=step, micro_batch=size, compilations=new.compilations, seconds=new.seconds))
        if len(self._sizes) > RECURRING:
            limit = torch._dynamo.config.recompile_limit
            say_once(notices.compiles_on(len(self._sizes), sorted(set(self._sizes)), self._total.seconds, limit))
        self.of_window = {}

    def are_there(self) -> bool:
        """Return whether something of the run is known to be compiled."""
        return self._are_known or bool(self._sizes)

    @property
    def are_forgone(self) -> bool:
        """Return whether forwards run as they are written, whatever was compiled."""
        return self.allowed is not nullcontext

    def forgo(self) -> None:
        """Run forwards as they are written from now on."""
        # All of what was compiled: nobody knows which part of it holds the loss.
        self.allowed = partial(torch.compiler.set_stance, "force_eager")

    @contextmanager
    def allowed_within(self, other: Autocast) -> Iterator[None]:
        """Enter the context of forwards, and another one within it."""
        with self.allowed(), other():
            yield

    def sparing(self, loss_of: LossOf) -> LossOf:
        """Return a loss whose micro-batches say that their number of samples varies, so that it is compiled for any."""

        def spared(model: Any, batch: Any) -> Any:
            # A first size would be compiled as a constant, and the second one anew.
            mark(batch, self.size)
            return loss_of(model, batch)

        return spared


def mark(batch: Any, num_samples: int) -> None:
    """Mark the dimension of each tensor that is as long as there are samples, the first of several, as one that varies.

    Another one that happens to be as long is compiled for any length too, which costs a little speed and nothing else.
    """
    if num_samples < 2:  # the compiler takes 1 for a case of its own, whatever is said of it
        return
    for leaf in flatten(batch)[0]:
        # A nested one may have no shape to be asked for, and its compiler takes care of what varies.
        if isinstance(leaf, torch.Tensor) and not leaf.is_nested and num_samples in leaf.shape:
            # Weakly: where it cannot be kept open, as in a model that asks for 16 samples, that is no error.
            torch._dynamo.maybe_mark_dynamic(leaf, leaf.shape.index(num_samples))


def compiled_parts(model: object, modules: Iterable[nn.Module], functions: Iterable[object]) -> list[Any]:
    """Return what torch.compile has made, of the model, of any module within, or of functions and what they hold."""
    held = surroundings_of(functions)
    layers = [layer for module in (*modules, *held.modules) for layer in module.modules()]
    # A module that was compiled in place keeps beside it what was made of it.
    in_place = [getattr(layer, "_compiled_call_impl", None) for layer in (model, *layers)]
    found = [part for part in (model, *layers, *in_place, *held.compiled) if hasattr(part, "get_compiler_config")]
    return list({id(part): part for part in found}.values())


def keeps_graphs(device: torch.device) -> bool:
    """Return whether PyTorch keeps CUDA graphs of compiled code on a device, recorded or soon to be."""
    # It keeps them in a tree for each device, which begins with the first run of a function that is to be captured.
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if device.type != "cuda" or trees is None:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return trees.get_manager(index, create_if_none_exists=False) is not None


def captures(part: Any) -> bool:
    """Return whether something that was compiled is to be captured in CUDA graphs."""
    return bool((part.get_compiler_config() or {}).get("triton.cudagraphs"))


def graphs_refused(what: str) -> ArgumentError:
    """Return the error for what was compiled to CUDA graphs."""
    return ArgumentError("model", what, "a model without CUDA graphs", CURE)
