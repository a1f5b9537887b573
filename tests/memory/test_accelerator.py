from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch

from autoaccum.memory.accelerator import AcceleratorMemory
from autoaccum.memory.base import Usage

MIB = 2**20
CUDA = torch.device("cuda", 0)


class FakeAccelerator:
    """An allocator on a device of 1000 MiB, behind the functions of ``torch.accelerator``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.cached = self.others = self.peak = 0
        self.fraction = 1.0
        self.initialized = True
        self.most_allocated = 0
        self.set: list[float] = []
        self.counters = {"num_ooms": 0, "num_alloc_retries": 0}
        for name in (
            "get_memory_info",
            "memory_stats",
            "reset_peak_memory_stats",
            "empty_cache",
        ):
            monkeypatch.setattr(torch.accelerator, name, getattr(self, name))
        module = SimpleNamespace(
            get_per_process_memory_fraction=lambda device: self.fraction,
            set_per_process_memory_fraction=self.set_fraction,
        )
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    def hold(self, *, allocated: int, cached: int) -> None:
        self.allocated, self.cached = allocated * MIB, cached * MIB
        self.peak = max(self.peak, self.allocated + self.cached)
        self.most_allocated = max(self.most_allocated, self.allocated)

    def set_fraction(self, fraction: float, device: torch.device) -> None:
        self.set.append(fraction)
        self.fraction = int(fraction * 1000 * MIB) / (1000 * MIB)  # as CUDA keeps it: in whole bytes

    def get_memory_info(self, device: torch.device) -> tuple[int, int]:
        return 1000 * MIB - self.others - self.allocated - self.cached, 1000 * MIB

    def memory_stats(self, device: torch.device) -> OrderedDict[str, int]:
        assert device == CUDA
        if not self.initialized:
            return OrderedDict()
        figures = {
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.most_allocated,
            "allocated_bytes.small_pool.peak": 7,
            "inactive_split_bytes.all.peak": 5,
            "reserved_bytes.all.current": self.allocated + self.cached,
            "reserved_bytes.all.peak": self.peak,
        }
        return OrderedDict(figures | self.counters)

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        if not self.initialized:
            raise RuntimeError("Allocator not initialized for device 0: did you call init?")
        self.peak, self.most_allocated = self.allocated + self.cached, self.allocated

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


class TestUsage:
    def test_all_figures_are_of_one_reading(self, fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
        fake.hold(allocated=400, cached=30)
        fake.hold(allocated=200, cached=50)
        fake.counters = {"num_ooms": 2, "num_alloc_retries": 5}
        readings: list[OrderedDict[str, int]] = []
        read = fake.memory_stats
        monkeypatch.setattr(
            torch.accelerator, "memory_stats", lambda device: readings.append(read(device)) or readings[-1]
        )
        assert AcceleratorMemory(CUDA).usage() == Usage(
            used_bytes=250 * MIB,
            peak_bytes=430 * MIB,
            allocated_bytes=200 * MIB,
            allocated_peak_bytes=400 * MIB,
            split_bytes=5,
            retries=3,
            ooms=2,
        )
        assert len(readings) == 1

    def test_a_look_is_one_reading(self, fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
        readings: list[int] = []
        read = fake.memory_stats
        monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: readings.append(1) or read(device))
        memory = AcceleratorMemory(CUDA)
        for _ in range(3):
            memory.limit()
            memory.strained()
        assert len(readings) == 3

    def test_an_allocator_without_statistics_is_measured_by_the_device(
        self, fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As CUDAPluggableAllocator, which supports neither statistics nor a fraction."""

        def refuse(*_: object) -> None:
            raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

        module = SimpleNamespace(get_per_process_memory_fraction=refuse, set_per_process_memory_fraction=refuse)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        for name in ("memory_stats", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.accelerator, name, refuse)
        memory = AcceleratorMemory(CUDA)
        fake.hold(allocated=300, cached=0)
        assert (memory.used(), memory.peak(), memory.limit()) == (300 * MIB, 300 * MIB, 1000 * MIB)
        fake.hold(allocated=100, cached=0)
        assert (memory.used(), memory.peak()) == (100 * MIB, 300 * MIB)
        memory.reset_peak()
        assert memory.peak() == 100 * MIB
        assert (memory.can_enforce, memory.usage().retries, memory.strained()) == (False, None, None)

    def test_without_a_count_of_retries_there_is_no_strain(self, fake: FakeAccelerator) -> None:
        fake.counters = {}
        memory = AcceleratorMemory(CUDA)
        assert memory.usage().retries is None
        assert [memory.strained() for _ in range(40)] == [None] * 40

    def test_a_device_that_does_not_tell_what_is_free_is_taken_to_be_ones_own(
        self, fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As XPUs within WSL, and those that are part of the host's processor."""

        def refuse(device: torch.device) -> None:
            raise RuntimeError("The device does not support querying the available free memory.")

        monkeypatch.setattr(torch.accelerator, "get_memory_info", refuse)
        module = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(total_memory=900 * MIB))
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        fake.hold(allocated=200, cached=100)
        memory = AcceleratorMemory(CUDA)
        assert (memory.limit(), memory.capacity(), memory.used()) == (900 * MIB, 900 * MIB, 300 * MIB)


class TestEnforcement:
    def test_the_fraction_is_set_and_put_back(self, fake: FakeAccelerator) -> None:
        memory = AcceleratorMemory(CUDA)
        assert memory.can_enforce
        memory.enforce(300 * MIB)
        assert fake.fraction == pytest.approx(0.3)
        assert memory.limit() == AcceleratorMemory(CUDA).limit() == 1000 * MIB, (
            "what was set here is no limit of others"
        )
        memory.enforce(333_333_333)
        memory.enforce(None)
        assert fake.fraction == 1.0
        memory.enforce(None)
        assert len(fake.set) == 3, "nothing was there to be put back"

    def test_what_a_user_has_set_is_an_upper_bound_and_comes_back(self, fake: FakeAccelerator) -> None:
        fake.fraction = 0.4
        memory = AcceleratorMemory(CUDA)
        memory.enforce(700 * MIB)
        assert fake.fraction == pytest.approx(0.4)
        memory.enforce(200 * MIB)
        assert (fake.fraction, memory.limit()) == (pytest.approx(0.2), 400 * MIB)
        memory.enforce(None)
        assert fake.fraction == pytest.approx(0.4)

    def test_what_a_user_sets_meanwhile_stays(self, fake: FakeAccelerator) -> None:
        memory = AcceleratorMemory(CUDA)
        memory.enforce(700 * MIB)
        fake.fraction = 0.5
        assert memory.limit() == 500 * MIB
        memory.enforce(800 * MIB)
        assert fake.fraction == pytest.approx(0.5)
        memory.enforce(None)
        assert fake.fraction == pytest.approx(0.5)

    def test_a_cache_beyond_the_limit_is_given_back(self, fake: FakeAccelerator) -> None:
        memory = AcceleratorMemory(CUDA)
        fake.hold(allocated=100, cached=300)
        memory.enforce(500 * MIB)
        assert fake.cached == 300 * MIB
        memory.enforce(200 * MIB)
        assert fake.cached == 0


class TestStrain:
    def retried(self, fake: FakeAccelerator, memory: AcceleratorMemory, at: list[bool]) -> list[str]:
        found = []
        for did_retry in at:
            fake.counters["num_alloc_retries"] += did_retry
            found.append(memory.strained())
        return [reason for reason in found if reason is not None]

    def test_now_and_then_is_a_matter_of_course(self, fake: FakeAccelerator) -> None:
        memory = AcceleratorMemory(CUDA)
        fake.counters["num_alloc_retries"] = 7  # from before the first look
        assert self.retried(fake, memory, [index % 3 == 0 for index in range(300)]) == []

    def test_in_every_other_window_it_costs_time(self, fake: FakeAccelerator) -> None:
        memory = AcceleratorMemory(CUDA)
        assert self.retried(fake, memory, [False] + [index % 2 == 0 for index in range(16)]) == [
            "the allocator had to empty its cache between 8 of the last 16 looks at it"
        ]
        assert self.retried(fake, memory, [True] * 15) == [], "they are counted anew"
        assert len(self.retried(fake, memory, [True])) == 1

    def test_the_retry_before_an_error_is_none(self, fake: FakeAccelerator) -> None:
        memory = AcceleratorMemory(CUDA)
        for count in range(40):
            fake.counters = {"num_ooms": count, "num_alloc_retries": count}
            assert memory.strained() is None

    def test_counters_that_someone_reset_start_again(self, fake: FakeAccelerator) -> None:
        memory = AcceleratorMemory(CUDA)
        found = []
        for count in range(60):
            fake.counters["num_alloc_retries"] = 5 if count % 3 == 0 else 0
            found.append(memory.strained())
        assert found == [None] * 60, "it has risen at every third look, from what it was reset to"

    def test_before_the_first_allocation_there_is_nothing_to_tell(self, fake: FakeAccelerator) -> None:
        fake.initialized = False
        memory = AcceleratorMemory(CUDA)
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

    def test_a_cache_that_is_in_the_way_is_a_retry_and_an_error_is_not(
        self, memory: AcceleratorMemory, device: torch.device
    ) -> None:
        before = memory.usage()
        assert before.retries is not None
        try:
            memory.enforce(memory.used() + 64 * MIB)
            torch.ones(38 * MIB, dtype=torch.uint8, device=device)
            assert memory.usage().retries == before.retries
            torch.ones(50 * MIB, dtype=torch.uint8, device=device)  # only without the 38
            assert memory.usage().retries == before.retries + 1
            with pytest.raises(torch.OutOfMemoryError):
                torch.ones(80 * MIB, dtype=torch.uint8, device=device)
            assert (memory.usage().retries, memory.usage().ooms) == (before.retries + 1, before.ooms + 1)
        finally:
            memory.enforce(None)
        torch.ones(80 * MIB, dtype=torch.uint8, device=device)

    def test_tensors_are_told_from_what_is_reserved(self, memory: AcceleratorMemory, device: torch.device) -> None:
        before = memory.usage()
        held = torch.ones(42 * MIB, dtype=torch.uint8, device=device)  # for which no segment has room
        usage = memory.usage()
        assert usage.allocated_bytes - before.allocated_bytes == held.nbytes
        assert usage.used_bytes - before.used_bytes in (42 * MIB, 44 * MIB)
        assert usage.peak_bytes == usage.used_bytes


def test_what_others_hold_could_be_had_up_to_the_share_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeAccelerator(monkeypatch)
    device.hold(allocated=100, cached=0)
    device.others = 700 * MIB
    memory = AcceleratorMemory(CUDA)
    assert (memory.limit(), memory.capacity()) == (300 * MIB, 1000 * MIB)
    device.fraction = 0.5
    assert (memory.limit(), memory.capacity()) == (300 * MIB, 500 * MIB)
