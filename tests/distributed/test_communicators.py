"""What units call is noted, and no mode that looks at operations comes between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoaccum.distributed.collectives import Collectives, Gathers, Scatters
from autoaccum.errors import RankError
from autoaccum.testing import oom_at
from tests.distributed.unheard import unheard

GROUP: Any = "the ranks"


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
        monkeypatch.setattr(dist, name, lambda *_, **__: torch.ones(1) + 1)
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:other")


def test_units_launch_where_no_mode_comes_between() -> None:
    collectives = Collectives(unheard())
    gathers, scatters = Gathers(collectives, 0), Scatters(collectives, 0, GROUP)
    given, taken = torch.ones(3), gathers.allocate((6,), dtype=torch.float32, device=torch.device("cpu"))
    collectives.begin()
    with oom_at(None) as seen:
        gathers(taken, given, GROUP)
        scatters(given, taken, GROUP, dist.ReduceOp.SUM)
        before = seen.operations
        dist.all_reduce(given + 1)  # FSDP2's own, which nobody intercepts
        assert seen.operations == before, "what looks at operations is away until it is heard of"
        scatters.summed(given)
        assert (given + 1).numel() == 3
        assert seen.operations == before + 1
    assert [each.kind for each in collectives.launched] == ["all_gather", "reduce_scatter", "all_reduce"]


def test_a_sum_over_copies_that_was_not_heard_of_may_have_been_launched() -> None:
    collectives = Collectives(unheard())
    collectives.begin()
    Scatters(collectives, 1, GROUP)(torch.ones(3), torch.ones(6), GROUP, dist.ReduceOp.SUM)
    with pytest.raises(RankError, match="it has left the all_reduce of a unit"):
        collectives.drain()
    with oom_at(None) as seen:
        torch.ones(1)
    assert seen.operations == 1
