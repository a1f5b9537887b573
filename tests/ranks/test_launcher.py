"""Who this process is, by what its launcher says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autoaccum.ranks import launcher
from autoaccum.ranks.group import join, speaks
from autoaccum.ranks.launcher import is_launched, own_device


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
