"""A rank that is dead or stopped is named to those that wait for it, long before a collective would give up."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from autoaccum.distributed import watch
from autoaccum.distributed.group import join
from autoaccum.distributed.watch import Watch
from autoaccum.errors import RankError
from tests.distributed.launching import Ended, launch
from tests.processes import in_turn

pytestmark = in_turn


def losing(lost: int, collective: str) -> Any:
    group = join(torch.device("cpu"))
    assert group is not None
    p = torch.zeros(10)
    group.summing.prepare([p])
    for _ in range(3):
        group.exchange("there")
    if group.rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            if collective == "a sum":
                group.summing.add_up([p], 1.0)
            elif collective == "the first's":
                group.from_first(lambda: "this")
            else:
                group.exchange("x" * 2000)
    except RankError as error:
        return error.rank, str(error)


@pytest.mark.parametrize(("lost", "collective"), [(0, "an exchange"), (2, "a sum"), (0, "the first's")])
def test_a_rank_that_is_lost_is_named_to_those_that_wait_for_it(lost: int, collective: str) -> None:
    found = launch(losing, 3, lost, collective, lost=lost)
    assert isinstance(found.pop(lost), Ended)
    for rank, text in found:
        assert rank == lost
        assert f"rank {lost} has failed: {watch._GONE}" in text


def waiting_for_one_that_is_busy() -> list[int]:
    watch._EVERY = 0.05
    group = join(torch.device("cpu"))
    assert group is not None
    if group.rank == 1:
        # As C code does that holds Python's lock: none of the rank's own threads runs.
        __import__("ctypes").PyDLL(None).usleep(4_000_000)
    return group.exchange(group.rank)


def test_a_rank_that_is_busy_in_c_is_not_lost() -> None:
    assert launch(waiting_for_one_that_is_busy, 2) == [[0, 1]] * 2


class TestThree:
    def begun(self, monkeypatch: pytest.MonkeyPatch) -> tuple[Watch, Watch, Watch]:
        monkeypatch.setattr(watch, "_EVERY", 0.02)
        found = Watch(), Watch(), Watch()
        for rank, own in enumerate(found):
            own.begin(rank, [each.place for each in found])
        return found

    def test_the_first_that_is_named_stands(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first, second, third = self.begun(monkeypatch)
        second.close()
        while third.lost is None:
            time.sleep(0.01)
        assert first.lost == third.lost == (1, watch._GONE)
        third._call(0, "another reason")
        assert third.lost == (1, watch._GONE)
        for each in (first, second, third):
            each.close()

    def test_who_follows_a_rank_hears_from_it_who_is_lost_before_it_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Watch, "_tell", lambda *_: None)
        first, second, third = self.begun(monkeypatch)
        while not first._callers:
            time.sleep(0.01)
        second.close()
        while first.lost is None:
            time.sleep(0.01)
        first.close()
        while third.lost is None:
            time.sleep(0.01)
        assert third.lost == (1, watch._GONE), "not the first one, which ended later"
        third.close()


def test_others_reach_this_machine_by_the_name_where_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    opened = Watch()
    assert opened.place.host == "localhost"
    opened._port.close()
