"""What a run does where not even its smallest micro-batch fits: compute blocks twice, rung by rung, to the same bits.

Which blocks, ``blocks`` says, and how, ``recomputing``; when, ``planning.ladder``. A rung is stepped on and measured
at once: a window that needs it cannot be run without it, so there is no gradient to compare with. What can be measured
there is what a gradient is made of. The graph is that of the first forward, and the tensors that it would have saved
come from the second one; so the gradient is the same to the bit if each operation of the second forward comes to the
bits that it came to in the first. That is compared, by checksums, for all micro-batches of two windows in a row: the
second shows what state is left behind by the first. What else forwards move, such as a counter in an enclosing
function, is looked at before and after, and put back. After these two windows nothing is compared any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

from autoaccum.errors import AutoaccumError
from autoaccum.events import MemorySaving, Notice, Recomputed
from autoaccum.loss.stated import LossOf, total
from autoaccum.memory.oom import insist
from autoaccum.planning.ladder import Ladder, SavingMode
from autoaccum.window import notices
from autoaccum.window.blocks import WORTHWHILE, Chosen, candidates, choose, every_second, named_blocks
from autoaccum.window.comparing import NotRepeatableError
from autoaccum.window.job import Job
from autoaccum.window.recomputing import Recomputing, is_refusal
from autoaccum.window.tape import Entry, most_held, record

OFF = "off"
"""The name of the highest rung."""
MEASURED = 2
"""Windows in a row in which what is computed twice is compared."""


class Computes(Protocol):
    """What computes losses."""

    def compute_by(self, loss_of: LossOf) -> None:
        """Compute them by this from now on."""


class Rung(NamedTuple):
    """A way of saving memory."""

    name: str
    blocks: tuple[str, ...]
    """The names of those that are computed twice."""
    held_bytes: int
    """The most that a backward of the smallest micro-batch is expected to hold at once."""
    recomputed_bytes: int
    """What is computed twice of that."""


class Saving:
    """The rungs of one run, and the one that it stands on."""

    def __init__(self, job: Job, mode: SavingMode, *, is_possible: bool, users: Sequence[Computes] = ()) -> None:
        """Set up on the highest rung.

        Args:
            job: what is computed, with the loss as it is written.
            mode: as the user wants it.
            is_possible: whether blocks can be computed twice: not where they are compiled, say.
            users: what computes losses, and is told by which function.
        """
        self._job = job
        self._mode = mode
        self._is_had = is_possible  # whatever the user wants
        self._is_possible = is_possible and mode != "off"
        self._recomputing = Recomputing(job.modules, job.functions, job.device)
        self._users = users
        self.name = OFF
        """The name of the rung."""
        self.is_off = True
        """Whether nothing is saved, as in nearly all windows of nearly all runs."""
        self.wants_begin = mode == "checkpoint" and is_possible
        """Whether the first window has to begin on a lower rung: see ``begin``."""
        self._ladder = Ladder()
        self._rungs: list[Rung] = []  # below the highest, once they are known
        self._refused: set[str] = set()  # names of classes whose forward cannot be computed again
        self._done = 0  # the lowest rung on which a window has committed
        # By the name of the rung, for a run may come to stand on it once more: it is not measured again then.
        self._left: dict[str, int] = {}  # windows that are still to be compared

    @property
    def is_measured(self) -> bool:
        """Return whether what this rung computes twice was found to come to the same bits."""
        return not self._left.get(self.name, 0)

    @property
    def is_asked_for(self) -> bool:
        """Return whether the user wants blocks to be computed twice, whatever fits."""
        return self._mode == "checkpoint"

    @property
    def has_risen(self) -> bool:
        """Return whether there is a lower rung that has done before."""
        return self._done > self._ladder.rung

    @property
    def blocks(self) -> tuple[str, ...]:
        """Return the names of the blocks that are computed twice."""
        return () if self.is_off else self._rungs[self._ladder.rung - 1].blocks

    @property
    def how_to(self) -> str | None:
        """Return how to have blocks computed twice; empty where it cannot be had, None where it was tried."""
        if self._mode == "off" and self._is_had:
            return 'memory_saving="auto"'
        return None if self._is_had else ""

    # Changes of the rung. Each returns what is to be told of it.

    def begin(self, batch: Callable[[], Any], step: int) -> MemorySaving | Notice:
        """Go to the lowest rung before the first window, as the user wants it; say so where there is none."""
        self.wants_begin = False
        self._find(batch)
        # Not an error: until this window nobody knew, and the run itself is fine.
        if not self._rungs:
            self._is_possible = False
            return notices.nothing_to_compute_twice(self._reasons())
        # As if each rung had failed under a limit of nothing; how much there is makes no difference to who asks for it.
        for _ in self._rungs:
            self._ladder.fall(0, 0)
        return self._moved(step, OFF, 'memory_saving="checkpoint" was passed')

    def lower(self, batch: Callable[[], Any], step: int, limit_bytes: int, needed_bytes: int) -> MemorySaving | None:
        """Go down a rung, memory being as it was before the window; return None where there is none.

        Args:
            batch: () -> the smallest micro-batch, which did not fit.
            step: the number of the window.
            limit_bytes: what may be used.
            needed_bytes: what it needs at least.
        """
        if not self._is_possible:
            return None
        # Only now, for most runs never come here; and once, for what blocks save does not depend on the limit.
        if not self._rungs:
            self._find(batch)
        if self._ladder.rung == len(self._rungs):
            return None
        before = self.name
        self._ladder.fall(limit_bytes, needed_bytes)
        return self._moved(step, before, "out of memory at the smallest micro-batch")

    def look(self, limit_bytes: int, step: int) -> MemorySaving | None:
        """Look at the memory before a window, and go up a rung if there has been enough of it for long enough."""
        if self._mode != "auto" or not self._rungs or not self._ladder.look(limit_bytes):
            return None
        before = self.name
        self._ladder.rise()
        return self._moved(step, before, "memory has come back")

    def _moved(self, step: int, before: str, reason: str) -> MemorySaving:
        self._stand()
        rung = None if self.is_off else self._rungs[self._ladder.rung - 1]
        if rung is not None:
            self._left.setdefault(rung.name, MEASURED)
        return MemorySaving(
            step=step,
            old=before,
            new=self.name,
            reason=reason,
            blocks=len(self._recomputing.blocks),
            held_bytes=None if rung is None else rung.held_bytes,
            recomputed_bytes=0 if rung is None else rung.recomputed_bytes,
        )

    def _stand(self) -> None:
        """Have losses computed as the ladder's rung has it."""
        recomputing, named = self._recomputing, named_blocks(self._job.modules)
        self.is_off = not self._ladder.rung
        self.name = OFF if self.is_off else self._rungs[self._ladder.rung - 1].name
        recomputing.blocks = [named[name] for name in self.blocks]
        recomputing.is_compared = False
        # Where nothing is saved it is the user's own function again, and nothing around it.
        loss_of = self._job.loss_of if self.is_off else recomputing.of_loss(self._job.loss_of)
        for user in self._users:
            user.compute_by(loss_of)

    # What rungs there are.

    def _find(self, batch: Callable[[], Any]) -> None:
        """Find the rungs, by a forward of which nothing is kept; none where that cannot be run either."""
        self._rungs = []
        job, found = self._job, candidates(self._job.modules, self._refused)
        if not found:
            return
        named = named_blocks(job.modules)
        blocks = {name: named[name] for names in found.values() for name in names}

        def look() -> tuple[Entry, ...]:
            with self._recomputing.no_trace(), ExitStack() as stack:
                given = batch()
                stack.enter_context(job.autocast())
                return record(lambda: total(job.loss_of(job.model, given)), job.modules, given, job.device, blocks)

        try:
            tape = insist(look, "a forward was looked at")
        except Exception:  # the same forward is run again, and says what there is to say
            return
        chosen = choose(tape, found)
        # Then what is held is held elsewhere: in one layer, in the loss, in parameters.
        if chosen is None:
            return
        some, plain = every_second(tape, chosen), most_held(tape)
        # A rung is worth a window that is run in vain where it saves some, and the next one saves more.
        is_between = (1 - WORTHWHILE) * plain > some.held_bytes > (1 + WORTHWHILE) * chosen.held_bytes
        if is_between and self._mode == "auto":
            self._rungs.append(_rung(some))
        self._rungs.append(_rung(chosen))

    # Whether they are exact.

    def begin_attempt(self) -> None:
        """Compare what is computed twice in an attempt at a window, where this rung is still to be measured."""
        # A hook that was added, or another mode, is another forward, of which nothing was measured.
        if self._recomputing.layers_have_changed():
            self._left = dict.fromkeys(self._left, MEASURED)
        self._recomputing.is_compared = not self.is_measured
        self._recomputing.comparison.begin()

    def committed(self, step: int) -> Recomputed | None:
        """Take it that a window has committed; return what was measured, once it is enough."""
        # What has done once is gone back to without any wait.
        self._done = max(self._done, self._ladder.rung)
        recomputing, found = self._recomputing, self._recomputing.comparison
        # A window in which nothing counts has no backward, and says nothing; nor does one that could not be compared.
        if not (recomputing.is_compared and found.operations) or found.has_lost:
            return None
        recomputing.is_compared = False
        self._left[self.name] -= 1
        if not self.is_measured:
            return None
        return Recomputed(step=step, saving=self.name, operations=found.operations)

    def refuses(self, error: Exception) -> bool:
        """Return whether an error in a window is the doing of this rung, as far as can be told."""
        # One that is new with the rung is taken for it: without the rung the window does not fit, whatever it raises.
        # What this library raises says itself what is wrong.
        is_known = isinstance(error, AutoaccumError)
        return not (self.is_off or is_known) and (is_refusal(error) or not self.is_measured)

    def refuse(self, error: Exception, step: int) -> tuple[Notice, MemorySaving]:
        """Give up the rungs, whose blocks cannot be computed again; others may be found. Return what is to be told."""
        before = self.name
        # Checkpoint does not say which block it was: then all of them are given up.
        at_fault = [error.block] if isinstance(error, NotRepeatableError) else self._recomputing.blocks
        kinds = sorted({type(block).__name__ for block in at_fault})
        self._refused.update(kinds)
        self._rungs, self._left, self._done = [], {}, 0
        self._ladder.leave()
        told = self._moved(step, before, f"{', '.join(kinds)} cannot be computed again")
        return notices.not_repeatable(kinds, f"{error}".partition("\n")[0]), told

    def _reasons(self) -> str:
        if self._refused:
            return f"{', '.join(sorted(self._refused))} cannot be computed again"
        return "none of the model's blocks saves memory by that"

    def state_dict(self) -> dict[str, Any]:
        """Return the rungs, the one that the run stands on, and what was refused; nothing where that says nothing."""
        # So that checkpoints of runs that fit are what they were before there was anything to save.
        if not self._rungs and not self._refused:
            return {}
        return {
            "saving": {
                "rungs": [
                    (rung.name, list(rung.blocks), rung.held_bytes, rung.recomputed_bytes) for rung in self._rungs
                ],
                "refused": sorted(self._refused),
                "left": dict(self._left),
                "guards": self._recomputing.guards_all,
                **self._ladder.state_dict(),
            }
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Put back what ``state_dict`` returned; return whether this stands on the rung of then.

        It does not where the model has no such blocks, or where the user wants another rung by now.
        """
        found, named = state.get("saving"), named_blocks(self._job.modules)
        # Sizes that were found on one rung are not those of another.
        if found is None:
            return self._mode != "checkpoint"
        rungs = [Rung(name, tuple(blocks), held, twice) for name, blocks, held, twice in found["rungs"]]
        is_known = all(block in named for rung in rungs for block in rung.blocks)
        is_lowest = len(found["wanted"]) == len(rungs) > 0
        is_known = is_known and len(found["wanted"]) <= len(rungs)
        if not (self._is_possible and is_known) or (self._mode == "checkpoint" and not is_lowest):
            return not found["wanted"] and self._mode != "checkpoint"
        self._rungs, self._refused, self._left = rungs, set(found["refused"]), dict(found["left"])
        self._ladder.load_state_dict(found)
        self._done, self._recomputing.guards_all = self._ladder.rung, found["guards"]
        self.wants_begin = False
        self._stand()
        return True


def _rung(chosen: Chosen) -> Rung:
    return Rung(f"checkpoint, {chosen.name}", chosen.blocks, chosen.held_bytes, chosen.recomputed_bytes)
