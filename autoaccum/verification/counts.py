"""Tells what several terms of a loss are by what they count, in parts and in the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoaccum.loss.conclusions import finite, kind_of_term
from autoaccum.loss.hypotheses import KEPT_FROM_0, OVER_ITEMS, Hypothesis, TermKind, kinds_in, of_terms
from autoaccum.loss.terms import Reduction
from autoaccum.verification.comparison import MAY_BE_ROUNDING
from autoaccum.verification.findings import Cut, Part


def by_counts(
    shown: Mapping[Part, Reduction], num_samples: int, cuts: Sequence[Cut], likely: Hypothesis
) -> Hypothesis | None:
    """Return what several terms are by what they count in cuts and in the whole; None where that is not to be seen.

    What the parts of a cut count adds up to what the whole counts, unless the count of some was kept from 0.

    Args:
        shown: what the graphs of the losses of parts, and of the whole, have shown.
        num_samples: those of the whole.
        cuts: the cuts.
        likely: the hypothesis that is held, or comes first.
    """
    # Parts without terms are those whose loss is no number, or which PyTorch counts by itself.
    whole = shown.get(tuple(range(num_samples)))
    parts = [[(len(part), shown[part]) for part in cut if part in shown and shown[part].terms] for cut in cuts]
    parts = [cut for cut in parts if cut]
    likely_kinds = kinds_in(likely) or {}
    if whole is None or not whole.terms or (len(whole.terms) < 2 and not (likely_kinds or whole.constants)):
        return None
    if any(len(r.terms) != len(whole.terms) for cut in parts for _, r in cut):
        return None
    names = list(likely_kinds) if len(likely_kinds) == len(whole.terms) else list(map(str, range(len(whole.terms))))
    # One term after the other: what one of them counts is no matter to the others.
    kinds: dict[str, TermKind] = {}
    for index, (name, term) in enumerate(zip(names, whole.terms, strict=True)):
        columns = [[(size, found.terms[index]) for size, found in cut] for cut in parts]
        everywhere = [entry for column in columns for entry in column] + [(num_samples, term)]
        # The whole is one more micro-batch, and often the only one that differs from the parts in what it counts.
        kind = kind_of_term([size for size, _ in everywhere], [part for _, part in everywhere])
        counts = [abs(finite(part.divisor)) for _, part in everywhere]
        # What is the same in each part, and in the whole, is what a sum was divided by, unless tensors counted it.
        if min(counts) == max(counts) and not any(part.is_counted for _, part in everywhere):
            kind = "sum"
        totals = [sum(abs(finite(part.divisor)) for _, part in column) for column in columns]
        # Rounding of sums of weights is no difference.
        if kind == "items" and any(total > abs(finite(term.divisor)) * (1 + MAY_BE_ROUNDING) for total in totals):
            kind = "items or none"
        # What other samples have shown is not undone by some in which nothing was kept from 0.
        before = likely_kinds.get(name, kind)
        kinds[name] = before if kind in OVER_ITEMS and before in KEPT_FROM_0 else kind
    return of_terms(kinds) if set(kinds.values()) != {"sum"} else None
