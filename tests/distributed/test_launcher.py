"""Who this process is, by what its launcher says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import autoaccum
from autoaccum.distributed import launcher
from autoaccum.distributed.group import join, speaks
from autoaccum.distributed.launcher import backends, is_launched, own_device
from tests.distributed.launching import launch


class TestAlone:
    @pytest.fixture(autouse=True)
    def nothing_said(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
        for name in launcher._LAUNCHED:
            monkeypatch.delenv(name, raising=False)
        return iter([monkeypatch])

    def test_a_process_that_nobody_has_launched_is(self) -> None:
        assert not is_launched()
        assert join(torch.device("cpu")) is None
        assert speaks()

    @pytest.mark.parametrize("size", ["1", "2"])
    def test_of_torchrun_are_those_of_more_than_one(self, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"RANK": "0", "WORLD_SIZE": size, "MASTER_ADDR": "localhost"}.items():
            monkeypatch.setenv(name, value)
        assert not is_launched(), "nobody says where they meet"
        monkeypatch.setenv("MASTER_PORT", "1")
        assert is_launched() is (size == "2")

    def test_on_a_cpu_no_rank_has_a_device_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert own_device() is None

    def test_on_a_machine_with_accelerators_each_has_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
        )
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
        monkeypatch.setenv("LOCAL_RANK", "5")
        assert own_device() == "cuda:1"
        monkeypatch.delenv("LOCAL_RANK")
        assert own_device() is None


def losses(*, sharded: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    data = torch.randn(16, 4, dtype=torch.float64), torch.randn(16, 1, dtype=torch.float64)
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)  # which makes the group, and names no backend
        assert dist.get_backend() == "undefined"
        assert backends(kind="cpu") == {"gloo"}
    found = autoaccum.fit(
        model, data, effective_batch=8, steps=2, loss_fn=F.mse_loss, device="cpu", progress=False, shuffle=False,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), verify=False, cache=False,
    )  # fmt: skip
    return [report.loss for report in found.history]


def of_a_sharded_model() -> list[float]:
    return losses(sharded=True)


def test_of_a_group_that_fully_shard_has_made() -> None:
    for found in launch(of_a_sharded_model, 2):
        assert found == pytest.approx(losses(sharded=False), rel=1e-12)
