"""The search on real windows: which size to try next in a window, and where in it.

``search`` decides from the history of trials alone; here it is asked on behalf of windows, which have so many samples,
need every sample once, and whose first micro-batch is better not a trial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from autoaccum.planning.attempts import Piece, length_at
from autoaccum.planning.costs import MemoryModel
from autoaccum.planning.cuts import Lengths, are_alike
from autoaccum.planning.cutter import Cutter
from autoaccum.planning.extrapolation import reach
from autoaccum.planning.limits import Limits
from autoaccum.planning.search import FAR, FEW_SIZES_FIRST, FEW_SIZES_GROWTH, has_plateaued, next_trial

ENDLESS = 2**62
"""A weight that no micro-batch reaches."""
TOLD = 1.01
"""Peaks of trials tell what a sample adds where the largest is this many times that of one sample."""
NO_FASTER = "larger micro-batches are no faster"
NOT_TRIED = "no batch had room to try larger micro-batches"


class Searching:
    """Chooses trials for windows."""

    def __init__(
        self,
        cutter: Cutter,
        limits: Limits,
        fastest_up_to: Callable[[int], int | None],
        *,
        is_on: bool = True,
        few_sizes: bool,
        warms_up: bool = False,
    ) -> None:
        """Set up.

        Args:
            cutter: cuts the windows.
            limits: what trials may take.
            fastest_up_to: (weight) -> the weight of the fastest plan whose micro-batches weigh no more; None where no
                times are known.
            is_on: whether to search at all.
            few_sizes: whether each new size costs a compilation, say, so that few are tried, and large ones.
            warms_up: whether the first run of a size takes time and memory that no later one does: then it is run once
                before its trial, as a micro-batch like any other.
        """
        self._warms_up = warms_up
        self._cutter = cutter
        self._fastest_up_to = fastest_up_to
        self._limits = limits
        self.few_sizes = few_sizes
        """Whether to try few sizes, and large ones."""
        self.is_on = is_on
        """Whether sizes are being tried."""
        self.has_lengths: bool | None = None
        """Whether windows say how long their samples are; None until the first one. A stream may change its mind."""
        self.warm = 0
        """The size that was run last without being measured, in this window or one before; 0 for none."""
        self.start_bytes: int | None = None
        """What tensors held before the last trial; None where nobody tells them from the rest."""
        self._cold: set[int] = set()  # sizes whose first trial told nothing
        self.gradient_bytes = 0
        """What the gradients take that all trials are measured beside, but for one that is the whole window."""
        self.known = 0
        """The largest weight that fitted in an earlier run; 0 where nothing is known, or it is no longer believed."""
        self.goal: int | None = None
        """The weight to reach when growing again, after memory has come back; None in the first search."""
        self.wants_full = False
        """Whether splits are to be as few as can be, however fast others may be: because they are not exact."""
        self.untold = 0
        """The weight up to which trials do not tell how fast larger ones are: their times are of another load."""
        self.doubts_plateau = False
        """Whether timed windows have shown that trials stopped to gain too early."""

    def pieces(self, num_samples: int, lengths: Lengths, planned: Callable[[], int]) -> Iterator[Piece]:
        """Choose trials while there is room for one, then cut what is left of a window.

        A trial is measured with the window's gradients in memory, as most micro-batches run: so it is never a window's
        first micro-batch, unless it is its only one.

        Args:
            num_samples: the samples of the window.
            lengths: how long they are.
            planned: () -> the weight that plans are made of, as it is by then.
        """
        position, left, ran = 0, lengths, {self.warm}
        # What became of a piece comes in while this waits at its yield. It may end the search, or change what is worth
        # a trial next, what a sample weighs, and the weight of plans: nothing is kept from before it but the position.
        while self.is_on and (remaining := num_samples - position):
            trial = self.trial_for(num_samples, left)
            # Kernels are loaded and chosen in the first run of a size, with workspaces that are not kept. The second
            # run is the next micro-batch where there is room for it, else one of the next window. Samples that differ
            # in length make each micro-batch a new size: to wait for a second one would take for ever.
            is_new = self._warms_up and lengths is None and trial not in ran
            if trial is not None and is_new:
                trial = self._in_rest(trial, remaining)
                is_new = trial not in ran
            if trial is None or not self.has_room(trial, remaining):
                break
            is_first = position == 0 and trial < num_samples
            size = trial
            # What is not measured anyway may come first.
            if is_first and not is_new:
                first_planned = self._cutter.sizes(num_samples, lengths, planned())[0]
                size = self.first_size(num_samples, lengths, trial, first_planned)
            if is_new:
                ran.add(size)
                self.warm = size
            yield Piece(position, size, length_at(lengths, position), not (is_first or is_new))
            position += size
            left = None if lengths is None else lengths[position:]
        if position == num_samples:
            return
        counted = self._cutter.lengths_that_count(lengths)
        for size in self._cutter.sizes(num_samples - position, left, planned()):
            # Much longer samples than any before are a trial too, although nothing is searched.
            is_new = position > 0 and counted is not None and self._cutter.history.is_new(counted[position])
            yield Piece(position, size, length_at(lengths, position), is_new)
            position += size

    def is_run_cold(self, micro_batch: int) -> bool:
        """Take it that a trial was the first run of its size; return whether it is to be run again, which is once."""
        if micro_batch in self._cold:
            return False
        self._cold.add(micro_batch)
        self.warm = micro_batch  # should it be all of a window, that this went well is not yet what is known of it
        return True

    def trial_for(self, num_samples: int, lengths: Lengths = None) -> int | None:
        """Return the next size worth a trial for such windows, if any; where lengths differ, of the first samples.

        Only sizes that make a better plan are worth an out-of-memory error: a window of 256 takes three micro-batches
        with 86 samples in each and with 127.
        """
        each = self._cutter.each(lengths)
        history, smallest = self._cutter.history, self._cutter.smallest
        fits, _ = history.bounds
        # Growth needs no such end: its goal is no higher than what is enough.
        if fits and self.goal is None and self.is_enough(fits):
            return num_samples if self.surely_fits_whole(num_samples, lengths) else None
        weight = next_trial(
            history.in_weights,
            limit_bytes=self._limits.target_bytes,
            ceiling=min(self._cutter.heaviest(num_samples, each), self.goal or ENDLESS),
            smallest=smallest * each,
            first=self._first_weight(num_samples, each),
            growth=self._growth(fits),
            prior=history.prior,
        )
        whole = num_samples if self._may_fit_whole(num_samples, lengths) else None
        if weight is None:
            return whole
        if lengths is None:
            weight = max(weight, self._surely(fits, num_samples))
        # Of samples that are alike, the size that the plan with as many micro-batches would have anyway.
        size = weight // each
        if lengths is None and fits:
            size = self._cutter.cut(num_samples, weight)[0]
        elif are_alike(lengths) and fits and size >= min(smallest, num_samples):
            equal = self._cutter.cut(num_samples, weight // each)[0]
            # Of a padded window it may be no gain, where one of other lengths has room for more.
            size = equal if equal * each > fits else size
        # Rounded to whole samples it may weigh no more than what has fitted, or be fewer than the smallest.
        return size if size * each > fits and size >= min(smallest, num_samples) else whole

    def _may_fit_whole(self, num_samples: int, lengths: Lengths) -> bool:
        """Return whether a window may fit at once that would not beside its gradients, as other micro-batches run."""
        model = self._model_of_whole(num_samples, lengths)
        return model is not None and model.predict(num_samples) - self.gradient_bytes <= self._limits.target_bytes

    def surely_fits_whole(self, num_samples: int, lengths: Lengths) -> bool:
        """Return whether a window fits at once even if its samples take twice as much as is predicted."""
        # An earlier run has timed windows; trials are short, and other work that slows one of them ends the search.
        model = None if self.known else self._model_of_whole(num_samples, lengths)
        fits = self._cutter.history.bounds[0]
        if model is None or num_samples > FAR * fits:
            return False
        # Trials that all take the same say nothing of what a sample adds: at most as much as all that there is then.
        is_told = model.predict(fits) > TOLD * model.predict(1)
        most = model.predict(2 * num_samples) if is_told else model.predict(fits) * num_samples / fits
        return most <= self._limits.target_bytes

    def _model_of_whole(self, num_samples: int, lengths: Lengths) -> MemoryModel | None:
        """Return the memory model if it alone decides whether a window is tried at once: in the first search."""
        fits, fails = self._cutter.history.bounds
        is_open = self.goal is None and fails is None and fits < num_samples <= self._cutter.heaviest(num_samples, 1)
        return self._cutter.history.model if is_open and lengths is None else None

    def may_try(self, num_samples: int, lengths: Lengths, planned: int) -> bool:
        """Return whether such a window has room for a trial behind its first micro-batch, of the longest samples.

        Where there is a trial to be made, ``planned`` is the first size of the window's plan.
        """
        trial = self.trial_for(num_samples, lengths)
        # A trial that is the whole window, or that comes first in it, needs no room behind another piece.
        if trial is None or trial == num_samples or self._comes_first(trial, num_samples):
            return trial is not None
        first = self.first_size(num_samples, lengths, trial, planned)
        left = num_samples - first
        if lengths is not None:  # the samples behind it are shorter, and more of them make a trial
            trial = self.trial_for(num_samples, lengths[first:]) if left else None
        return trial is not None and self.has_room(trial, left)

    def first_size(self, num_samples: int, lengths: Lengths, trial: int, planned: int) -> int:
        """Return the first size of a window that goes on with a trial: a planned one, which is known to fit.

        It is the trial itself where the window has no room for both.
        """
        has_no_room = are_alike(lengths) and not self.has_room(trial, num_samples - planned)
        if self._comes_first(trial, num_samples) or has_no_room:
            return trial
        return planned

    def _comes_first(self, trial: int, num_samples: int) -> bool:
        """Return whether a window is to begin with its trial, unmeasured, before that is made."""
        # Where few sizes are tried each costs so much that no window is to begin with one more. But one that has been
        # run before, and has no room to be run twice, is never measured if it comes first in each window.
        return self.few_sizes and (trial != self.warm or self.has_room(trial, num_samples - trial))

    def has_room(self, trial: int, left: int) -> bool:
        """Return whether a trial leaves nothing of a window, or enough for another micro-batch."""
        # What is left between the two would be a micro-batch of fewer samples than the smallest.
        return trial == left or (trial < left and left - trial >= self._cutter.smallest)

    def is_enough(self, weight: int) -> bool:
        """Return whether larger ones are known to be no faster."""
        history = self._cutter.history
        if self.wants_full:
            return False
        # An earlier run has timed larger ones than were tried so far: what it says reaches further than a plateau.
        if self.known > weight and history.prior is not None:
            fastest = self._fastest_up_to(self.known)
            if fastest is not None:
                return fastest <= weight
        return not self.doubts_plateau and self.has_plateaued()

    def has_plateaued(self) -> bool:
        """Return whether trials stopped to gain as they grew: see ``search.has_plateaued``."""
        return has_plateaued([t for t in self._cutter.history.in_weights if t.micro_batch > self.untold])

    def reason(self, planned: int, largest: int) -> str:
        """Return why plans of full windows have no larger micro-batches, for people to read.

        Args:
            planned: the weight that plans are made of.
            largest: the largest weight that fits.
        """
        num_samples, lengths = self._cutter.full_window
        if not num_samples or len(self._cutter.sizes(num_samples, lengths, planned)) == 1:
            return "the full batch fits"
        # Either windows were timed, and fewer micro-batches took longer; or trials gained nothing any more.
        of_full = self._cutter.weights_of_full
        if len(of_full(planned)) > len(of_full(largest)) or self.is_enough(largest):
            return NO_FASTER
        if largest >= self._cutter.ceiling * self._cutter.each(lengths):
            return "max_micro_batch is reached"
        history = self._cutter.history
        model = history.model
        # Among samples that differ in length the search may end although twice the weight would fit: see ``may_try``.
        may_fit = history.bounds[1] is None
        if may_fit and model is not None:
            may_fit = model.predict(2 * largest) <= self._limits.target_bytes
        return NOT_TRIED if lengths is not None and may_fit else "larger micro-batches do not fit"

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        state = {
            "searching": self.is_on,
            "_known": self.known,
            "_is_ragged": self.has_lengths,
            "_doubts_plateau": self.doubts_plateau,
            "_goal": self.goal,
        }
        return state | ({"_warm": self.warm} if self.warm else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        self.is_on, self.known, self.has_lengths = state["searching"], state["_known"], state["_is_ragged"]
        self.doubts_plateau, self.goal = state["_doubts_plateau"], state["_goal"]
        self.warm = state.get("_warm", 0)

    def _first_weight(self, num_samples: int, each: int) -> int | None:
        """Return the weight to begin a search with; None to begin with that of the smallest size."""
        prior = self._cutter.history.prior
        # Where an earlier run ended; or less, if there is less memory now, or if its fastest plan had smaller ones.
        if self.known and prior is not None:
            known = self._fastest_up_to(self.known) or self.known
            return int(min(known, prior.largest_within(self._limits.target_bytes)))
        # At most half of a window, so that there is room for a second trial in it: one alone gives no model.
        return min(FEW_SIZES_FIRST, num_samples // 2) * each if self.few_sizes else None

    def _surely(self, fits: int, num_samples: int) -> int:
        """Return the largest size that surely fits, by where the device's memory stands without a sample; else 0."""
        history = self._cutter.history
        # Each trial costs as much as a window does on a device that one sample keeps as busy as many: where what a
        # sample takes is told from what is there without one, there are no steps by twos.
        known = None if self.start_bytes is None else reach(history.in_weights, start_bytes=self.start_bytes)
        if known is None or history.bounds[1] is not None:
            return 0
        most = min(self._cutter.heaviest(num_samples, 1), self.goal or ENDLESS, FAR * fits)
        return int(min(known.surely(self._limits.target_bytes), most))

    def _in_rest(self, trial: int, left: int) -> int:
        """Return the size to try in what is left of a window that has no room for it to be run twice.

        What is left would else be cut into as many micro-batches as its last success takes.
        """
        if not self._warms_up or self.few_sizes or left >= 2 * trial:
            return trial
        size = self._cutter.cut(left, trial)[0]
        return size if size > self._cutter.history.bounds[0] else trial

    def _growth(self, fits: int) -> int:
        """Return how many times as large as the largest success a trial may be."""
        model = self._cutter.history.model
        if model is None:
            return FEW_SIZES_GROWTH if self.few_sizes else 2
        if not (self.few_sizes or self.has_lengths):  # a whole window may take more than its two halves
            return 2
        # A model is trusted further where it would do no harm if samples cost twice as much.
        return FEW_SIZES_GROWTH if 2 * model.predict(FEW_SIZES_GROWTH * fits) <= self._limits.target_bytes else 2
