from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest
import torch

from autoaccum.memory.accelerator import AcceleratorMemory, MpsMemory

MIB = 2**20
CUDA = torch.device("cuda", 0)


class FakeAccelerator:
    """An allocator on a device of 1000 MiB, behind the functions of ``torch.accelerator``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.cached = self.others = self.peak = 0
        self.fraction = 1.0
        self.initialized = True
        self.counters = {"num_ooms": 0, "num_alloc_retries": 0}
        for name in (
            "get_memory_info",
            "memory_reserved",
            "max_memory_reserved",
            "memory_stats",
            "reset_peak_memory_stats",
            "empty_cache",
        ):
            monkeypatch.setattr(torch.accelerator, name, getattr(self, name))
        module = SimpleNamespace(get_per_process_memory_fraction=lambda device: self.fraction)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    def hold(self, *, allocated: int, cached: int) -> None:
        self.allocated, self.cached = allocated * MIB, cached * MIB
        self.peak = max(self.peak, self.allocated + self.cached)

    def get_memory_info(self, device: torch.device) -> tuple[int, int]:
        return 1000 * MIB - self.others - self.memory_reserved(device), 1000 * MIB

    def memory_reserved(self, device: torch.device) -> int:
        assert device == CUDA
        return self.allocated + self.cached

    def max_memory_reserved(self, device: torch.device) -> int:
        assert device == CUDA
        return self.peak

    def memory_stats(self, device: torch.device) -> OrderedDict[str, int]:
        return OrderedDict(self.counters) if self.initialized else OrderedDict()

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        if not self.initialized:
            raise RuntimeError("Allocator not initialized for device 0: did you call init?")
        self.peak = self.memory_reserved(device)

    def empty_cache(self) -> None:
        self.cached = 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    return FakeAccelerator(monkeypatch)


class TestArithmetic:
    def test_an_idle_device_is_all_free(self, fake: FakeAccelerator) -> None:
        assert AcceleratorMemory(CUDA).limit() == 1000 * MIB

    def test_the_limit_is_what_is_held_plus_what_is_free(self, fake: FakeAccelerator) -> None:
        memory = AcceleratorMemory(CUDA)
        fake.hold(allocated=200, cached=100)
        fake.others = 150 * MIB
        assert memory.limit() == 850 * MIB
        assert memory.used() == 300 * MIB

    def test_the_fraction_set_for_this_process_caps_it(self, fake: FakeAccelerator) -> None:
        memory = AcceleratorMemory(CUDA)
        fake.fraction = 0.5
        assert memory.limit() == 500 * MIB
        fake.others = 700 * MIB
        assert memory.limit() == 300 * MIB

    def test_a_backend_without_a_fraction_is_not_capped(
        self, fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
        assert AcceleratorMemory(CUDA).limit() == 1000 * MIB

    def test_a_reset_starts_the_peak_from_what_is_held(self, fake: FakeAccelerator) -> None:
        memory = AcceleratorMemory(CUDA)
        fake.hold(allocated=400, cached=0)
        fake.hold(allocated=200, cached=50)
        assert memory.peak() == 400 * MIB
        memory.reset_peak()
        assert memory.peak() == 250 * MIB

    def test_a_reset_before_the_first_allocation_is_no_error(self, fake: FakeAccelerator) -> None:
        fake.initialized = False
        AcceleratorMemory(CUDA).reset_peak()


class TestStrain:
    def test_none_while_the_allocator_did_not_retry(self, fake: FakeAccelerator) -> None:
        memory = AcceleratorMemory(CUDA)
        assert [memory.strained(), memory.strained()] == [None, None]

    def test_each_retry_is_told_once(self, fake: FakeAccelerator) -> None:
        memory = AcceleratorMemory(CUDA)
        fake.counters["num_alloc_retries"] = 7
        assert memory.strained() is None, "from before the first call"
        fake.counters["num_alloc_retries"] = 9
        assert memory.strained() == "the allocator had to retry 2 times"
        assert memory.strained() is None
        fake.counters["num_alloc_retries"] = 10
        assert memory.strained() == "the allocator had to retry 1 time"

    def test_the_retry_before_an_error_is_none(self, fake: FakeAccelerator) -> None:
        memory = AcceleratorMemory(CUDA)
        memory.strained()
        fake.counters = {"num_ooms": 1, "num_alloc_retries": 1}
        assert memory.strained() is None
        fake.counters = {"num_ooms": 2, "num_alloc_retries": 3}
        assert memory.strained() == "the allocator had to retry 1 time"

    def test_resetting_and_releasing_do_not_hide_one(self, fake: FakeAccelerator) -> None:
        memory = AcceleratorMemory(CUDA)
        memory.strained()
        fake.counters["num_alloc_retries"] = 1
        memory.reset_peak()
        memory.release()
        assert memory.strained() == "the allocator had to retry 1 time"

    def test_counters_that_someone_reset_start_again(self, fake: FakeAccelerator) -> None:
        memory = AcceleratorMemory(CUDA)
        fake.counters["num_alloc_retries"] = 5
        memory.strained()
        fake.counters["num_alloc_retries"] = 0
        assert memory.strained() is None
        fake.counters["num_alloc_retries"] = 2
        assert memory.strained() == "the allocator had to retry 2 times"

    def test_before_the_first_allocation_there_is_nothing_to_tell(self, fake: FakeAccelerator) -> None:
        fake.initialized = False
        memory = AcceleratorMemory(CUDA)
        assert [memory.strained(), memory.strained()] == [None, None]
        fake.initialized = True
        fake.counters["num_alloc_retries"] = 1
        assert memory.strained() == "the allocator had to retry 1 time"


class TestMps:
    @pytest.fixture
    def held(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
        held = SimpleNamespace(driver=0, available=900 * MIB)
        monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: held.driver)
        monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 600 * MIB)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=held.available))
        return held

    def test_the_limit_is_metal_s_or_the_host_s_whichever_is_less(self, held: SimpleNamespace) -> None:
        memory = MpsMemory()
        held.driver = 100 * MIB
        assert memory.limit() == 600 * MIB
        held.available = 300 * MIB
        assert memory.limit() == 400 * MIB

    def test_the_peak_is_the_most_that_was_seen(self, held: SimpleNamespace) -> None:
        memory = MpsMemory()
        held.driver = 500 * MIB
        assert memory.peak() == 500 * MIB
        held.driver = 200 * MIB
        assert memory.peak() == 500 * MIB
        memory.reset_peak()
        assert memory.peak() == 200 * MIB

    def test_it_knows_of_no_strain(self) -> None:
        memory = MpsMemory()
        assert [memory.strained(), memory.strained()] == [None, None]


HOLDER = """
import sys, torch
held = torch.ones(2**30, dtype=torch.uint8, device=sys.argv[1])
torch.accelerator.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.accelerator.is_available() or torch.accelerator.current_accelerator() == torch.device("mps"),
    reason="needs CUDA, ROCm or XPU",
)
class TestOnADevice:
    @pytest.fixture
    def device(self) -> torch.device:
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        return torch.device(accelerator.type, torch.accelerator.current_device_index())

    @pytest.fixture
    def memory(self, device: torch.device) -> AcceleratorMemory:
        memory = AcceleratorMemory(device)
        torch.ones(1, device=device)
        memory.release()
        memory.reset_peak()
        return memory

    def test_a_second_process_that_takes_memory_lowers_the_limit(
        self, memory: AcceleratorMemory, device: torch.device
    ) -> None:
        before = memory.limit()
        other = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(device)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with other:
            assert other.stdout is not None
            assert other.stdin is not None
            try:
                assert other.stdout.readline() == "ready\n"
                assert before - memory.limit() >= 1000 * MIB
            finally:
                other.stdin.close()
        assert other.returncode == 0
        assert before - memory.limit() < 500 * MIB

    def test_its_own_memory_and_its_own_cache_are_within_the_limit(
        self, memory: AcceleratorMemory, device: torch.device
    ) -> None:
        before, used = memory.limit(), memory.used()
        held = torch.ones(512 * MIB, dtype=torch.uint8, device=device)
        assert memory.used() - used >= 512 * MIB
        assert abs(memory.limit() - before) < 64 * MIB
        del held
        assert memory.used() - used >= 512 * MIB
        assert abs(memory.limit() - before) < 64 * MIB
        memory.release()
        assert memory.used() - used < 64 * MIB
        assert abs(memory.limit() - before) < 64 * MIB

    def test_the_peak_lasts_until_it_is_reset(self, memory: AcceleratorMemory, device: torch.device) -> None:
        used = memory.used()
        torch.ones(512 * MIB, dtype=torch.uint8, device=device)
        memory.release()
        assert memory.peak() - used >= 512 * MIB
        memory.reset_peak()
        assert memory.peak() == memory.used()

    def test_the_fraction_set_for_this_process_caps_it(self, memory: AcceleratorMemory, device: torch.device) -> None:
        module = torch.get_device_module(device)
        before = memory.limit()
        total = torch.accelerator.get_memory_info(device)[1]
        module.set_per_process_memory_fraction(0.05, device)
        try:
            assert abs(memory.limit() - min(before, 0.05 * total)) < MIB
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(memory.limit(), dtype=torch.uint8, device=device)
        finally:
            module.set_per_process_memory_fraction(1.0, device)
        assert abs(memory.limit() - before) < 64 * MIB

    def test_a_cache_that_is_in_the_way_is_strain_and_an_error_is_not(
        self, memory: AcceleratorMemory, device: torch.device
    ) -> None:
        module = torch.get_device_module(device)
        total = torch.accelerator.get_memory_info(device)[1]
        memory.strained()
        try:
            module.set_per_process_memory_fraction((memory.used() + 512 * MIB) / total, device)
            torch.ones(300 * MIB, dtype=torch.uint8, device=device)
            assert memory.strained() is None
            torch.ones(400 * MIB, dtype=torch.uint8, device=device)  # only without the 300
            assert memory.strained() == "the allocator had to retry 1 time"
            with pytest.raises(torch.OutOfMemoryError):
                torch.ones(600 * MIB, dtype=torch.uint8, device=device)
            assert memory.strained() is None
        finally:
            module.set_per_process_memory_fraction(1.0, device)


def test_what_others_hold_could_be_had_up_to_the_share_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeAccelerator(monkeypatch)
    device.hold(allocated=100, cached=0)
    device.others = 700 * MIB
    memory = AcceleratorMemory(CUDA)
    assert (memory.limit(), memory.capacity()) == (300 * MIB, 1000 * MIB)
    device.fraction = 0.5
    assert (memory.limit(), memory.capacity()) == (300 * MIB, 500 * MIB)
