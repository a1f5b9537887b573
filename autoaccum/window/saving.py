"""What a run does where not even its smallest micro-batch fits: it saves memory, rung by rung and to the same bits.

Which rungs there are, ``blocks`` says; how memory is saved, ``recomputing``, ``offloading`` and ``optimizer_state``;
when, ``planning.ladder``, and where it is faster, ``planning.contest``. A rung is stepped on and measured at once: a
window that needs it cannot be run without it, so there is no gradient to compare with. What can be measured there is
what a gradient is made of. The graph is that of the first forward, and the tensors that it would have saved come from a
second one, or back from the host; so the gradient is the same to the bit if each operation of the second forward comes
to the bits that it came to in the first, and if each storage comes back with the bits that it had. That is compared, by
checksums, for all micro-batches of two windows in a row: the second shows what state is left behind by the first. What
else forwards move, such as a counter in an enclosing function, is looked at before and after, and put back. After these
two windows nothing is compared any more. In compiled code no operation shows: where a block has run in it, what it
computes twice is compared beside the window, with an uncompiled forward and backward that are run for that alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import torch

from autoaccum.errors import AutoaccumError
from autoaccum.events import MemorySaving, Notice, Recomputed
from autoaccum.loss.stated import LossOf, total
from autoaccum.memory.oom import RanOut, attempt, drop_what_is_due, insist, without_frames
from autoaccum.planning.contest import Contest, Room
from autoaccum.planning.ladder import Ladder, SavingMode, kinds_asked_for
from autoaccum.window import notices
from autoaccum.window.blocks import HIGHEST, Rung, SavedAlready, candidates, named_blocks, rungs_of
from autoaccum.window.comparing import NotRepeatableError
from autoaccum.window.job import Job
from autoaccum.window.offloading import NotRestoredError, Offloading
from autoaccum.window.optimizer_state import OptimizerState
from autoaccum.window.recomputing import Recomputing, is_refusal
from autoaccum.window.tape import Entry, record

MEASURED = 2
"""Windows in a row in which what is computed twice, and what comes back, is compared."""
ON_HOST = "what is kept on the host"
"""Stands among the names of classes that were refused; it is no name of a class."""


class NotSaved(NamedTuple):
    """An attempt at a window in which it showed that memory cannot be saved as it was to be."""

    error: Exception
    """Without frames, so that it pins nothing of what must be freed."""


class Computes(Protocol):
    """What computes losses."""

    def compute_by(self, loss_of: LossOf) -> None:
        """Compute them by this from now on."""


class Saving:
    """The rungs of one run, and the one that it stands on."""

    def __init__(
        self,
        job: Job,
        mode: SavingMode,
        *,
        kinds: frozenset[str],
        users: Sequence[Computes] = (),
        is_compiled: Callable[[], bool] = lambda: False,
        is_given: bool = False,
    ) -> None:
        """Set up on the highest rung.

        Args:
            job: what is computed, with the loss as it is written.
            mode: as the user wants it.
            kinds: in which ways memory can be saved: nothing is moved to the host where that is the device, say.
            users: what computes losses, and is told by which function.
            is_compiled: () -> whether anything is known to be compiled.
            is_given: whether the size of micro-batches is the user's, so that no faster rung is looked for.
        """
        self._job = job
        self._mode = mode
        self._had = kinds  # whatever the user wants
        self._asked = kinds_asked_for(mode)
        self._kinds = frozenset() if mode == "off" else kinds & (self._asked or kinds)
        self._offloading = Offloading(job.modules, job.device)
        self._recomputing = Recomputing(job.modules, job.functions, job.device, is_elsewhere=self._offloading.takes)
        self._state = OptimizerState(job.optimizer, job.modules, job.device)
        self._users = users
        self._is_compiled = is_compiled
        self.name = HIGHEST.name
        """The name of the rung."""
        self.is_off = True
        """Whether nothing is saved, as in nearly all windows of nearly all runs."""
        self.wants_begin = bool(self._asked and self._kinds)
        """Whether the first window has to begin on a lower rung: see ``begin``."""
        # To try a rung has everything compiled anew, which takes longer than it may save.
        is_allowed = mode == "auto" and "checkpoint" in self._kinds and not (is_given or is_compiled())
        self.contest = Contest(is_allowed=is_allowed)
        """Whether the next rung is worth a try although this one does."""
        self._ladder = Ladder()
        self._rungs: list[Rung] = []  # below the highest, once they are known
        self._are_all_found = False  # not where they come from a run that knew fewer ways
        self._refused: set[str] = set()  # names of classes whose forward cannot be computed again; ``ON_HOST``
        self._not_looked = ""  # why the forward by which rungs are found could not be run
        self._done = 0  # the lowest rung on which a window has committed
        # By the name of the rung, for a run may come to stand on it once more: it is not measured again then.
        self._left: dict[str, int] = {}  # windows that are still to be compared
        self._apart: Recomputed | Notice | None = None  # what was found beside a window, until that has committed

    @property
    def is_measured(self) -> bool:
        """Return whether what this rung changes was found to come to the same bits."""
        return not self._left.get(self.name, 0)

    @property
    def is_asked_for(self) -> bool:
        """Return whether the user wants memory to be saved, whatever fits."""
        return bool(self._asked)

    @property
    def has_risen(self) -> bool:
        """Return whether there is a lower rung that has done before."""
        return self._done > self._ladder.rung

    @property
    def may_rise(self) -> bool:
        """Return whether the rung above has not failed, but was left, or left out, for one that may be faster."""
        return self._ladder.was_left

    @property
    def saved(self) -> SavedAlready:
        """Return what is saved already, and how to have more saved than that."""
        rung = self._rung
        ways = self._how_to("checkpoint"), self._how_to("offload")
        return SavedAlready(rung.blocks, bool(rung.offloaded_bytes), rung.state_bytes, *ways)

    @property
    def _rung(self) -> Rung:
        return self._rungs[self._ladder.rung - 1] if self._ladder.rung else HIGHEST

    def _how_to(self, kind: str) -> str | None:
        """Return how to have memory saved in a way; empty where that cannot be had, None where it was tried."""
        if kind not in self._had:
            return ""
        if self._mode == "off":
            return 'memory_saving="auto"'
        is_left_out = bool(self._asked) and kind not in self._asked
        return 'memory_saving=["checkpoint", "offload"]' if is_left_out else None

    # Changes of the rung. Each returns what is to be told of it.

    def begin(self, batch: Callable[[], Any], step: int) -> MemorySaving | Notice:
        """Go to the lowest rung before the first window, as the user wants it; say so where there is none."""
        self.wants_begin = False
        self._find(batch)
        wanted = self._mode if isinstance(self._mode, str) else list(self._mode)
        # Not an error: until this window nobody knew, and the run itself is fine.
        if not self._rungs:
            self._kinds = frozenset()
            return notices.nothing_to_save(wanted, self._reasons())
        # As if each rung had failed under a limit of nothing; how much there is makes no difference to who asks for it.
        for _ in self._rungs:
            self._ladder.fall(0, 0)
        return self._moved(step, HIGHEST.name, f"memory_saving={notices.as_written(wanted)} was passed")

    def lower(
        self, batch: Callable[[], Any], step: int, limit_bytes: int, needed_bytes: int, room: Room | None
    ) -> MemorySaving | None:
        """Go down a rung or two, memory being as it was before the window; return None where there is none.

        Args:
            batch: () -> the smallest micro-batch, which did not fit.
            step: the number of the window.
            limit_bytes: what may be used.
            needed_bytes: what it needs at least.
            room: for samples; None where the next rung is gone to, whichever may be faster.
        """
        if not self._kinds:
            return None
        # Only now, for most runs never come here; and once, for what is saved does not depend on the limit.
        if self._ladder.rung == len(self._rungs) and not self._are_all_found:
            self._find(batch)
        if self._ladder.rung == len(self._rungs):
            return None
        before = self.name
        self._ladder.fall(limit_bytes, needed_bytes)
        below = self._computing_more()
        if room is not None and below is not None and room.holds_twice(self._rung.held_bytes, below.held_bytes):
            self._ladder.leave(limit_bytes)
        return self._moved(step, before, "out of memory at the smallest micro-batch")

    def try_lower(self, batch: Callable[[], Any], step: int, limit_bytes: int, reason: str) -> MemorySaving | None:
        """Go down a rung that may be faster; return None where none is left on which blocks are computed twice.

        Args:
            batch: () -> the smallest micro-batch.
            step: the number of the window.
            limit_bytes: what may be used.
            reason: why it may be.
        """
        if self._ladder.rung == len(self._rungs) and not self._are_all_found:
            self._find(batch)
        if self._computing_more() is None:
            return None
        before = self.name
        self._ladder.leave(limit_bytes)
        return self._moved(step, before, reason)

    def _computing_more(self) -> Rung | None:
        """Return the rung below, where it does not have to wait: what goes to the host is for runs that need it."""
        below = self._rungs[self._ladder.rung : self._ladder.rung + 1]
        return below[0] if below and "offload" not in below[0].kinds else None

    def give_back(self, rungs: int, step: int, reason: str) -> MemorySaving:
        """Go up again by so many rungs, which were tried or left out."""
        before = self.name
        # What was refused there is refused still; the rungs themselves may be needed one day, and are known by then.
        for _ in range(min(rungs, self._ladder.rung)):
            self._ladder.give_back()
        return self._moved(step, before, reason)

    def look(self, limit_bytes: int, step: int) -> MemorySaving | None:
        """Look at the memory before a window, and go up a rung if there has been enough of it for long enough."""
        if self._mode != "auto" or not self._rungs or not self._ladder.look(limit_bytes):
            return None
        before = self.name
        self._ladder.rise()
        return self._moved(step, before, "memory has come back")

    def _moved(self, step: int, before: str, reason: str) -> MemorySaving:
        self._stand()
        rung = self._rung
        if not self.is_off:
            self._left.setdefault(rung.name, MEASURED)
        return MemorySaving(
            step=step,
            old=before,
            new=self.name,
            reason=reason,
            blocks=len(self._recomputing.blocks),
            held_bytes=None if self.is_off else rung.held_bytes,
            recomputed_bytes=rung.recomputed_bytes,
            offloaded_bytes=rung.offloaded_bytes,
            state_bytes=rung.state_bytes,
        )

    def _stand(self) -> None:
        """Have losses computed as the ladder's rung has it."""
        rung, named = self._rung, named_blocks(self._job.modules)
        self.is_off, self.name = rung is HIGHEST, rung.name
        self._apart = None  # of another rung, whose window has not committed
        self._recomputing.blocks = [named[name] for name in rung.blocks]
        for part in self._parts:
            part.is_compared = False
        if not rung.state_bytes:
            self.end_window()
        # Where nothing is saved it is the user's own function again, and nothing around it.
        loss_of = self._job.loss_of
        if rung.blocks:
            loss_of = self._recomputing.of_loss(loss_of)
        # Around the other, so that what the blocks are given goes to the host as well.
        if rung.offloaded_bytes:
            loss_of = self._offloading.of_loss(loss_of)
        for user in self._users:
            user.compute_by(loss_of)

    # What rungs there are.

    def _find(self, batch: Callable[[], Any]) -> None:
        """Find the rungs, by a forward of which nothing is kept; none where that cannot be run either."""
        is_twice, is_host = "checkpoint" in self._kinds, "offload" in self._kinds and ON_HOST not in self._refused
        found = candidates(self._job.modules, self._refused) if is_twice else {}
        tape = self._tape(batch, found) if found or is_host else None
        if tape is None:
            return
        rungs = rungs_of(tape, found, self._state.num_bytes() if is_host else None)
        # Who asks for a way of saving memory asks for all of it.
        if self._asked:
            rungs = rungs[-1:]
        # What a run of before has found is kept: of it are the sizes, and what was measured.
        self._rungs += [rung for rung in rungs if not self._rungs or "offload" in rung.kinds]
        self._are_all_found = bool(self._rungs)

    def _tape(self, batch: Callable[[], Any], found: dict[str, tuple[str, ...]]) -> tuple[Entry, ...] | None:
        """Return the tape of a forward that keeps nothing; None where that cannot be run either."""
        job, named = self._job, named_blocks(self._job.modules)
        blocks = {name: named[name] for names in found.values() for name in names}

        def look() -> tuple[Entry, ...]:
            with self._recomputing.no_trace(), ExitStack() as stack:
                given = batch()
                stack.enter_context(job.autocast())
                stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code runs no hook of a block
                return record(lambda: total(job.loss_of(job.model, given)), job.modules, given, job.device, blocks)

        try:
            return insist(look, "a forward was looked at")
        except Exception as error:  # the same forward is run again, and raises what there is to be raised
            words = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._not_looked = f"a forward without gradients, which tells what can be saved, raised {words}"
            return None

    # Whether they are exact.

    @property
    def _parts(self) -> tuple[Recomputing, Offloading, OptimizerState]:
        return self._recomputing, self._offloading, self._state

    def begin_attempt(self) -> None:
        """Make room for an attempt at a window, and compare what comes of that where it is still to be measured."""
        # A hook that was added, or another mode, is another forward, of which nothing was measured.
        if self._recomputing.layers_have_changed():
            self._left = dict.fromkeys(self._left, MEASURED)
        for part in self._parts:
            part.compare(not self.is_measured)
        self._recomputing.watch()
        if self._rung.state_bytes:
            self._state.take_out()

    def look_for_hidden(self, batch: Callable[[], Any], step: int) -> None:
        """Look whether all blocks have shown what they compute, and compare them beside the window where they have not.

        Args:
            batch: () -> the smallest micro-batch.
            step: the number of the window, whose micro-batches have all been run.

        Raises:
            NotRepeatableError: a block that is compiled cannot be computed again.
        """
        num_run, num_blocks = self._recomputing.num_run, len(self._recomputing.blocks)
        # A layer that is dropped at random is not run either. Where none has shown they have run in something that
        # nobody knows to be compiled.
        if not num_blocks or not (self._is_compiled() or num_run == 0):
            return
        # In each window, for what is written may depend on sizes, samples and flags.
        self._recomputing.refuse_written()
        if num_run < num_blocks and not self.is_measured:
            self._apart = self._compared_apart(batch, step)
            self._left[self.name] = 0

    @property
    def has_lost(self) -> bool:
        """Return whether some of this attempt was not compared, as the next one will be, for a kernel trembles."""
        return self._recomputing.comparison.has_lost

    def end_attempt(self) -> None:
        """Have the optimizer's state back on the device; what is there already stays."""
        self._state.put_back()

    def _compared_apart(self, batch: Callable[[], Any], step: int) -> Recomputed | Notice | None:
        job, comparison = self._job, self._recomputing.comparison
        loss_of = self._recomputing.of_loss(job.loss_of)

        def compare() -> None:
            given = batch()

            def loss() -> torch.Tensor:
                with job.autocast():
                    return total(loss_of(job.model, given))

            self._recomputing.compare_apart(loss, MEASURED)

        # It takes more memory than compiled code does, and is no reason to do without a rung on which that fits.
        if isinstance(attempt(compare), RanOut):
            return notices.not_compared(self.name)
        operations = comparison.operations // MEASURED
        return Recomputed(step=step, saving=self.name, operations=operations) if operations else None

    def end_window(self) -> None:
        """Have it back however the window has ended.

        Raises:
            MemoryLimitError: the device has no memory for it.
        """
        insist(self._state.put_back, "the optimizer's state was brought back from the host")

    def committed(self, step: int) -> Recomputed | Notice | None:
        """Take it that a window has committed; return what was measured, once it is enough."""
        # What has done once is gone back to without any wait.
        self._done = max(self._done, self._ladder.rung)
        if self._apart is not None:
            found, self._apart = self._apart, None
            for part in self._parts:
                part.compare(False)
            return found
        # Both kinds of copies are told as one: what counts is that there were some.
        operations, storages = self._recomputing.comparison.operations, self._offloading.compared + self._state.compared
        # A window in which nothing counts has no backward, and says nothing.
        if self.is_measured or not (operations or storages):
            return None
        self._left[self.name] -= 1
        if not self.is_measured:
            return None
        for part in self._parts:
            part.compare(False)
        return Recomputed(step=step, saving=self.name, operations=operations, storages=storages)

    def not_saved(self, error: Exception) -> NotSaved:
        """Return what an error in a window says of how memory is saved; raise it where it says nothing of that."""
        # One that is new with the rung is taken for it: without the rung the window does not fit, whatever it raises.
        # What this library raises says itself what is wrong.
        is_of_compiler = type(error).__module__.startswith("torch._dynamo")  # which may not take what it reads later
        is_told = is_refusal(error) or isinstance(error, NotRestoredError)
        is_of_rung = is_told or is_of_compiler or not self.is_measured
        if self.is_off or isinstance(error, AutoaccumError) or not is_of_rung:
            raise error
        refused = NotSaved(without_frames(error))
        drop_what_is_due()
        return refused

    def refuse(self, error: Exception, step: int) -> tuple[Notice, MemorySaving]:
        """Give up the rungs, which are not exact; others may be found. Return what is to be told."""
        before, reason = self.name, f"{error}".partition("\n")[0]
        is_host = isinstance(error, NotRestoredError) or not is_refusal(error)
        if is_host and "offload" in self._rung.kinds:
            self._refused.add(ON_HOST)
            notice, why = notices.not_restored(reason), "what is kept on the host is not restored"
        else:
            # Checkpoint does not say which block it was: then all of them are given up.
            at_fault = [error.block] if isinstance(error, NotRepeatableError) else self._recomputing.blocks
            kinds = sorted({type(block).__name__ for block in at_fault})
            self._refused.update(kinds)
            notice, why = notices.not_repeatable(kinds, reason), f"{', '.join(kinds)} cannot be computed again"
        self._rungs, self._left, self._done, self._are_all_found = [], {}, 0, False
        self._ladder.give_up()
        return notice, self._moved(step, before, why)

    def _reasons(self) -> str:
        classes = ", ".join(sorted(self._refused - {ON_HOST}))
        found = [f"{classes} cannot be computed again"] if classes else []
        found += ["what is kept on the host is not restored"] if ON_HOST in self._refused else []
        if found:
            return ", and ".join(found)
        if self._not_looked:
            return self._not_looked
        what = {"checkpoint": "none of the model's blocks saves memory by that"}
        what["offload"] = "no tensor that a forward saves, or the optimizer keeps, is large enough for that"
        return ", and ".join(text for kind, text in what.items() if kind in self._asked)

    def state_dict(self) -> dict[str, Any]:
        """Return the rungs, the one that the run stands on, and what was refused; nothing where that says nothing."""
        # So that checkpoints of runs that fit are what they were before there was anything to save.
        if not self._rungs and not self._refused:
            return {}
        found: dict[str, Any] = {
            "rungs": [(rung.name, list(rung.blocks), rung.held_bytes, rung.recomputed_bytes) for rung in self._rungs],
            "refused": sorted(self._refused),
            "left": dict(self._left),
            "guards": self._recomputing.guards_all,
            **self._ladder.state_dict(),
            "contest": self.contest.state_dict(),
        }
        # What came later.
        if self._asked:
            found["asked"] = sorted(self._asked)
        if any("offload" in rung.kinds for rung in self._rungs):
            found["elsewhere"] = [(rung.offloaded_bytes, rung.state_bytes) for rung in self._rungs]
        return {"saving": found}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Put back what ``state_dict`` returned; return whether this stands on the rung of then.

        It does not where the model has no such blocks, or where the user wants another rung by now.
        """
        found, named = state.get("saving"), named_blocks(self._job.modules)
        # Sizes that were found on one rung are not those of another.
        if found is None:
            return not self._asked
        elsewhere = found.get("elsewhere", [(0, 0)] * len(found["rungs"]))
        rungs = [
            Rung(name, tuple(blocks), held, twice, *moved)
            for (name, blocks, held, twice), moved in zip(found["rungs"], elsewhere, strict=True)
        ]
        is_known = all(block in named for rung in rungs for block in rung.blocks)
        is_known = is_known and all(rung.kinds <= self._kinds for rung in rungs)
        is_lowest = len(found["wanted"]) == len(rungs) > 0
        is_known = is_known and len(found.get("failed", found["wanted"])) == len(found["wanted"]) <= len(rungs)
        # Before there was more than one way to ask for, what was asked for is what the lowest rung does.
        if self._asked and is_known:
            asked = found.get("asked", rungs[-1].kinds if rungs else ())
            is_known = is_lowest and frozenset(asked) == self._asked
        if not (self._kinds and is_known):
            return not found["wanted"] and not self._asked
        self._rungs, self._refused, self._left = rungs, set(found["refused"]), dict(found["left"])
        self._are_all_found = "elsewhere" in found or bool(self._asked)
        self._ladder.load_state_dict(found)
        self._done, self._recomputing.guards_all = self._ladder.rung, found["guards"]
        self.wants_begin = False
        if "contest" in found:
            self.contest.load_state_dict(found["contest"])
        self._stand()
        return True
