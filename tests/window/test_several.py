"""What a run knows of the terms of its loss is kept from window to window, and in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoaccum.loss.hypotheses import TermKind, of_terms
from autoaccum.window.several import Several


class Shown:
    """Terms that are what they are said to be."""

    lacks_values = False

    def __init__(self, totals: dict[str, float] | None, used: dict[str, TermKind] | None = None) -> None:
        self.totals, self.used = totals, used or {"0": "items"}

    def kinds(self) -> dict[str, TermKind]:
        return {"0": "items"}

    def used_kinds(self) -> dict[str, TermKind]:
        return self.used

    def true_totals(self, kinds: Mapping[str, TermKind], *, is_wide: bool) -> dict[str, float] | None:
        return self.totals

    def are_known(self, foretold: Mapping[str, float]) -> bool:
        return True

    def counts(self, kinds: Mapping[str, TermKind]) -> dict[str, list[float]]:
        return {}


def wrong(several: Several, terms: Shown, sizes: list[int]) -> bool:
    return several.are_wrong(terms, of_terms({"0": "items"}), sizes, is_wide=True)


def test_totals_that_an_attempt_has_shown_are_those_of_the_next_one_alone() -> None:
    several = Several()
    assert wrong(several, Shown({"0": 5.0}), [1, 2])
    several.begin_attempt()
    assert several.known == {"0": 5.0}
    several.begin_attempt()  # after memory has run out in that
    assert several.known == {}


def test_a_window_in_one_piece_is_never_wrong() -> None:
    assert not wrong(Several(), Shown({"0": 5.0}), [3])


def test_a_window_is_not_run_for_ever() -> None:
    several = Several()
    runs = [wrong(several, Shown({"0": float(number)}), [1, 2]) for number in range(5)]
    assert runs == [True, True, True, False, False]
    assert several.are_unsettled()


def test_what_graphs_propose_holds_until_something_is_measured() -> None:
    several = Several()
    assert several.are_wrong(Shown(None, {"0": "sum"}), None, [1, 2], is_wide=True)
    assert several.kinds(None) == {"0": "items"}
    assert several.kinds("items") is None
    assert several.kinds(of_terms({"a": "sum"})) == {"a": "sum"}


def test_comes_back_from_a_checkpoint() -> None:
    several = Several()
    assert several.state_dict() == {}
    several.proposed, several.watches = {"0": "items"}, True
    again: Any = Several()
    again.load_state_dict(several.state_dict())
    assert (again.proposed, again.watches, again.is_on) == ({"0": "items"}, True, True)


def test_shares_of_ranks_add_up_to_what_is_foretold_of_the_window() -> None:
    several = Several()
    several.hear_foretold([{"a": 2.0, "b": 1.0}, {"a": 3.0}, {}])
    assert several.known == {"a": 5.0, "b": 1.0}
    several.hear_foretold([{"a": 2.0}, None])
    assert several.known == {}, "of one rank's share it could not be told"


def test_with_ranks_totals_hold_after_a_run_without_memory_too() -> None:
    several = Several()
    several.keeps_shown = True
    assert wrong(several, Shown({"0": 5.0}), [1, 2])
    several.begin_attempt()
    several.begin_attempt()
    assert several.known == {"0": 5.0}


def test_what_one_rank_has_met_all_have_met() -> None:
    several = Several()
    several.hear_met([(False, False, False), (True, False, True)])
    assert several.met() == (True, False, True)


def test_what_not_all_ranks_have_seen_is_forgotten() -> None:
    several = Several()
    mark = several.mark()
    assert wrong(several, Shown({"0": 5.0}), [1, 2])
    several.restore(mark)
    several.begin_attempt()
    assert several.known == {}
    assert [wrong(several, Shown({"0": 5.0}), [1, 2]) for _ in range(4)] == [True, True, True, False]
