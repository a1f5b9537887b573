"""Finds the blocks of a model whose forward is worth computing again: by what that saves, as one forward has shown.

Candidates are the children of each list, the members of each class of modules that are made of others, and unions of
these, as a model of two towers needs. Which of them is best is not guessed: of each it is reckoned, from the tape of a
forward, what is held at once, and what is computed twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from autoaccum.window.offloading import ABOVE_BYTES
from autoaccum.window.tape import Entry, most_elsewhere, most_held, most_recomputed

WORTHWHILE = 0.01
"""Take no candidate, and no rung, that saves less than this share of what is held at once."""
AS_GOOD = 0.02
"""Of candidates that are this near to each other in what is held, the one that computes the least twice is taken."""
_STARTS = 8
"""Look for unions from so many of the candidates on, of which the least is held."""
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """Blocks to compute twice."""

    name: str
    """What they are, for people to read."""
    blocks: tuple[str, ...]
    """Their names, in the order in which their forwards were run."""
    held_bytes: int
    """The most that is held for a backward at once, by the tape."""
    recomputed_bytes: int
    """What their forwards save, which is computed once more."""


def named_blocks(modules: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return all modules below these by their names, "model.layers.0", each once."""
    found: dict[str, nn.Module] = {}
    # The first module is the model: where a loss has something of the same name, the model's is meant.
    for root in reversed(modules):
        inner = dict(root.named_modules(prefix="model"))
        inner.pop("model", None)  # all of it is no block
        found |= inner
    return {name: module for name, module in found.items() if not isinstance(module, torch.jit.ScriptModule)}


def candidates(modules: Sequence[nn.Module], without: Collection[str] = ()) -> dict[str, tuple[str, ...]]:
    """Return the names of the blocks of each candidate, none within another, by what the candidate is.

    Args:
        modules: the model, and the loss if it is one too.
        without: names of classes that cannot be computed again.
    """
    named = named_blocks(modules)
    usable = {name: m for name, m in named.items() if type(m).__name__ not in without and not _is_around_compiled(m)}
    names = {id(module): name for name, module in usable.items()}
    roots = {"model": modules[0]} if modules else {}
    found: dict[str, tuple[str, ...]] = {}
    for name, module in {**roots, **named}.items():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
            inner = [getattr(child, "_orig_mod", child) for child in module]  # of what torch.compile has made
            children = [names[id(child)] for child in inner if id(child) in names]
            found[name] = tuple(dict.fromkeys(children))
    # Also those that occur once, for they may be called again and again; the tape shows what comes of that.
    classes: dict[type, list[str]] = defaultdict(list)
    for name, module in usable.items():
        if not isinstance(module, _WITHOUT_FORWARD) and next(module.children(), None) is not None:
            classes[type(module)].append(name)
    for kind, members in classes.items():
        found[f"every {kind.__name__}"] = tuple(_outermost(members))
    return {name: blocks for name, blocks in found.items() if blocks}


def _is_around_compiled(module: nn.Module) -> bool:
    """Return whether compiled code lies within a module; not whether the module lies within compiled code."""
    inner = [layer for layer in module.modules() if layer is not module]
    is_compiled = any(hasattr(layer, "_orig_mod") or layer._compiled_call_impl is not None for layer in inner)
    return is_compiled or hasattr(module, "_orig_mod")


def _outermost(names: Iterable[str]) -> list[str]:
    """Return those that lie within no other of them."""
    kept: list[str] = []
    # By depth, so that what others lie in comes before them.
    for name in sorted(names, key=lambda name: name.count(".")):
        if not any(name.startswith(f"{other}.") for other in kept):
            kept.append(name)
    return kept


def choose(tape: Sequence[Entry], found: dict[str, tuple[str, ...]]) -> Chosen | None:
    """Return the candidate of which the least is held at once for what is computed twice; None where none saves much.

    Args:
        tape: of a forward, with every candidate's blocks.
        found: the candidates.
    """
    plain = most_held(tape)
    # Lists and classes may have the same members.
    singles = {frozenset(blocks): _reckoned(tape, name, blocks) for name, blocks in reversed(found.items())}
    likely = sorted(singles.values(), key=lambda choice: choice.held_bytes)[:_STARTS]
    best = _best([_joined(tape, start, list(singles.values()), plain) for start in likely])
    return best if best is not None and best.held_bytes <= (1 - WORTHWHILE) * plain else None


def _joined(tape: Sequence[Entry], best: Chosen, others: Sequence[Chosen], plain: int) -> Chosen:
    """Return a choice with others that lie apart from it, one tower after the other, as long as each is worth it."""
    while True:
        unions = [
            _reckoned(tape, f"{best.name} and {other.name}", (*best.blocks, *other.blocks))
            for other in others
            if other.blocks and _are_apart(best.blocks, other.blocks)
        ]
        union = _best(unions)
        if union is None or union.held_bytes > best.held_bytes - WORTHWHILE * plain:
            return best
        best = union


def every_second(tape: Sequence[Entry], chosen: Chosen) -> Chosen:
    """Return every second block of a choice, from the first one on."""
    return _reckoned(tape, f"every 2nd of {chosen.name}", chosen.blocks[::2])


def _reckoned(tape: Sequence[Entry], name: str, blocks: Sequence[str]) -> Chosen:
    wanted = set(blocks)
    # In the order of the forward, of which every second is taken: modules may be listed in another one.
    order: dict[str, None] = {}
    for entry in tape:
        for block, _ in entry.within:
            if block in wanted:
                order.setdefault(block)
    return Chosen(
        name=name,
        blocks=tuple(order),  # what is not run, or saves nothing, need not be computed again
        held_bytes=most_held(tape, checkpointed=wanted),
        recomputed_bytes=most_recomputed(tape, wanted),
    )


def _best(choices: Sequence[Chosen]) -> Chosen | None:
    if not choices:
        return None
    # The least held is what makes a sample fit; what is computed twice decides among those that are as good as equal.
    least = min(choice.held_bytes for choice in choices)
    near = [choice for choice in choices if choice.held_bytes <= (1 + AS_GOOD) * least]
    return min(near, key=lambda choice: (choice.recomputed_bytes, choice.held_bytes))


def _are_apart(blocks: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether none of these lies within one of the others, or is one of them."""
    both = [*blocks, *others]
    return len(_outermost(both)) == len(both) == len(set(both))


# The rungs that come of it. Each does what the one above does, and more, and is worth a window that is run in vain
# where it saves some, and where the next one saves more.


class Rung(NamedTuple):
    """A way of saving memory."""

    name: str
    blocks: tuple[str, ...]
    """The names of those that are computed twice."""
    held_bytes: int
    """The most that a backward of the smallest micro-batch is expected to hold at once."""
    recomputed_bytes: int
    """What is computed twice of that."""
    offloaded_bytes: int = 0
    """What forwards save on the host instead; 0 where they save it on the device."""
    state_bytes: int = 0
    """What of the optimizer's state is on the host while a window runs; 0 where it stays."""

    @property
    def kinds(self) -> frozenset[str]:
        """Return in which ways it saves memory, in the words of the argument."""
        ways = {"checkpoint": bool(self.blocks), "offload": bool(self.offloaded_bytes or self.state_bytes)}
        return frozenset(way for way, is_taken in ways.items() if is_taken)


HIGHEST = Rung("off", (), 0, 0)
"""The one on which nothing is saved, as in nearly all windows of nearly all runs."""


def rungs_of(tape: Sequence[Entry], found: dict[str, tuple[str, ...]], state_bytes: int | None) -> list[Rung]:
    """Return the rungs below the highest, from the top down; none where nothing saves much.

    Args:
        tape: of a forward, with every candidate's blocks.
        found: the candidates of what to compute twice.
        state_bytes: what of the optimizer's state can be moved; None where there is no host to move anything to.
    """
    plain = most_held(tape)
    # Computing twice first: it needs no memory elsewhere, and most kernels are faster than the way there and back.
    rungs = _computing_twice(tape, choose(tape, found), plain)
    if state_bytes is None:
        return rungs
    # Slower by more than computing twice: the way to the host is narrow. And saved tensors before the state, for they
    # are what grows with the samples.
    last = rungs[-1] if rungs else HIGHEST._replace(name="", held_bytes=plain)
    held = most_held(tape, checkpointed=last.blocks, elsewhere=True, above_bytes=ABOVE_BYTES)
    if held < (1 - WORTHWHILE) * last.held_bytes:
        moved = most_elsewhere(tape, checkpointed=last.blocks, above_bytes=ABOVE_BYTES)
        last = last._replace(name=_named(last.name, "saved tensors"), held_bytes=held, offloaded_bytes=moved)
        rungs.append(last)
    if state_bytes > WORTHWHILE * last.held_bytes:
        is_more = bool(last.offloaded_bytes)
        name = f"{last.name} and optimizer state" if is_more else _named(last.name, "optimizer state")
        rungs.append(last._replace(name=name, state_bytes=state_bytes))
    return rungs


def _computing_twice(tape: Sequence[Entry], chosen: Chosen | None, plain: int) -> list[Rung]:
    # Then what is held is held elsewhere: in one layer, in the loss, in parameters.
    if chosen is None:
        return []
    some = every_second(tape, chosen)
    # A rung is worth a window that is run in vain where it saves some, and the next one saves more.
    is_between = (1 - WORTHWHILE) * plain > some.held_bytes > (1 + WORTHWHILE) * chosen.held_bytes
    return [_rung(choice) for choice in ([some, chosen] if is_between else [chosen])]


def _rung(chosen: Chosen) -> Rung:
    return Rung(f"checkpoint, {chosen.name}", chosen.blocks, chosen.held_bytes, chosen.recomputed_bytes)


def _named(name: str, what: str) -> str:
    return "; ".join(filter(None, (name, f"offload, {what}")))


class SavedAlready(NamedTuple):
    """How memory is saved already, and how to have it saved in the ways that are left."""

    blocks: tuple[str, ...] = ()
    """The names of blocks that are computed twice."""
    is_elsewhere: bool = False
    """Whether saved tensors are on the host."""
    state_bytes: int = 0
    """What of the optimizer's state is there while a window runs."""
    how_to_compute_twice: str | None = ""
    """How to have blocks computed twice; empty for the code that does, None where that was tried."""
    how_to_offload: str | None = ""
    """How to have tensors on the host, likewise."""

    @property
    def told(self) -> str:
        """Return what was done to save memory, as an error goes on with it; empty where nothing was tried."""
        done = [f"{len(self.blocks)} of the model's blocks computed twice"] if self.blocks else []
        done += ["what forwards save on the host"] if self.is_elsewhere else []
        if done:
            return f", with {' and '.join(done)}"
        none = ", and no block of the model was found that saves memory by being computed twice"
        return none if self.how_to_compute_twice is None else ""


NOTHING_SAVED = SavedAlready()
