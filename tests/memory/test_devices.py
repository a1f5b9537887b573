"""Devices by name, on machines with and without an accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoaccum._units import shown
from autoaccum.errors import UnknownDeviceError
from autoaccum.memory.devices import find_device


class Machine:
    """A machine with some accelerators of one kind, of which one is current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int = 0, current: int = 0) -> None:
        self.current = current
        found = None if kind is None else torch.device(kind)

        def choose(index: Any) -> None:
            self.current = index

        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: self.current)
        monkeypatch.setattr(torch.accelerator, "set_device_index", choose)


class TestWithoutAccelerator:
    @pytest.fixture(autouse=True)
    def _machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Machine(monkeypatch, None)

    @pytest.mark.parametrize("device", [None, "cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
    def test_the_cpu(self, device: Any) -> None:
        """Always without an index, so that it compares equal to that of a tensor."""
        assert find_device(device) == torch.device("cpu") == torch.zeros(1).device

    @pytest.mark.parametrize("device", ["cuda", "cuda:0", "mps", torch.device("xpu", 1)])
    def test_no_other(self, device: Any) -> None:
        with pytest.raises(UnknownDeviceError) as caught:
            find_device(device)
        install = ", or install a build for CUDA (https://pytorch.org/get-started)" if "cuda" in str(device) else ""
        assert str(caught.value) == (
            f"device={device!r} is not available: this PyTorch build is CPU-only. Leave device out to train on the CPU"
            f"{install}."
        )
        assert (caught.value.value, caught.value.accepted) == (device, "one of cpu")

    @pytest.mark.parametrize("device", ["gpu", "meta", "tpu", "", "cuda:-1", 1.5, [], object])
    def test_what_is_no_device(self, device: Any) -> None:
        with pytest.raises(UnknownDeviceError) as caught:
            find_device(device)
        assert str(caught.value) == (
            f"device={shown(device)} is no device to train on. Use device='cpu', or leave device out."
        )
        assert find_device("cpu") == find_device(None)


class TestWithAccelerators:
    @pytest.fixture
    def machine(self, monkeypatch: pytest.MonkeyPatch) -> Machine:
        return Machine(monkeypatch, "cuda", count=3, current=2)

    @pytest.mark.parametrize("device", [None, "cuda", torch.device("cuda")])
    def test_the_current_one_when_no_index_is_given(self, machine: Machine, device: Any) -> None:
        assert find_device(device) == torch.device("cuda", 2)
        assert machine.current == 2

    def test_one_by_index_becomes_current(self, machine: Machine) -> None:
        assert find_device("cuda:1") == torch.device("cuda", 1)
        assert machine.current == 1

    def test_the_cpu_when_it_is_asked_for(self, machine: Machine) -> None:
        assert find_device("cpu") == torch.device("cpu")
        assert machine.current == 2

    @pytest.mark.parametrize("device", ["cuda:3", "xpu", "xpu:0", "mps"])
    def test_no_other(self, machine: Machine, device: str) -> None:
        with pytest.raises(UnknownDeviceError) as caught:
            find_device(device)
        assert caught.value.accepted == "one of cpu, cuda:0, cuda:1, cuda:2"
        why = "there are cpu, cuda:0, cuda:1, cuda:2" if device == "cuda:3" else "this PyTorch build is for CUDA"
        assert str(caught.value) == (f"device={device!r} is not available: {why}. Leave device out to train on cuda.")
        assert machine.current == 2

    def test_a_typing_mistake(self, machine: Machine) -> None:
        with pytest.raises(UnknownDeviceError) as caught:
            find_device("gpu")
        assert str(caught.value) == "device='gpu' is no device to train on. Use device='cuda', or leave device out."
        assert find_device("cuda") == torch.device("cuda", 2)


def test_a_build_for_cuda_without_a_gpu_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, None)
    built = torch.device("cuda")
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None if check_available else built
    )
    with pytest.raises(UnknownDeviceError) as caught:
        find_device("cuda")
    assert str(caught.value) == (
        "device='cuda' is not available: this PyTorch build is for CUDA, but no CUDA device works here. Leave "
        "device out to train on the CPU, or run nvidia-smi to see whether the driver finds a GPU."
    )
    assert find_device(None) == torch.device("cpu")


@pytest.mark.gpu
def test_what_is_found_is_where_tensors_are() -> None:
    device = find_device(None)
    assert device.type != "cpu"
    assert torch.zeros(1, device=device).device == device
