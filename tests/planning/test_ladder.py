"""A run goes down at once and up in its time; a limit that trembles causes a handful of changes."""

from __future__ import annotations

import random

from autoaccum.planning.limits import PATIENCE, Ladder


def looks(ladder: Ladder, limit_bytes: int, times: int) -> int:
    """Return after how many looks it is to go up; ``times`` where after none."""
    return next((look for look in range(times) if ladder.look(limit_bytes)), times)


def test_it_goes_down_one_by_one_and_up_where_the_limit_has_left_what_failed_behind() -> None:
    ladder = Ladder()
    assert not ladder.look(10**9)
    assert ladder.level == 0
    ladder.fall(1000, 1100)
    ladder.fall(1000, 0)
    assert ladder.level == 2
    assert looks(ladder, 1049, 100) == 100, "less than 5 % more than what it failed with"
    assert looks(ladder, 1050, 100) == PATIENCE - 1, "after a calm"
    ladder.rise()
    assert ladder.level == 1
    assert looks(ladder, 1099, 100) == 100, "less than is known to be needed"
    assert looks(ladder, 1100, 100) == PATIENCE - 1
    ladder.rise()
    assert ladder.level == 0
    assert looks(ladder, 10**9, 100) == 100


def test_growth_in_vain_makes_it_wait_for_twice_as_long() -> None:
    ladder = Ladder()
    ladder.fall(1000, 0)
    waited = []
    for _ in range(4):
        waited.append(looks(ladder, 2000, 1000) + 1)
        ladder.rise()
        ladder.fall(1000, 0)
    assert waited == [PATIENCE, 2 * PATIENCE, 4 * PATIENCE, 8 * PATIENCE]


def test_a_jittering_limit_causes_a_handful_of_changes_in_ten_thousand_windows() -> None:
    chance, ladder, changes = random.Random(0), Ladder(), 0
    for _ in range(10_000):
        limit = chance.randrange(900, 1300)
        if ladder.look(limit):
            ladder.rise()
            changes += 1
        if ladder.level == 0 and limit < 1000:
            ladder.fall(limit, 1000)
            changes += 1
    assert ladder.level == 1
    assert 0 < changes < 40


def test_its_state() -> None:
    ladder, other = Ladder(), Ladder()
    ladder.fall(1000, 0)
    ladder.fall(2000, 3000)
    other.load_state_dict(ladder.state_dict())
    assert other.level == 2
    assert other.state_dict() == {"wanted": [1050, 3000]}
    other.give_up()
    assert other.level == 0
    assert not other.look(10**9)
