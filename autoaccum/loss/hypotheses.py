"""States how the loss of a window may arise from those of its micro-batches: the hypotheses that a run measures.

The gradient of a window is (sum_j w_j g_j) / W, g_j being that of micro-batch j's loss. A hypothesis says what w_j is,
and W. With means over items, w_j counts the items of j, and W is their sum; with sums, w_j = W = 1. Of a loss of
several terms each may have a w_j and a W of its own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, cast

Hypothesis = str
"""A key of ``WORDS``, or what ``of_terms`` returns. num_items: a mean over what the user counts. items: a mean over
what its graph divides by. samples: a mean over samples. sum: a sum over samples. sum and penalties: the same, but terms
of parameters alone stand in it once."""

TermKind = Literal["items", "items or none", "items or one", "samples", "sum"]
"""What one of several terms is. items or none: where it is 0, its count was kept from 0, and stands for none. items or
one: where it is not 0 either, the lowest count, 1 mostly, may stand for none, or for less."""

WORDS: dict[str, str] = {
    "num_items": "a mean over what num_items counts",
    "items": "a mean over its items",
    "samples": "a mean over samples",
    "sum": "a sum over samples",
    "sum and penalties": "a sum over samples, plus penalties on parameters",
}
"""What people are told of each."""

SUMS: tuple[Hypothesis, ...] = ("sum", "sum and penalties")
"""Those by which each micro-batch counts once, whatever it holds."""

KEPT_FROM_0: tuple[TermKind, ...] = ("items or none", "items or one")
"""Those whose counts are known to be kept from 0."""
OVER_ITEMS: tuple[TermKind, ...] = ("items", *KEPT_FROM_0)
"""Those that are means over what they count."""

OF_ONE = (None, *WORDS)
"""Those by which a micro-batch has one weight."""
STATED: dict[str, Hypothesis] = {"sum": "sum and penalties"}
"""What a loss is taken for of which the user says so, until it is measured."""
_TERMS = "terms "


def of_terms(kinds: Mapping[str, TermKind]) -> Hypothesis:
    """Return the hypothesis that a loss has several terms of these kinds, each weighed by itself.

    >>> of_terms({"words": "items", "sentences": "samples"})
    'terms {"words": "items", "sentences": "samples"}'
    """
    return _TERMS + json.dumps(kinds)


@lru_cache(maxsize=64)
def kinds_in(hypothesis: Hypothesis | None) -> Mapping[str, TermKind] | None:
    """Return the kinds of the terms that a hypothesis weighs by themselves; None where a loss has one weight."""
    if hypothesis is None or not hypothesis.startswith(_TERMS):
        return None
    return cast(Mapping[str, TermKind], json.loads(hypothesis.removeprefix(_TERMS)))


def with_none(hypothesis: Hypothesis, names: Iterable[str]) -> Hypothesis:
    """Return the same hypothesis of several terms, of which some may count nothing where their count says otherwise."""
    kinds = kinds_in(hypothesis)
    if kinds is None:
        return hypothesis
    none: dict[str, TermKind] = {name: "items or none" for name in names if kinds.get(name) == "items"}
    return of_terms({**kinds, **none})


def with_ones(hypothesis: Hypothesis, names: Iterable[str] | None = None) -> Hypothesis:
    """Return the same hypothesis, by which counts of 1 may stand for none in these terms alone.

    Args:
        hypothesis: of several terms.
        names: those that are not 0 there; all whose counts are kept from 0 where left out.
    """
    kinds = kinds_in(hypothesis)
    if kinds is None:
        return hypothesis
    known = [name for name, kind in kinds.items() if kind in KEPT_FROM_0]
    wanted = [name for name in (known if names is None else names) if kinds.get(name) in OVER_ITEMS]
    ones: dict[str, TermKind] = dict.fromkeys(wanted, "items or one")
    return of_terms({**kinds, **dict.fromkeys(known, "items or none"), **ones})


def is_stated(hypothesis: Hypothesis, reduction: str | Mapping[str, str] | None) -> bool:
    """Return whether a hypothesis is what a user says of a loss: that it is a mean, or a sum, or several of these."""
    if reduction is None:
        return True
    kinds = kinds_in(hypothesis)
    if kinds is None:
        return isinstance(reduction, str) and (hypothesis in SUMS) == (reduction == "sum")
    of_each = dict.fromkeys(kinds, reduction) if isinstance(reduction, str) else reduction
    return all((kind == "sum") == (of_each.get(name) == "sum") for name, kind in kinds.items() if name in of_each)


def in_words(hypothesis: Hypothesis) -> str:
    """Return a hypothesis as people say it.

    >>> in_words(of_terms({"0": "items", "1": "items", "2": "sum"}))
    'several terms: 2 means over items of their own and a sum over samples'
    """
    kinds = kinds_in(hypothesis)
    if kinds is None:
        return WORDS.get(hypothesis, hypothesis)
    counts = Counter(kinds.values())
    said = [_SAID[kind][counts[kind] > 1].format(counts[kind]) for kind in _SAID if counts[kind]]
    return f"several terms: {' and '.join(part for part in (', '.join(said[:-1]), said[-1]) if part)}"


def term_by_term(hypothesis: Hypothesis) -> str:
    """Return a hypothesis as people say it, with what each of several terms is by its name, or by its place.

    >>> term_by_term(of_terms({"0": "items", "1": "sum"})), term_by_term(of_terms({"class": "samples"}))
    ('term 1: mean over its items; term 2: sum over samples', 'class: mean over samples')
    """
    kinds = kinds_in(hypothesis)
    if kinds is None:
        return in_words(hypothesis)
    names = {name: f"term {int(name) + 1}" if name.isdecimal() else name for name in kinds}
    return "; ".join(f"{names[name]}: {_SHORT[kind]}" for name, kind in kinds.items())


_SHORT: dict[TermKind, str] = {
    "items": "mean over its items",
    "items or none": "mean over its items, or none",
    "items or one": "mean over its items, or none, which count as one",
    "samples": "mean over samples",
    "sum": "sum over samples",
}
_SAID: dict[TermKind, tuple[str, str]] = {
    "items": ("a mean over items of its own", "{} means over items of their own"),
    "items or none": ("a mean over items that there may be none of", "{} means over items that there may be none of"),
    "items or one": (
        "a mean over items, none of which may count as one",
        "{} means over items, none of which may count as one",
    ),
    "samples": ("a mean over samples", "{} means over samples"),
    "sum": ("a sum over samples", "{} sums over samples"),
}

Doubt = tuple[str, str]
"""(why micro-batches may not add up to the loss of their window, what to do about it)"""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What the micro-batches of a window, seen together, are."""

    is_sum: bool
    """Whether their sum is divided by what each was, rather than by the total of it."""
    doubt: Doubt | None = None
    """(why they may not add up to the loss of the window, what to do)"""
    kinds: Mapping[str, TermKind] = field(default_factory=dict)
    """What each of several terms is that no one weight does justice to; empty where one does."""


PLAIN_MEAN = Conclusion(is_sum=False)
"""The conclusion for losses whose graph leaves nothing to doubt, as for those whose items a user counts."""
PLAIN_SUM = Conclusion(is_sum=True)
"""The conclusion for losses that were measured to be sums."""
