"""Types of what measurements of the gradient find: outcome, decision, verdict."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoaccum.step.terms import Hypothesis

Part = tuple[int, ...]
"""Samples of the whole, by their index in it."""
Cut = tuple[Part, ...]
"""The parts that the whole is cut into."""
FOREIGN = "it draws from Python's or NumPy's generator, other numbers in each part"
"""Why nothing can be measured of what no row of a draw can be given to."""


class ZeroGradientError(Exception):
    """A gradient of 0, by which nothing can be told."""


class NotFiniteError(Exception):
    """A loss of all samples that is not finite, which no cut can be compared with."""


@dataclass(kw_only=True)
class Outcome:
    """What came of one hypothesis."""

    hypothesis: Hypothesis | None
    """The hypothesis; None where each micro-batch was taken for what its loss shows."""
    error: float
    """Relative error of the worst cut."""
    tensor: str | None
    """The worst tensor's name in it."""
    errors: tuple[float, ...] = ()
    """Of each cut."""
    is_vacuous: bool = False
    """Whether in every cut a single part has a loss other than 0, so that any weights would do."""
    tensors: dict[str, float] = field(default_factory=dict)
    """The error of each tensor in the worst cut, by its name."""


@dataclass(kw_only=True)
class Decision:
    """What a measurement has shown."""

    hypothesis: Hypothesis
    """The first hypothesis that passed; the one that came first where none did."""
    passed: bool
    """Whether it did."""
    error: float
    """Relative error of its worst cut."""
    tensor: str | None
    """The name of the worst tensor in that."""
    errors: tuple[float, ...]
    """Of each cut that was run."""
    cuts: tuple[Cut, ...]
    """The cuts."""
    outcomes: tuple[Outcome, ...]
    """Those of the other hypotheses that were measured."""
    tensors: dict[str, float] = field(default_factory=dict)
    """The error of each tensor in the worst cut, by its name."""
    counts_samples: bool
    """Whether graphs show that each part counts as its samples do."""
    is_vacuous: bool = False
    """Whether nothing is told by that, for a single part of each cut has a loss other than 0."""
    smallest: int = 1
    """The fewest samples of a micro-batch whose loss can be computed."""
    hides_draws: bool = False
    """Whether what is drawn was not found to be each sample's own: under a constant, say, no order moves a sample."""
    is_foreign: bool = False
    """Whether generators were drawn from whose draws have no rows, so that a failure may be theirs."""

    @classmethod
    def of(cls, outcome: Outcome, *, passed: bool) -> Decision:
        """Return what one hypothesis alone has shown."""
        return cls(
            hypothesis=outcome.hypothesis or "items",
            passed=passed,
            error=outcome.error,
            tensor=outcome.tensor,
            errors=outcome.errors,
            cuts=(),
            outcomes=(),
            tensors=outcome.tensors,
            counts_samples=False,
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a measurement has come to."""

    decision: Decision | None = None
    """What was measured; None where nothing was."""
    left: tuple[str, ...] = ()
    """The names of state that is another after a window that is cut than after a whole one."""
    draws_once: bool = False
    """Whether the parts were given what is drawn once for a batch, and what a run draws for each of them."""
    mixes: bool = False
    """Whether it failed where a collate_fn mixes samples."""
    collates_anew: bool = False
    """Whether the same samples make another batch each time, so that parts were rows of one."""
    unmeasured: str = ""
    """Why nothing was measured; empty where something was."""
    is_passing: bool = False
    """Whether that may be otherwise in the next window, as of a gradient of 0 or a loss that is not finite."""
    ran_out: bool = False
    """Whether that was for want of memory, of which there may be more once the search for sizes is over."""
    failed: Decision | None = None
    """What failed by the hypothesis that came first, where others pass for too few samples to count."""
    chosen: tuple[int, ...] = ()
    """The positions of the samples that were measured."""
    tolerance: float = 0.0
    """Up to which error gradients are the same."""
    trained: frozenset[int] = frozenset()
    """The ids of the parameters that have a gradient."""

    @property
    def samples(self) -> int:
        """Return how many samples were measured."""
        return len(self.chosen)

    def failing(self, decision: Decision) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return for each cut that was run the positions of its samples in their order, and the sizes of its parts."""
        return [
            (tuple(self.chosen[index] for part in cut for index in part), tuple(map(len, cut)))
            for cut, _ in zip(decision.cuts, decision.errors, strict=False)
        ]
