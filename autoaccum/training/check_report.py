"""What a check has found, and how people read it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape

from autoaccum.events import Notice
from autoaccum.loss.hypotheses import WORDS

_MOST_TENSORS = 5
"""Tensors that are listed: the worst of them tell where to look."""
_WIDTH = 100
"""Characters of a line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedCut:
    """One way in which the samples were cut."""

    sizes: tuple[int, ...]
    """Samples of each micro-batch."""
    error: float
    """How far its gradient is off that of the whole."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CheckReport:
    """Whether cut windows have the gradient of whole ones, as far as some samples tell.

    Errors are relative: the larger of that of all of the gradient and that of its worst tensor; 1 is as much as the
    gradient itself.
    """

    passed: bool | None
    """Whether they have; None where it could not be measured, and ``notice`` says why."""
    hypothesis: str | None
    """What the loss is (see ``events.Verified``); where none passed, what is the least wrong; None where micro-batches
    are joined, or nothing was measured, as all that follows is then but for the tolerance."""
    error: float | None
    """That of the worst cut."""
    tolerance: float
    """Up to which error gradients are the same; float64 has a tighter one."""
    tensor: str | None
    """The worst tensor's name; None, too, where none is off."""
    samples: int
    """How many were measured."""
    cuts: tuple[CheckedCut, ...]
    """How they were cut, with the error of each."""
    # A mapping has no hash: reports are equal by theirs too, and are hashed without them.
    hypotheses: Mapping[str, float] = field(hash=False)
    """What the loss might be, with the error of the worst cut if it were that; the one that is held comes first."""
    tensors: Mapping[str, float] = field(hash=False)
    """Every parameter by its name, with its error in the worst cut; the worst come first."""
    accumulate: str
    """By which rule a run makes the gradient: ``"weighted"`` or ``"joined"``."""
    reason: str | None
    """Why micro-batches are joined; None where they are weighted."""
    held: float | None
    """Bytes that a joined step holds for backward, its micro-batch excluded, as a fraction of the full batch's."""
    notice: Notice | None
    """What is wrong, what comes of it and what cures it; None where nothing is."""
    seconds: float
    """Wall time that it took."""

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def __repr__(self) -> str:
        return f"<CheckReport: {next(self._lines())}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def _lines(self) -> Iterator[str]:
        if self.passed is None:
            yield "NOT MEASURED: whether split batches have the gradient of the full batch"
        elif self.passed:
            yield "EXACT: split batches have the gradient of the full batch"
        else:
            yield "NOT EXACT: split batches have another gradient than the full batch"
        yield ""
        if self.notice is not None:
            yield from _entry("cause", f"{self.notice.cause}.")
            yield from _entry("consequence", f"{self.notice.consequence}.")
            yield from _entry("cure", f"{self.notice.cure}.")
        if self.passed is None or self.error is None:
            return
        if self.reason is not None:
            yield from _entry("joined", "the loss is computed once, on the outputs of all micro-batches.")
            yield from _entry("reason", f"{self.reason}.")
            yield from _entry("memory", f"{self.held:.0%} of what the full batch holds for backward, and a micro-batch")
        elif self.passed:
            yield from _entry("the loss", WORDS.get(self.hypothesis or "", ""))
        rounding = f"up to {format_error(self.tolerance)} is rounding"
        yield from _entry("error", f"{format_error(self.error)}, relative to the gradient ({rounding})")
        yield from _entry("measured", f"on {self.samples} samples, in {self.seconds:.2g} s")
        sizes = {cut: " + ".join(map(str, cut.sizes)) for cut in self.cuts}
        yield from _table("split into", [(sizes[cut], cut.error) for cut in self.cuts], self.tolerance)
        rows = [(WORDS[name], error) for name, error in self.hypotheses.items()]
        # Of a loss that is exact the others are what it is not.
        yield from _table("if the loss were", rows, self.tolerance, "ruled out" if self.passed else "not exact")
        worst = list(self.tensors.items())
        yield from _table("parameter", worst[:_MOST_TENSORS], self.tolerance)
        if len(worst) > _MOST_TENSORS:
            yield f"  and {len(worst) - _MOST_TENSORS} more, with smaller errors"


def _entry(name: str, text: str) -> list[str]:
    """Return the lines of a text that has a name."""
    return textwrap.wrap(text, _WIDTH, initial_indent=f"  {name:<13}", subsequent_indent=" " * 15)


def _table(title: str, rows: list[tuple[str, float]], tolerance: float, beyond: str = "not exact") -> Iterator[str]:
    """Yield a table of errors, with a word for those beyond what is allowed; nothing where it has no row."""
    if not rows:
        return
    width = max(len(title), *(len(name) for name, _ in rows))
    yield ""
    yield f"  {title:<{width}}  {'error':>8}"
    for name, error in rows:
        yield f"  {name:<{width}}  {format_error(error):>8}{'' if error <= tolerance else f'  {beyond}'}"


def format_error(error: float) -> str:
    """Return an error in few characters.

    >>> format_error(0.0), format_error(3.21e-17), format_error(0.2731), format_error(float("nan"))
    ('0', '3.2e-17', '27 %', 'NaN')
    """
    if math.isnan(error):
        return "NaN"
    # Below a thousandth nobody reads a share; above it nobody reads a power of ten.
    if error < 1e-3 or error >= 100:
        return f"{error:.2g}"
    return f"{error * 100:.2g} %" if error < 0.99 else f"{error * 100:.0f} %"
