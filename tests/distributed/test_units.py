"""Models that FSDP2 shards are told from others, and those that are sharded otherwise are refused."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from autoaccum.distributed.fsdp import Sharded, class_of, is_distributed, units_of
from autoaccum.distributed.group import join
from autoaccum.errors import AutoaccumError
from tests.distributed.launching import launch
from tests.distributed.test_fsdp import net, shard
from tests.processes import in_turn

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


def classes() -> list[tuple[str, str]]:
    join(torch.device("cpu"))
    model = shard(net())
    return [(type(module).__name__, class_of(module).__name__) for module in (model, model[0], model[3])]  # type: ignore[index]


def test_a_module_that_is_sharded_is_known_by_its_own_class() -> None:
    expected = [("FSDPSequential", "Sequential"), ("FSDPBlock", "Block"), ("LayerNorm", "LayerNorm")]
    assert launch(classes, 2) == [expected, expected]


def test_a_model_that_is_not_sharded_has_no_units() -> None:
    assert units_of(net()) == []
    assert not any(map(is_distributed, net().parameters()))
