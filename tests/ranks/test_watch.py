"""A rank that is dead or stopped is named to those that wait for it, long before a collective would give up."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
import torch

from autoaccum.errors import RankError
from autoaccum.ranks import watch
from autoaccum.ranks.group import join
from autoaccum.ranks.watch import Watch
from tests.processes import in_turn
from tests.ranks.launching import Ended, launch

pytestmark = in_turn


def losing(lost: int, how: signal.Signals, collective: str) -> Any:
    group = join(torch.device("cpu"))
    assert group is not None
    p = torch.zeros(10)
    group.summing.prepare([p])
    for _ in range(3):
        group.exchange("there")
    if group.rank == lost:
        os.kill(os.getpid(), how)
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


@pytest.mark.parametrize(
    ("lost", "how", "collective"),
    [
        (0, signal.SIGKILL, "an exchange"),
        (2, signal.SIGSTOP, "a sum"),
        (0, signal.SIGSTOP, "the first's"),
    ],
)
def test_a_rank_that_is_lost_is_named_to_those_that_wait_for_it(
    lost: int, how: signal.Signals, collective: str
) -> None:
    found = launch(losing, 3, lost, how, collective, lost=lost)
    assert isinstance(found.pop(lost), Ended)
    said = watch._GONE if how == signal.SIGKILL else watch._STOPPED
    for rank, text in found:
        assert rank == lost
        assert f"rank {lost} has failed: {said}" in text


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
    """Of three ranks, of which the second is another process."""

    @pytest.fixture(autouse=True)
    def other(self) -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            self.process = process
            yield process
            with suppress(ProcessLookupError):
                process.kill()

    def begun(self, monkeypatch: pytest.MonkeyPatch) -> tuple[Watch, Watch, Watch]:
        monkeypatch.setattr(watch, "_EVERY", 0.02)
        first, second, third = Watch(), Watch(), Watch()
        began = psutil.Process(self.process.pid).create_time()
        places = [first.place, watch.Place("127.0.0.1", second.place.port, self.process.pid, began), third.place]
        for rank, own in enumerate((first, second, third)):
            own.begin(rank, places)
        return first, second, third

    def test_one_that_is_stopped_is_told_to_those_that_do_not_look_at_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first, second, third = self.begun(monkeypatch)
        assert [[other for other, each in own._followed.items() if each.looks] for own in (first, third)] == [[1], [0]]
        time.sleep(0.1)
        assert first.lost is third.lost is None
        self.process.send_signal(signal.SIGSTOP)
        while third.lost is None:
            time.sleep(0.01)
        assert first.lost == third.lost == (1, watch._STOPPED)
        for each in (first, second, third):
            each.close()

    def test_one_that_goes_on_in_time_is_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(watch, "_LOOKS", 10**6)
        first, second, third = self.begun(monkeypatch)
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        self.process.send_signal(signal.SIGCONT)
        assert first.lost is third.lost is None
        for each in (first, second, third):
            each.close()

    def test_the_first_that_is_named_stands(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first, second, third = self.begun(monkeypatch)
        second.close()
        while third.lost is None:
            time.sleep(0.01)
        assert first.lost == third.lost == (1, watch._GONE)
        third._call(0, watch._STOPPED)
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


class TestMeeting:
    """The first of three ranks, which does not know yet where the third is; the second is another process."""

    @pytest.fixture
    def opened(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Watch, Watch]]:
        monkeypatch.setattr(watch, "_EVERY", 0.02)
        both = Watch(), Watch()
        yield both
        for each in both:
            each.close()

    def test_one_that_ends_before_all_are_there_is_lost(self, opened: tuple[Watch, Watch]) -> None:
        first, second = opened
        place = second.place
        second.close()
        first.meet(0, 1, place)
        second._port.close()
        while first.lost is None:
            time.sleep(0.01)
        assert first.lost == (1, watch._GONE)
        assert not first.has_begun

    def test_one_that_comes_when_another_is_lost_is_told(self, opened: tuple[Watch, Watch]) -> None:
        first, second = opened
        second.meet(1, 0, first.place)
        first._lost = 2, watch._GONE
        first.meet(0, 1, second.place)
        while second.lost is None:
            time.sleep(0.01)
        assert second.lost == (2, watch._GONE)

    def test_one_that_had_ended_before_may_be_another_than_the_one_that_comes(
        self, opened: tuple[Watch, Watch]
    ) -> None:
        first, second = opened
        with socket.create_server(("127.0.0.1", 0)) as gone:
            stale = watch.Place("127.0.0.1", gone.getsockname()[1], 1, 0.0)
        first.meet(0, 1, stale, may_have_ended=True)
        time.sleep(0.1)
        first.meet(0, 1, second.place, may_have_ended=True)
        second.meet(1, 0, first.place)
        time.sleep(0.1)
        assert first.lost is second.lost is None
        for rank, own in enumerate(opened):
            own.begin(rank, [first.place, second.place])
        time.sleep(0.1)
        assert first.lost is second.lost is None, "connections that are held no more are closed by whoever made them"
        assert first.has_begun


def test_a_process_of_the_same_number_elsewhere_is_not_taken_for_it() -> None:
    opened = Watch()
    own = opened.place
    opened._port.close()
    assert watch._process(own) is not None
    assert watch._process(watch.Place("elsewhere", 1, own.pid, own.began + 1)) is None


def test_others_reach_this_machine_by_the_name_where_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    opened = Watch()
    assert opened.place.host == "localhost"
    opened._port.close()
