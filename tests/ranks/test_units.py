"""Models that FSDP2 shards are told from others, and those that are sharded otherwise are refused."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from autoaccum.errors import AutoaccumError
from autoaccum.ranks.group import join
from autoaccum.ranks.sharded import Sharded
from autoaccum.ranks.units import is_distributed, units_of
from tests.processes import in_turn
from tests.ranks.launching import launch
from tests.ranks.test_sharded import net

pytestmark = in_turn


def refused(what: str) -> str:
    group, model = join(torch.device("cpu")), net()
    assert group is not None
    if what == "a part of it":
        fully_shard(model[0])  # type: ignore[index]
    else:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "copy"))
        shard_mesh = mesh["shard"]
        fully_shard(model, mesh=shard_mesh)
    try:
        Sharded(model, group)
    except AutoaccumError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "why"), [("a part of it", "Call fully_shard on the whole model"), ("of its own", "over all 2 ranks")]
)
def test_a_model_that_is_sharded_otherwise_is_refused(what: str, why: str) -> None:
    for found in launch(refused, 2, what):
        assert why in found


def test_a_model_that_is_not_sharded_has_no_units() -> None:
    assert units_of(net()) == []
    assert not any(map(is_distributed, net().parameters()))
