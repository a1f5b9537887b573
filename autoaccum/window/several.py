"""Keeps what a run knows of the terms of its loss, where they are weighed one by one, from window to window."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from autoaccum.data.base import Window
from autoaccum.loss.conclusions import totals_of
from autoaccum.loss.hypotheses import OVER_ITEMS, STATED, Hypothesis, TermKind, kinds_in
from autoaccum.loss.stated import CountItems, Reducing
from autoaccum.loss.terms import Count, Reduction
from autoaccum.window.kept import InDoubt, Least
from autoaccum.window.totals import Totals, counted_beforehand

CountEach = Callable[[Any], Mapping[str, Count]]
"""(micro-batch) -> how many items each of several losses is a mean over"""
KeptCount = tuple[int, int, str]
"""A count that may be kept from 0: where its micro-batch begins in the window, its samples, the term."""
_MOST_REPEATS = 3
"""Times that a window is run again for its terms: for a count of 0 found late, for their kinds, for their totals."""


class WindowTerms(Protocol):
    """What is asked of the terms of a window, all of whose micro-batches have been added: see ``window.terms``."""

    lacks_values: bool

    def kinds(self) -> dict[str, TermKind]:
        """Return what each term is, as all micro-batches show it together."""

    def used_kinds(self) -> dict[str, TermKind]:
        """Return what each term was taken for."""

    def true_totals(self, kinds: Mapping[str, TermKind], *, is_wide: bool) -> dict[str, float] | None:
        """Return what each mean over items counts, where that is not what it was weighed with."""

    def are_known(self, foretold: Mapping[str, float]) -> bool:
        """Return whether what was foretold is what they were weighed with in the end."""

    def counts(self, kinds: Mapping[str, TermKind]) -> dict[str, list[float]]:
        """Return what each mean over items counts in each micro-batch."""

    def doubtful(self, before: Mapping[str, Least]) -> tuple[list[InDoubt], dict[str, Least]]:
        """Return where terms may count less than graphs show, and the lowest counts."""

    def settle(self, doubts: Sequence[InDoubt], true: Mapping[tuple[int, str], float]) -> list[InDoubt]:
        """Put in what micro-batches truly count where that is known; return where it is not."""


class Several:
    """The terms of the losses of one run, where each has a weight of its own: what they are, and their totals."""

    def __init__(
        self, num_items: CountItems | None = None, reduction: Reducing = None, count: CountEach | None = None
    ) -> None:
        """Begin with one weight for all of a loss, unless the user counts the items of each of several.

        Args:
            num_items: how the user counts.
            reduction: what the user says that the loss is.
            count: counts those of each of several, of a micro-batch.
        """
        self._num_items, self._reduction, self._count = num_items, reduction, count
        self.is_on = counts_by_name = isinstance(num_items, Mapping | list | tuple)
        """Whether there is anything to begin with a window: of most runs there never is."""
        self.proposed: Mapping[str, TermKind] | None = None
        """What terms are, as graphs have shown."""
        self.counts_by_name = counts_by_name
        """Whether the user counts the items of each of several losses; a function may be seen to."""
        self.has_names = False
        """Whether losses were returned by name."""
        self.watches = False
        """Whether the values of terms are to be seen, for graphs keep none."""
        self.learns = True
        """Whether it is worth while to find out what terms count, for there are other windows to come."""
        self.is_unforeseen = False
        """Whether the totals of terms cannot be foretold, so that windows are run twice."""
        self.opens = False
        """Whether this window's are to be weighed by themselves from its first micro-batch on, for later ones were."""
        self.keeps_shown = False
        """Whether totals that a window has shown hold for all of its runs, those after one without memory too."""
        self._totals = Totals()
        self._least: Mapping[str, Least] = {}  # the lowest count of each term, in windows that went well
        self._least_now: Mapping[str, Least] = {}  # the same with those of this window
        self.unlearnt: Callable[[], None] | None = None
        """Learns what the terms of this window have counted, once that is known."""
        self.told: Mapping[KeptCount, float] = {}
        """What micro-batches of this window were measured to count, whose counts may be kept from 0."""
        self._repeats = 0  # of this window, for its terms were weighed wrongly
        self._foretold: dict[str, float] = {}  # totals of this window
        self._has_failed = False  # whether something went wrong when they were to be foretold
        self._shown: dict[str, float] | None = None  # totals that its last attempt has shown
        self.known: Mapping[str, float] = {}
        """Totals that the attempt of now goes by."""

    def kinds(self, hypothesis: Hypothesis | None) -> Mapping[str, TermKind] | None:
        """Return what the terms are that are weighed by themselves; None where a micro-batch has one weight."""
        return self.proposed if hypothesis is None else kinds_in(hypothesis)

    def are_open(self, hypothesis: Hypothesis | None) -> bool:
        """Return whether nothing was measured yet of what several losses add up to."""
        return self._num_items is None and hypothesis in (None, STATED.get(str(self._reduction)))

    def begin(self, window: Window, hypothesis: Hypothesis | None) -> None:
        """Begin a window: foretell what its terms count, as the user counts them where that is said."""
        # An attempt that was not begun by this has shown it already: the first one that has terms at all.
        if self._shown is not None:
            return
        self._repeats, self._foretold, self._has_failed = 0, {}, True
        kinds = self.kinds(hypothesis)
        # A wrong total costs a run of the window, as does none: what fails here, the window itself will tell.
        with suppress(Exception):
            if self.counts_by_name and hypothesis in (None, "num_items") and self._count is not None:
                self._foretold = counted_beforehand(window, self._count)
            elif kinds:
                self._foretold = self._totals.foretell(window, [k for k, kind in kinds.items() if kind in OVER_ITEMS])
            self._has_failed = False
        self.known = self._foretold

    def foretold(self) -> dict[str, float] | None:
        """Return what was foretold of this rank's share of a window; None where that went wrong."""
        return None if self._has_failed else self._foretold

    def hear_foretold(self, told: Sequence[dict[str, float] | None]) -> None:
        """Take what was foretold of the shares of all ranks, which add up to the window."""
        # Where one share is missing the totals are not known, and the window itself will show them.
        names = dict.fromkeys(name for found in told for name in found or {})
        if None in told:
            names = {}
        self._foretold = {name: math.fsum((found or {}).get(name, 0.0) for found in told) for name in names}
        self.known = self._foretold

    def begin_attempt(self) -> None:
        """Begin to run the window, or to run it again."""
        # Totals that a run of this window has shown are those of the next run; if that runs out of memory, they are
        # looked for anew, so that it is no matter to what is computed.
        if self._shown is not None:
            self.known = self._shown
        elif not self.keeps_shown:
            self.known = self._foretold
        self._shown = None

    def propose(self, kinds: Mapping[str, TermKind], reductions: Sequence[Reduction]) -> None:
        """Weigh terms by themselves from here on, as the graphs of a window's micro-batches have shown them."""
        self.proposed, self.watches, self.is_on = dict(kinds), True, True
        self._shown = totals_of(kinds, reductions)

    def are_wrong(
        self, terms: WindowTerms, hypothesis: Hypothesis | None, sizes: Sequence[int], *, is_wide: bool
    ) -> bool:
        """Return whether the window has to be run again, for its terms were weighed wrongly.

        Args:
            terms: those of the window, all of whose micro-batches have been added.
            hypothesis: the one that is held.
            sizes: of the micro-batches.
            is_wide: whether the loss has 64 bits.
        """
        # Of a window in one piece any weight is right.
        if len(sizes) < 2 or self._repeats == _MOST_REPEATS:
            return False
        kinds, is_wrong = terms.kinds(), False
        # What is measured is held for the run; until then each window's own graphs decide, all of them together.
        if hypothesis is None and kinds != terms.used_kinds():
            self.proposed, is_wrong = kinds, True
        # Only the values of terms tell the loss of the window, and which counts were kept from 0.
        if terms.lacks_values and not self.watches:
            self.watches = is_wrong = True
        self._shown = terms.true_totals(kinds, is_wide=is_wide)
        is_wrong = is_wrong or self._shown is not None
        self._repeats += is_wrong
        return is_wrong

    def settle(self, terms: WindowTerms, window: Window | None, sizes: Sequence[int]) -> list[InDoubt]:
        """Find out what terms truly count whose counts may be kept from 0; return where that is still to be measured.

        Args:
            terms: those of the window, all of whose micro-batches have been added.
            window: the samples; None where they cannot be read here.
            sizes: of the micro-batches.
        """
        doubts, self._least_now = terms.doubtful(self._least)
        if not doubts:
            return []
        pieces = list(zip(itertools.accumulate(sizes, initial=0), sizes, strict=False))
        counts, true = terms.counts(terms.kinds()), dict[tuple[int, str], float]()
        for doubt in doubts:
            if (piece := (*pieces[doubt.index], doubt.name)) in self.told:
                true[doubt.index, doubt.name] = self.told[piece]
                counts.setdefault(doubt.name, [0.0] * len(sizes))[doubt.index] = self.told[piece]
        rest = [(doubt.index, doubt.name) for doubt in doubts if (doubt.index, doubt.name) not in true]
        if rest and window is not None and not self.counts_by_name:
            with suppress(Exception):  # what fails here is measured
                true |= self._totals.counts_in_doubt(window, sizes, counts, rest)
        return terms.settle(doubts, true)

    def see(self, least: Mapping[str, Least]) -> None:
        """Take the lowest count of each term for what was seen so far."""
        self._least = least

    def are_unsettled(self) -> bool:
        """Return whether the window was run as often as it may be: its counts are others each time."""
        return self._repeats == _MOST_REPEATS

    def learn(self, terms: WindowTerms, window: Window | None, sizes: Sequence[int], *, waits: bool = False) -> None:
        """Find out what counts as the terms of a window do, unless that was foretold, or it cannot be read here.

        Args:
            terms: those of the window, all of whose micro-batches have been added.
            window: the samples; None where they cannot be read here.
            sizes: of the micro-batches.
            waits: whether it is to be measured what some of them count: till ``confirm`` nothing is learnt.
        """
        self._least = self._least_now or self._least
        if not self.learns or len(sizes) < 2 or terms.are_known(self._foretold):
            return
        counts = terms.counts(terms.kinds())
        self.unlearnt = partial(self._learn, window, sizes, counts) if waits else None
        if not waits:
            self._learn(window, sizes, counts)

    def confirm(self) -> None:
        """Learn what was put off, for nothing speaks against what terms were taken to count; it may be done twice."""
        if self.unlearnt is not None:
            self.unlearnt()
        self.unlearnt = None

    def _learn(self, window: Window | None, sizes: Sequence[int], counts: Mapping[str, Sequence[float]]) -> None:
        # What the user counts was wrong because it could not be counted beforehand: there is nothing to look for.
        if not self.counts_by_name and window is not None:
            # Beside what is known, which ``restore`` may go back to.
            totals = self._totals.copy()
            totals.learn(window, sizes, counts)
            self._totals = totals
        self.is_unforeseen = window is None or any(map(self._totals.has_given_up, counts))

    # Ranks know the same of the terms, or they would decide otherwise: what one has met is told to all of them.

    def met(self) -> tuple[bool, bool, bool]:
        """Return what this rank's micro-batches have shown, before their end is decided."""
        return self.is_on, self.counts_by_name, self.has_names

    def hear_met(self, told: Sequence[tuple[bool, bool, bool]]) -> None:
        """Take what those of all ranks have shown."""
        self.is_on, self.counts_by_name, self.has_names = map(any, zip(*told, strict=True))

    def mark(self) -> dict[str, Any]:
        """Return all that is known, for ``restore``."""
        # What is found out is put in the place of what was known, which stays as it is.
        return dict(vars(self))

    def restore(self, mark: Mapping[str, Any]) -> None:
        """Know what was known then, and no more."""
        vars(self).update(mark)

    def state_dict(self) -> dict[str, Any]:
        """Return what was found out, for a checkpoint; nothing while there is nothing."""
        # Nothing is said of most runs, so that their checkpoints are those of older versions.
        if not (self.watches or self.proposed or self.counts_by_name):
            return {}
        kinds = None if self.proposed is None else dict(self.proposed)
        found = {"kinds": kinds, "watches": self.watches, "totals": self._totals.state_dict()}
        # Which came later.
        least = {"least": {name: tuple(least) for name, least in self._least.items()}} if self._least else {}
        return {"terms": found | least}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        # A run that was begun by an older version had one weight for each micro-batch.
        if "terms" in state:
            self.proposed, self.watches, self.is_on = state["terms"]["kinds"], state["terms"]["watches"], True
            self._totals.load_state_dict(state["terms"]["totals"])
            self._least = {name: Least(*least) for name, least in state["terms"].get("least", {}).items()}
