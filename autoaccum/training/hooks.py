"""The callbacks of a run: how each is called, what they keep with the run, and what ready ones ask of it.

A callback takes ``(record)``, or ``(record, trainer)`` where it says so. One that has ``state_dict`` and
``load_state_dict`` is saved in checkpoints, by its place in the list and its type, and put back where the run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from autoaccum import _checks
from autoaccum.errors import ArgumentError
from autoaccum.events import Notice
from autoaccum.reporting.progress import Teller
from autoaccum.training.options import FitArguments


class Ready:
    """A callback of this package, which refuses what it cannot do before training begins."""

    has_to_be_everywhere = False
    """Whether it changes what is trained or kept, and so has to be the same on all ranks."""
    judges = False
    """Whether it tells which validation is the best."""
    begins_anew = False
    """Whether it could make nothing of what a checkpoint holds of it, for it is of other arguments."""

    def check(self, arguments: FitArguments) -> None:
        """Raise an ``ArgumentError`` where a run of these arguments is none for it."""

    def validating(self) -> Any:
        """Return a context that validations of the run are within."""
        return nullcontext()


class Hooks:
    """The callbacks that a user has passed, in their order."""

    def __init__(self, callbacks: Sequence[Any], arguments: FitArguments | None = None) -> None:
        """Look at each of them once, and let ready ones refuse a run that they are not for.

        Raises:
            ArgumentError: one does.
        """
        self._callbacks = list(callbacks)
        # By identity, for callbacks may compare equal, or not be hashable.
        self.takes_trainer = {id(callback) for callback in callbacks if _checks.takes_trainer(callback)}
        """The identities of those that are called with the trainer too."""
        # Those of the user's own are asked for nothing but to be called: an attribute of theirs may be named like ours.
        self._ready = [callback for callback in callbacks if isinstance(callback, Ready)]
        self._kept = [(place, callback) for place, callback in enumerate(callbacks) if _can_be_saved(callback)]
        self.notices: list[Notice] = []
        """What to say of those that could not be put back as they were saved."""
        # Before training begins, and before anything is moved or allocated for it.
        if arguments is not None:
            for callback in self._ready:
                callback.check(arguments)

    def judge(self) -> Any:
        """Return the one that tells which validation is the best; None where that is the one of the lowest loss.

        Raises:
            ArgumentError: there are several.
        """
        found = [callback for callback in self._ready if callback.judges]
        if len(found) > 1:
            names = ", ".join(type(callback).__name__ for callback in found)
            raise ArgumentError("callbacks", names, "one of them", "A run has one best checkpoint.")
        return found[0] if found else None

    def of_all_ranks(self) -> list[str]:
        """Return the types of those that have to be the same on all ranks, in their order."""
        # By their names, which all ranks can compare: the objects are other ones on each.
        return [type(callback).__name__ for callback in self._ready if callback.has_to_be_everywhere]

    @contextmanager
    def validating(self, teller: Teller | None) -> Iterator[None]:
        """Be in the context that each of them, and what tells of signals, has for validations."""
        # One within the other, and left in the reverse order: each finds the model as it has left it.
        with nullcontext() if teller is None else teller.validating(), ExitStack() as stack:
            for callback in self._ready:
                stack.enter_context(callback.validating())
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return what they keep; nothing where none of them keeps anything."""
        # So that checkpoints of runs without such callbacks are what they were.
        if not self._kept:
            return {}
        return {
            "callbacks": [
                {"place": place, "type": type(callback).__qualname__, "state": callback.state_dict()}
                for place, callback in self._kept
            ]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned; what has no counterpart is left, and told by ``notices``."""
        # By the place, for there may be several of a type, and by the type, for another one could make nothing of it.
        saved = {entry["place"]: entry for entry in state.get("callbacks", ())}
        self.notices = []
        for place, callback in self._kept:
            # What is not put back is told and no error: whoever adds a callback to a run that goes on means to.
            found, kind = saved.get(place), type(callback).__qualname__
            if found is not None and found["type"] == kind:
                del saved[place]
                callback.load_state_dict(found["state"])
                if isinstance(callback, Ready) and callback.begins_anew:
                    self.notices.append(_begins_anew(place, kind, "with another metric or mode"))
            else:
                self.notices.append(_begins_anew(place, kind))
        self.notices += [_is_missing(place, entry["type"]) for place, entry in saved.items()]


def _can_be_saved(callback: Any) -> bool:
    # As PyTorch's own objects say that they have a state; both, for one alone would be of no use.
    return callable(getattr(callback, "state_dict", None)) and callable(getattr(callback, "load_state_dict", None))


def _begins_anew(place: int, kind: str, how: str = "") -> Notice:
    has = f"holds the state of a {kind} {how} at callbacks[{place}]" if how else ""
    return Notice(
        cause=f"The checkpoint {has or f'has nothing of callbacks[{place}], which is of type {kind}'}",
        consequence="It begins anew where the run goes on, which is not what it would be had the run not ended",
        cure="Pass the same callbacks in the same order, new ones last",
    )


def _is_missing(place: int, kind: str) -> Notice:
    return Notice(
        cause=f"The checkpoint holds the state of callbacks[{place}], of type {kind}, and no such callback is there",
        consequence="Its state is dropped",
        cure="Pass the same callbacks in the same order, new ones last",
    )
