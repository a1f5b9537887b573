"""The largest weight to use: it follows the newest trials and the memory, and remembers what was too much."""

from __future__ import annotations

import pytest

from autoaccum.errors import NothingFitsError
from autoaccum.planning.costs import TimeModel, Trial
from autoaccum.planning.cutter import Cutter
from autoaccum.planning.fastest import Fastest
from autoaccum.planning.largest import WORTHWHILE, Largest
from autoaccum.planning.limits import PATIENCE, Limits
from autoaccum.planning.searching import Searching

LIMIT = 1100
"""Room for 100 samples of 10 bytes, beside 100 bytes."""


class Parts:
    """A largest weight with all that it looks at, for windows of 256."""

    def __init__(
        self,
        *,
        learns: bool = True,
        weight: int = 1,
        smallest: int = 1,
        headroom: float = 0.0,
        limit_bytes: int = LIMIT,
    ) -> None:
        self.cutter = Cutter(smallest=smallest, ceiling=256, by_samples=not learns)
        self.cutter.full_window = (256, None)
        self.limits = Limits(limit_bytes, headroom)
        self.fastest = Fastest(self.cutter, lambda: self.largest.weight, lambda: self.largest.reach, few_sizes=False)
        self.search = Searching(self.cutter, self.limits, self.fastest.up_to, is_on=learns, few_sizes=False)
        self.largest = Largest(self.cutter, self.limits, self.search, self.fastest, weight=weight, learns=learns)

    def fit(self, *sizes: int) -> None:
        """Have such micro-batches fit, or as the limit has it; each needs 10 bytes a sample beside 100."""
        for size in sizes:
            self.largest.observe(size, 100 + 10 * size, None, 1)

    def fail(self, size: int) -> None:
        self.largest.record(Trial(micro_batch=size, fits=False))

    def settled(self, *sizes: int) -> Parts:
        """Have these fit, and end the search with nothing to be timed: fewer micro-batches are faster."""
        self.fit(*sizes)
        self.fastest.model = TimeModel(points=((1, 1.0), (100, 1.0)))
        self.largest.end_search()
        return self

    def look(self, times: int, limit_bytes: int, strain: str | None = None) -> list[str]:
        reasons = [self.largest.look(limit_bytes, strain) for _ in range(times)]
        return [reason for reason in reasons if reason is not None]


class TestTrials:
    def test_it_is_the_largest_that_fitted(self) -> None:
        parts = Parts()
        parts.fit(1, 2, 8)
        assert parts.largest.weight == parts.largest.best == 8
        parts.fit(4)
        assert parts.largest.weight == 8

    def test_after_a_failure_it_is_below_that(self) -> None:
        parts = Parts()
        parts.fit(1, 16)
        parts.fail(8)
        assert parts.largest.weight == 1
        assert parts.largest.best == 16, "it ran well once"

    def test_while_nothing_has_fitted_it_is_halved(self) -> None:
        parts = Parts(weight=64)
        parts.fail(64)
        assert parts.largest.weight == 32
        parts.fail(32)
        assert parts.largest.weight == 16
        parts.fail(1)
        assert parts.largest.weight == 1

    def test_what_was_predicted_is_kept_beside_what_came_of_it(self) -> None:
        parts = Parts()
        parts.fit(1, 2, 4)
        assert [trial.predicted_bytes for trial in parts.cutter.history.trials] == [None, None, 140]

    def test_a_trial_that_ran_past_the_target_does_not_fit_and_was_not_refused(self) -> None:
        parts = Parts(headroom=0.5)
        parts.fit(1, 90)
        assert parts.largest.weight == 1
        assert parts.largest.refused_at == 0
        parts.fail(80)
        assert parts.largest.refused_at == LIMIT

    def test_the_lowest_limit_that_refused_anything_is_remembered(self) -> None:
        parts = Parts()
        parts.fail(80)
        parts.limits.heed(900)
        parts.fail(70)
        parts.limits.heed(1000)
        parts.fail(60)
        assert parts.largest.refused_at == 900

    def test_the_smallest_may_use_the_headroom_and_nothing_may_pass_the_limit(self) -> None:
        parts = Parts(headroom=0.9)
        parts.fit(1)
        assert (parts.limits.least_bytes, parts.limits.target_bytes) == (110, 208), "a tenth of what is above it"
        with pytest.raises(NothingFitsError):
            parts.largest.observe(1, LIMIT + 1, None, 1)

    def test_plans_are_made_of_the_fastest_that_fits(self) -> None:
        parts = Parts(weight=50)
        assert parts.fastest.planned() == 50
        parts.fastest.weight = 20
        assert parts.fastest.planned() == 20
        parts.fastest.weight = 80
        assert parts.fastest.planned() == 50


class TestMemory:
    def test_it_gives_way_once_the_limit_is_below_what_plans_need(self) -> None:
        parts = Parts(headroom=0.1).settled(1, 2, 64)
        assert parts.largest.look(750, None) is None, "the headroom is there to be used up"
        assert parts.largest.look(700, None) == "the limit fell to 700 B"
        assert parts.largest.weight == 53, "100 + 53 * 10 is within 630"

    def test_it_gives_way_by_a_factor_that_is_worth_it(self) -> None:
        parts = Parts().settled(1, 2, 64)
        assert parts.largest.look(739, None) == "the limit fell to 739 B"
        assert parts.largest.weight == int(64 / WORTHWHILE)

    def test_a_second_strain_makes_it_give_way(self) -> None:
        parts = Parts().settled(1, 2, 64)
        assert parts.look(1, LIMIT, "strain") == []
        assert parts.look(1, LIMIT, "strain") == ["strain"]
        assert parts.largest.weight == int(64 / WORTHWHILE)

    @pytest.mark.parametrize(("is_enforced", "expected"), [(True, []), (False, ["strain"])])
    def test_of_half_of_what_there_is_it_does_not_give_way_to_a_device_that_refuses_more(
        self, is_enforced: bool, expected: list[str]
    ) -> None:
        parts = Parts().settled(1, 2, 64)
        # So that the model expects less than half of the limit.
        model = parts.cutter.history.model
        assert model is not None
        limit_bytes = 2 * model.predict(64) + 2
        reasons = [parts.largest.look(limit_bytes, "strain", is_enforced=is_enforced) for _ in range(2)]
        assert [reason for reason in reasons if reason is not None] == expected

    def test_in_a_search_strain_is_a_matter_of_course(self) -> None:
        parts = Parts()
        parts.fit(1, 2, 64)
        assert parts.look(5, LIMIT, "strain") == []

    def test_the_smallest_does_not_give_way(self) -> None:
        parts = Parts(smallest=2).settled(2)
        assert parts.look(5, 10, "strain") == []
        assert parts.largest.weight == 2

    def test_sizes_of_the_users_own_do_not_give_way(self) -> None:
        parts = Parts(learns=False, weight=64)
        parts.fit(1, 2)
        assert parts.look(5, 200, "strain") == []
        assert parts.limits.limit_bytes == 200, "but the limit is heeded"

    def test_it_grows_after_a_calm_to_what_the_model_allows(self) -> None:
        parts = Parts(limit_bytes=500).settled(1, 2, 40)
        parts.look(PATIENCE - 1, LIMIT)
        assert not parts.search.is_on
        parts.look(1, LIMIT)
        assert parts.search.is_on
        assert parts.search.goal == 100

    def test_it_does_not_grow_beyond_what_is_known_to_be_enough(self) -> None:
        parts = Parts(limit_bytes=500).settled(1, 2, 40)
        parts.largest.enough = 40
        parts.look(3 * PATIENCE, LIMIT)
        assert not parts.search.is_on

    def test_nor_to_as_many_micro_batches_as_before(self) -> None:
        parts = Parts(limit_bytes=960).settled(1, 2, 86)
        parts.look(3 * PATIENCE, LIMIT)  # 256 in micro-batches of 86 or of 100 are three
        assert not parts.search.is_on

    def test_growth_goes_half_way_to_what_failed_until_the_limit_is_surely_larger(self) -> None:
        parts = Parts(limit_bytes=900).settled(1, 2, 20)
        parts.fail(60)
        parts.look(PATIENCE, 900)
        assert parts.search.goal == 40
        parts.largest.end_search()
        parts.look(2 * PATIENCE, LIMIT)
        assert parts.search.goal == 100

    def test_what_a_window_ran_within_corrects_a_model_that_expects_much_more(self) -> None:
        parts = Parts().settled()
        for size, beside in [(1, 20), (2, 20), (64, 300)]:  # bytes that an allocator holds beside tensors
            parts.largest.observe(size, 100 + 10 * size + beside, None, 1, 100 + 10 * size)
        parts.largest.end_search()
        parts.largest.ran_within((64, 64), None, 900)  # 1,040 were expected: not worth a correction
        parts.largest.ran_within((64, 64), None, 1050)  # nor is more, which an allocator may hold for nothing
        assert len(parts.cutter.history.trials) == 3
        parts.largest.ran_within((30, 64), None, 800)
        assert parts.cutter.history.trials[-1] == Trial(micro_batch=64, fits=True, peak_bytes=800)
        assert parts.largest.look(810, None) is None, "it is known to fit"
        assert parts.largest.weight == 64

    def test_one_miss_ends_growth_and_the_next_waits_twice_as_long(self) -> None:
        parts = Parts(limit_bytes=500).settled(1, 2, 40)
        parts.look(PATIENCE, LIMIT)
        parts.fail(100)
        assert (parts.search.is_on, parts.search.goal, parts.largest.weight) == (False, None, 40)
        parts.look(2 * PATIENCE - 1, LIMIT)
        assert not parts.search.is_on
        parts.look(1, LIMIT)
        assert parts.search.is_on

    def test_growth_that_comes_to_nothing_makes_the_next_wait_too(self) -> None:
        parts = Parts(limit_bytes=500).settled(1, 2, 40)
        parts.look(PATIENCE, LIMIT)
        parts.largest.end_search()
        parts.look(2 * PATIENCE - 1, LIMIT)
        assert not parts.search.is_on

    def test_what_is_shrunk_past_is_forgotten_unless_its_peak_tells_whether_it_fits(self) -> None:
        parts = Parts()
        parts.fit(1, 2, 64)
        parts.largest.record(Trial(micro_batch=70, fits=True))
        parts.limits.heed(500)
        parts.largest.shrink(30)
        assert [(trial.micro_batch, trial.fits) for trial in parts.cutter.history.trials] == [
            (1, True),
            (2, True),
            (64, False),
        ]


class TestPassing:
    """Where nobody but us keeps the limit."""

    def test_two_windows_in_a_row_have_to_pass_the_target(self) -> None:
        parts = Parts().settled(1, 2, 64)
        peaks = [LIMIT + 1, LIMIT, LIMIT + 1, LIMIT + 1]
        assert [parts.largest.passes((64,) * 4, None, peak) for peak in peaks] == [False, False, False, True]
        assert parts.largest.weight == 2
        assert not parts.largest.passes((2,) * 128, None, LIMIT + 1), "it takes two again"

    def test_growth_keeps_away_from_it(self) -> None:
        parts = Parts().settled(1, 2, 64)
        for _ in range(2):
            parts.largest.passes((64,) * 4, None, LIMIT + 1)
        parts.look(PATIENCE, LIMIT)
        assert parts.search.goal == (2 + 64) // 2

    def test_the_smallest_cannot_be_made_smaller(self) -> None:
        parts = Parts(smallest=2).settled(2)
        assert [parts.largest.passes((2,) * 128, None, LIMIT + 1) for _ in range(3)] == [False] * 3


class TestForgetting:
    def test_nothing_remains_of_what_is_in_other_units(self) -> None:
        parts = Parts().settled(1, 2, 64)
        parts.fail(80)
        parts.largest.enough = 64
        parts.largest.forget()
        assert parts.search.is_on
        assert parts.fastest.model is None
        state = parts.largest.state_dict()
        assert (state["_best"], state["_refused"], state["_enough"]) == (0, None, None)

    def test_it_is_saved(self) -> None:
        parts = Parts(limit_bytes=500).settled(1, 2, 40)
        parts.fail(45)
        parts.look(2 * PATIENCE, LIMIT)
        parts.largest.enough = 90
        state = parts.largest.state_dict()
        assert state == {"largest": 40, "_best": 40, "_refused": (45, 500), "_enough": 90, "_grown_from": 40}
        other = Parts()
        other.largest.load_state_dict(state)
        assert other.largest.state_dict() == state
