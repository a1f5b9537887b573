"""The rungs of saving memory that a model has, by the tape of one forward: what is done on each, and what is held.

Each does what the one above does, and more. A rung is worth a window that is run in vain where it saves some, and where
the next one saves more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autoaccum.window.blocks import WORTHWHILE, Chosen, choose, every_second
from autoaccum.window.offloading import ABOVE_BYTES
from autoaccum.window.tape import Entry, most_elsewhere, most_held


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
    rungs = _computing_twice(tape, choose(tape, found), plain)
    if state_bytes is None:
        return rungs
    # Slower by more than computing twice: the way to the host is narrow. And saved tensors before the state, for they
    # are what grows with the samples.
    last = rungs[-1] if rungs else HIGHEST._replace(name="", held_bytes=plain)
    held = most_held(tape, checkpointed=last.blocks, elsewhere=True, above_bytes=ABOVE_BYTES)
    if held < (1 - WORTHWHILE) * last.held_bytes:
        moved = most_elsewhere(tape, checkpointed=last.blocks, above_bytes=ABOVE_BYTES)
        last = last._replace(name=_joined(last.name, "saved tensors"), held_bytes=held, offloaded_bytes=moved)
        rungs.append(last)
    if state_bytes > WORTHWHILE * last.held_bytes:
        is_more = bool(last.offloaded_bytes)
        name = f"{last.name} and optimizer state" if is_more else _joined(last.name, "optimizer state")
        rungs.append(last._replace(name=name, state_bytes=state_bytes))
    return rungs


def _computing_twice(tape: Sequence[Entry], chosen: Chosen | None, plain: int) -> list[Rung]:
    # Then what is held is held elsewhere: in one layer, in the loss, in parameters.
    if chosen is None:
        return []
    some = every_second(tape, chosen)
    is_between = (1 - WORTHWHILE) * plain > some.held_bytes > (1 + WORTHWHILE) * chosen.held_bytes
    return [_rung(choice) for choice in ([some, chosen] if is_between else [chosen])]


def _rung(chosen: Chosen) -> Rung:
    return Rung(f"checkpoint, {chosen.name}", chosen.blocks, chosen.held_bytes, chosen.recomputed_bytes)


def _joined(name: str, what: str) -> str:
    return "; ".join(filter(None, (name, f"offload, {what}")))
