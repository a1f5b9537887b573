"""The ranks that train each trial of a sweep together: the first asks the study, and tells the others what is tried.

::

    rank 0                                  other ranks
    a trial is asked of the study
    announce(order)                         follow: hear the order
    train(run)                              train(run)          a fit of all of them
    tell the study how it has ended
    end(study)                              return a copy of the study

Only the first rank touches the study, its storage, and the directories of trials.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import optuna
import torch
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from autoaccum.errors import ArgumentError, RankError
from autoaccum.ranks.group import Group, join
from autoaccum.ranks.launcher import is_launched, own_device
from autoaccum.sweeps.options import Arguments
from autoaccum.training.alone import refuse_strangers

T = TypeVar("T")
EndOf = Callable[[BaseException], Arguments | None]
"""(error) -> what is noted of a trial that ends by it; None where the sweep does."""


class Order(NamedTuple):
    """A trial that all ranks are to train."""

    number: int
    params: Arguments
    """What the study has chosen for it, by name."""
    seed: int
    folder: Path
    resume: Any


class Outcome(NamedTuple):
    """A study at the end of its sweep, as it is sent to ranks that have no storage."""

    name: str
    directions: list[StudyDirection]
    attributes: Arguments
    trials: list[FrozenTrial]


class EndedElsewhere(Exception):
    """A trial that another rank has ended, and no sweep."""

    def __init__(self, noted: Arguments) -> None:
        self.noted = noted
        super().__init__("another rank has ended this trial")


class Crew:
    """One of the ranks."""

    def __init__(self, device: torch.device) -> None:
        """Join the others."""
        self._device = device
        join(device)  # which decides who speaks
        # Of its own, and not that of fits: an error in a fit is the end of that group, and may be no more than the end
        # of a trial.
        self._group = Group(device)

    @property
    def is_first(self) -> bool:
        """Return whether this is the rank that asks the study."""
        return self._group.is_first

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell other ranks of the error that ends what is within it."""
        try:
            yield
        except BaseException as error:
            self._group.fail(error)
            raise

    def announce(self, order: Order) -> None:
        """Have the other ranks train a trial, which this one then trains, too."""
        self._group.exchange(order)

    def train(self, run: Callable[[], T], end_of: EndOf) -> T:
        """Return what a function returns that trains on all ranks, once all of them have come to its end.

        Raises:
            EndedElsewhere: another rank has ended the trial.
            Exception: what has ended it here.
        """
        # That of the fit to come: a new one, where the trial before was ended by an error.
        group = join(self._device)
        assert group is not None
        try:
            found = run()
            group.exchange(None)  # after which nothing of it can fail on another rank
        except BaseException as error:
            # Of one before the fit, as in a recipe, nobody has heard yet.
            group.fail(error)
            if not isinstance(error, Exception):  # Ctrl-C: this process ends, and says so in the next exchange
                raise
            self._raise_elsewhere(error, end_of)
            raise
        self._group.exchange(None)
        return found

    def _raise_elsewhere(self, error: Exception, end_of: EndOf) -> None:
        """Raise for a rank that has only heard of an error what it was, where that ends the trial alone."""
        is_heard = isinstance(error, RankError)
        told = self._group.exchange((is_heard, None if is_heard else end_of(error)))
        # Several may have failed at once, each before it has heard of the others: one that ends the sweep decides.
        own = [noted for heard, noted in told if not heard]
        tame = [noted for noted in own if noted is not None]
        if is_heard and tame and len(tame) == len(own):
            raise EndedElsewhere(tame[0]) from error

    def follow(self, train: Callable[[Order], None], end_of: EndOf) -> optuna.Study:
        """Train what the first rank announces, until there is nothing left; return a copy of its study."""
        heard: Any
        while isinstance(heard := self._group.exchange(None)[0], Order):
            try:
                self.train(partial(train, heard), end_of)
            except Exception as error:
                if not isinstance(error, EndedElsewhere) and end_of(error) is None:
                    raise
            gc.collect()  # as after each trial on the first one
        return _copied(heard)

    def end(self, study: optuna.Study) -> None:
        """Let the other ranks return, with what the study has come to."""
        # As values, and not as the study: its storage is a file or a server that others need not reach.
        facts = study.study_name, study.directions, dict(study.user_attrs), study.get_trials()
        self._group.exchange(Outcome(*facts))


def crew_of(ranks: object, jobs: int) -> Crew | None:
    """Return the ranks that sweep together; None where this process is alone.

    Raises:
        ArgumentError: there are several processes that cannot find each other, or each is to start others.
    """
    if ranks != "together" or not is_launched():
        refuse_strangers(ranks)
        return None
    if jobs > 1:
        cure = (
            "Ranks train one trial after the other, together. Start the same command once more for others beside them."
        )
        raise ArgumentError("jobs", jobs, "1 where there are several ranks", cure)
    return Crew(torch.device(own_device() or "cpu"))


def _copied(outcome: Outcome) -> optuna.Study:
    """Return a study in memory that holds the same."""
    study = optuna.create_study(study_name=outcome.name, directions=outcome.directions)
    for name, value in outcome.attributes.items():
        study.set_user_attr(name, value)
    study.add_trials(outcome.trials)
    return study
