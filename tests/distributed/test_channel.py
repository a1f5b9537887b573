"""Collectives that end, and processes that end with one that does not."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from autoaccum.distributed import channel
from autoaccum.distributed.channel import Channel, as_tensor
from autoaccum.distributed.group import join
from autoaccum.errors import RankError
from tests.distributed.launching import Ended, launch
from tests.processes import in_turn

pytestmark = in_turn


def test_a_rank_that_has_left_what_others_are_in_speaks_no_more() -> None:
    """As by Ctrl-C: what it told would be taken for what they are in."""
    left = Channel.__new__(Channel)
    left.is_over = False
    with pytest.raises(KeyboardInterrupt), left._failing():
        raise KeyboardInterrupt
    assert left.is_over


def test_bytes_are_cut_or_filled_up_to_the_size() -> None:
    assert as_tensor(b"abc", 2).tolist() == [97, 98]
    assert as_tensor(b"abc", 5).tolist() == [97, 98, 99, 0, 0]


def counted() -> tuple[int, int, list[bytes]]:
    group = join(torch.device("cpu"))
    assert group is not None
    before = group.channel.num_collectives, group.channel.num_bytes
    found = group.channel.gather(b"rank %d" % group.rank)
    group.channel.begin_sum(torch.ones(4))()
    after = group.channel.num_collectives, group.channel.num_bytes
    return after[0] - before[0], after[1] - before[1], found


def test_what_is_sent_is_counted() -> None:
    assert launch(counted, 2) == [(2, 2**12 + 16, [b"rank 0", b"rank 1"])] * 2


def gathered() -> bool:
    group = join(torch.device("cpu"))
    assert group is not None
    for lengths in ((0, 0, 0), (1, 0, 5), (4087, 4088, 0), (4089, 0, 1), (7, 3_000_000, 4088)):
        told = [bytes([rank]) * length for rank, length in enumerate(lengths)]
        if group.channel.gather(told[group.rank]) != told:
            return False
    return True


def test_all_hear_all_in_the_order_of_their_numbers_however_long_it_is() -> None:
    assert launch(gathered, 3) == [True] * 3


def unmet() -> str:
    """Wait for a rank that never comes."""
    channel._TO_COME = datetime.timedelta(seconds=1)
    if os.environ["RANK"] == "1":
        return ""
    with pytest.raises(RankError) as caught:
        join(torch.device("cpu"))
    return str(caught.value)


def test_a_rank_that_never_comes_is_waited_for_for_so_long() -> None:
    assert launch(unmet, 2)[0].startswith("another rank has ended: not all ranks have met")


def losing(lost: int, moment: str) -> Any:
    """Kill a rank; return how another one hears of it, and after how many seconds."""
    channel._TO_COME = datetime.timedelta(seconds=3)
    if moment == "joining" and os.environ["RANK"] == str(lost):
        channel.begin_group = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    if moment == "meeting" and os.environ["RANK"] == str(lost):
        torch.distributed.new_group = lambda **_: os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        group = join(torch.device("cpu"))
        assert group is not None
        p = torch.zeros(300_000)
        group.summing.prepare([p])
        for _ in range(3):
            group.exchange("there")
        started = time.monotonic()
        if group.rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            if moment == "a sum":
                group.summing.add_up([p], 1.0)
            elif moment == "the first's":
                group.from_first(lambda: "this")
            else:
                group.exchange("x" * 2000)
    except RankError as error:
        found = error.rank, str(error), time.monotonic() - started
        if moment == "an exchange, and none ends":
            time.sleep(10)
        return found


MOMENTS = ("joining", "meeting", "an exchange", "a sum", "the first's")
KILLS = [(2, 0, MOMENTS), (2, 1, MOMENTS[:3]), (3, 1, MOMENTS[3:]), (4, 0, MOMENTS[2:]), (4, 2, MOMENTS[2:3])]
MORE_KILLS = [(3, 0, MOMENTS), (3, 2, MOMENTS), (4, 1, MOMENTS), (4, 3, MOMENTS)]


@pytest.mark.parametrize(
    ("size", "lost", "moment"),
    [
        *((size, lost, moment) for size, lost, moments in KILLS for moment in moments),
        (4, 0, "an exchange, and none ends"),  # so that none hears of it by a connection
        *(
            pytest.param(size, lost, moment, marks=pytest.mark.slow)
            for size, lost, moments in MORE_KILLS
            for moment in moments
        ),
    ],
)
def test_a_rank_that_is_killed_ends_the_others(size: int, lost: int, moment: str) -> None:
    found = launch(losing, size, lost, moment, lost=lost)
    assert isinstance(found.pop(lost), Ended)
    for rank, text, seconds in found:
        assert rank is None
        assert "another rank has ended: " in text
        assert seconds < 15


def calling() -> Any:
    """Have a rank fail elsewhere, of which the others hear where they wait, not from the one next to it."""
    group = join(torch.device("cpu"))
    assert group is not None
    if group.rank == 1:
        group.channel.call("it has failed")
        group.channel.call("it has failed again")
        time.sleep(10)
        return None
    with pytest.raises(RankError) as caught:
        group.exchange("there")
    return caught.value.rank, str(caught.value)


def test_a_rank_that_says_why_it_fails_is_named_to_all_that_wait() -> None:
    found = launch(calling, 4)
    for rank, text in (found[0], found[2], found[3]):
        assert rank == 1
        assert "rank 1 has failed: it has failed. " in text


def waiting_for_one_that_is_busy() -> list[int]:
    channel._EVERY = 0.05
    group = join(torch.device("cpu"))
    assert group is not None
    if group.rank == 1:
        # As C code does that holds Python's lock: none of the rank's own threads runs.
        __import__("ctypes").PyDLL(None).usleep(4_000_000)
    return group.exchange(group.rank)


def test_a_rank_that_is_busy_in_c_is_not_lost() -> None:
    assert launch(waiting_for_one_that_is_busy, 2) == [[0, 1]] * 2


def leaving(code: str) -> Any:
    """Have rank 1 called lost while rank 0 is in a sum, which is then left; another process runs all of it, and tells how it ended."""
    group = join(torch.device("cpu"))
    assert group is not None
    if group.rank == 1:
        group.channel.call("its machine does not answer")
        time.sleep(60)
    try:
        group.channel.begin_sum(torch.ones(300_000))()  # by gloo
    except RankError as error:
        found = error.rank
    exec(code)
    return found


OF_COMMAND = """
from autoaccum.cli import app
def parser(): raise RankError(1, "it is stopped")
app._app = parser
sys.exit(app.main([]))
"""


@pytest.mark.parametrize(("code", "ended"), [("", 0), ("raise SystemError('mine')", 1), (OF_COMMAND, 1)])
def test_a_process_ends_with_a_collective_that_does_not(code: str, ended: int) -> None:
    script = f"from tests.distributed.test_channel import leaving; print('found', leaving({code!r}), flush=True)"
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29000 + os.getpid() % 900 + len(code))}
    environment = {**os.environ, **where, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ranks = [
        subprocess.Popen([sys.executable, "-c", script], env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        told, _ = ranks[0].communicate(timeout=60)
        assert ranks[0].returncode == ended
        assert told == (b"" if ended else b"found 1\n")
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
