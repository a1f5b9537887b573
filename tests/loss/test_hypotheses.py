"""Each hypothesis has words, and those of several terms say what each term is."""

from __future__ import annotations

import pytest

from autoaccum.loss.hypotheses import SUMS, WORDS, in_words, is_stated, kinds_in, of_terms, with_none, with_ones


def test_each_has_words_and_sums_are_told_from_means() -> None:
    assert set(WORDS) == {"num_items", "items", "samples", "sum", "sum and penalties"}
    assert set(SUMS) == {"sum", "sum and penalties"}
    assert in_words("items") == "a mean over its items"


def test_the_kinds_of_terms_come_back_by_their_names_in_their_order() -> None:
    hypothesis = of_terms({"words = all": "items or none", "0": "sum"})
    assert list((kinds_in(hypothesis) or {}).items()) == [("words = all", "items or none"), ("0", "sum")]
    assert kinds_in("items") is None
    assert kinds_in(None) is None


def test_counts_are_kept_from_0_of_means_alone() -> None:
    kinds = {"a": "items", "b": "items or none", "c": "items or one", "d": "samples", "e": "sum"}
    hypothesis = of_terms(kinds)  # type: ignore[arg-type]
    assert kinds_in(with_none(hypothesis, "acdex")) == kinds | {"a": "items or none"}
    assert kinds_in(with_ones(hypothesis)) == kinds | {"b": "items or one"}
    assert kinds_in(with_ones(hypothesis, "abex")) == kinds | {
        "a": "items or one", "b": "items or one", "c": "items or none",
    }  # fmt: skip
    assert with_none("items", "a") == with_ones("items") == "items"


def test_terms_are_told_by_how_many_there_are_of_each_kind() -> None:
    assert in_words(of_terms({"a": "items"})) == "several terms: a mean over items of its own"
    every = of_terms({"a": "items", "b": "items", "c": "samples", "d": "sum"})
    assert in_words(every) == (
        "several terms: 2 means over items of their own, a mean over samples and a sum over samples"
    )


@pytest.mark.parametrize(
    ("hypothesis", "reduction", "stated"),
    [
        ("items", None, True),
        ("items", "mean", True),
        ("sum", "mean", False),
        ("sum and penalties", "sum", True),
        ("samples", "sum", False),
        (of_terms({"a": "items", "b": "sum"}), {"a": "mean", "b": "sum"}, True),
        (of_terms({"a": "sum", "b": "sum"}), {"a": "mean", "b": "sum"}, False),
        (of_terms({"a": "items", "b": "samples"}), "mean", True),
        ("items", {"a": "mean"}, False),
    ],
)
def test_what_a_user_states_leaves_some(hypothesis: str, reduction: object, stated: bool) -> None:
    assert is_stated(hypothesis, reduction) is stated  # type: ignore[arg-type]
