"""Collectives that end, and processes that end with one that does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from autoaccum.distributed import channel, launcher
from autoaccum.distributed.channel import Channel, as_tensor
from autoaccum.distributed.group import join
from autoaccum.errors import RankError
from tests.distributed.launching import launch
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


def lost_while_meeting() -> int | None:
    """Kill rank 1 as soon as rank 0 has heard that it is there, and before either can be in a collective."""
    welcomed = launcher._welcomed

    def killed(*args: Any) -> str:
        welcomed(*args)
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    launcher._welcomed = killed
    with pytest.raises(RankError) as caught:
        join(torch.device("cpu"))
    return caught.value.rank


def test_a_rank_that_is_lost_before_all_have_met_is_named() -> None:
    assert launch(lost_while_meeting, 2, lost=1)[0] == 1


def left_while_meeting() -> None:
    """End as a process does that has not come to the end of joining."""
    channel = Channel.__new__(Channel)
    channel._make_groups = lambda device: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="process group"):  # where it asks which rank it is
        Channel.__init__(channel, torch.device("cpu"))
    channel._leave()


def test_a_process_ends_well_that_has_not_met_the_others() -> None:
    assert launch(left_while_meeting, 1) == [None]


def unmet() -> str:
    """Wait for a rank that never comes."""
    channel.PATIENCE = 0.3
    if os.environ["RANK"] == "1":
        return ""
    with pytest.raises(RankError) as caught:
        join(torch.device("cpu"))
    return str(caught.value)


def test_a_rank_that_never_comes_is_named() -> None:
    assert launch(unmet, 2)[0].startswith("rank 1 has failed: it has not come within 0 seconds")


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
