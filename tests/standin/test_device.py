"""The stand-in device is as strict as a GPU where that matters, and tells what it did."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests import standin

pytestmark = pytest.mark.gpu

MIB = 2**20


@pytest.fixture(autouse=True)
def _only_there(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--device") != "standin":
        pytest.skip("is about the stand-in device")
    torch.accelerator.synchronize()  # copies of the test before
    torch.accelerator.empty_cache()


def kinds(log: list[standin.Entry], *wanted: str) -> list[str]:
    return [entry.kind for entry in log if entry.kind in wanted]


def statistic(name: str) -> int:
    return int(torch.accelerator.memory_stats()[name])


class TestStrictness:
    def test_the_host_cannot_read_its_memory(self) -> None:
        code = (
            "import ctypes, torch; tensor = torch.ones(4, device='standin'); "
            "print('made', flush=True); ctypes.string_at(tensor.data_ptr(), 4)"
        )
        torch.ones(1, device="standin")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout.strip()) == (-signal.SIGSEGV, "made")

    @pytest.mark.parametrize("other", ["cpu", "standin:1"])
    def test_tensors_of_two_devices_are_refused(self, other: str) -> None:
        here, there = torch.ones(4, device="standin:0"), torch.ones(4, device=other)
        with pytest.raises(RuntimeError, match="same device, but found at least two devices, standin:0 and"):
            here + there

    def test_a_scalar_of_the_host_is_let_in(self) -> None:
        assert (torch.ones(2, device="standin") + torch.tensor(1.0)).tolist() == [2.0, 2.0]

    def test_new_memory_is_not_zero(self) -> None:
        assert torch.empty(64, device="standin", dtype=torch.uint8).tolist() == [0xFD] * 64


class TestCopies:
    def test_one_to_the_host_is_late_until_somebody_waits(self) -> None:
        tensor = torch.arange(4.0, device="standin")
        copy = tensor.to("cpu", non_blocking=True)
        assert copy.tolist() != [0.0, 1.0, 2.0, 3.0]
        torch.accelerator.synchronize()
        assert copy.tolist() == [0.0, 1.0, 2.0, 3.0]

    def test_one_from_pinned_memory_reads_it_when_an_operator_needs_it(self) -> None:
        source = torch.zeros(4).pin_memory()
        copy = source.to("standin", non_blocking=True)
        torch.ones(1, device="standin") + 1  # of something else: the copy may still be under way
        source.fill_(7)
        assert copy.tolist() == [7.0] * 4

    def test_they_are_done_in_their_order(self) -> None:
        """What is on its way to the host is there for a later copy from there, and for nobody else."""
        between = torch.empty(4, pin_memory=True)
        between.copy_(torch.arange(4.0, device="standin"), non_blocking=True)
        copy = between.to("standin", non_blocking=True)
        assert between.tolist() != [0.0, 1.0, 2.0, 3.0]
        assert copy.tolist() == [0.0, 1.0, 2.0, 3.0]

    def test_one_from_pageable_memory_is_done_at_once(self) -> None:
        source = torch.zeros(4)
        copy = source.to("standin", non_blocking=True)
        source.fill_(7)
        assert copy.tolist() == [0.0] * 4


class TestAllocator:
    def test_blocks_are_rounded_and_cut_from_segments_as_on_cuda(self) -> None:
        # In a process of its own: in this one, tests before it have left blocks and segments, workspaces for good.
        code = """if True:
            import json, torch
            def now(*names):
                return [torch.accelerator.memory_stats()[f"{name}_bytes.all.current"] for name in names]
            found, of = [], ("allocated", "reserved", "inactive_split")
            kept = [torch.empty(1, dtype=torch.uint8, device="standin")]
            found.append(now(*of))
            kept.append(torch.empty(3 * 2**20, dtype=torch.uint8, device="standin"))
            found.append(now(*of))
            kept.append(torch.empty(18 * 2**20, dtype=torch.uint8, device="standin"))
            found.append(now(*of))
            del kept
            found.append(now(*of))
            torch.accelerator.empty_cache()
            found.append(now(*of))
            print(json.dumps(found))
        """
        torch.ones(1, device="standin")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == [
            [512, 2 * MIB, 2 * MIB - 512],  # blocks of 512 bytes; 2 MiB for what is small
            [512 + 3 * MIB, 22 * MIB, 19 * MIB - 512],  # 20 MiB for what is below 10
            [512 + 21 * MIB, 40 * MIB, 19 * MIB - 512],  # multiples of 2 MiB else
            [0, 40 * MIB, 0],  # its cache
            [0, 0, 0],
        ]

    def test_a_fraction_is_kept_with_one_retry_and_a_typed_error(self) -> None:
        module, total = torch.get_device_module(), torch.accelerator.get_memory_info()[1]
        room = (statistic("reserved_bytes.all.current") + 64 * MIB) / total
        module.set_per_process_memory_fraction(room)
        try:
            first = torch.empty(40 * MIB, dtype=torch.uint8, device="standin")
            with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 40.00 MiB"):
                torch.empty(40 * MIB, dtype=torch.uint8, device="standin")
            del first
            before = statistic("num_alloc_retries")
            torch.empty(50 * MIB, dtype=torch.uint8, device="standin")  # after the 40 were given back
            assert statistic("num_alloc_retries") == before + 1
        finally:
            module.set_per_process_memory_fraction(1.0)

    def test_what_another_process_holds_is_not_free(self) -> None:
        code = (
            "import torch; kept = torch.empty(64 * 2**20, dtype=torch.uint8, device='standin'); "
            "print('in', flush=True); input()"
        )
        before = torch.accelerator.get_memory_info()[0]
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tenant:
            assert tenant.stdout is not None
            assert tenant.stdout.readline() == "in\n"
            taken = before - torch.accelerator.get_memory_info()[0]
            tenant.communicate("\n")
        assert taken == 128 * MIB  # its context too
        assert torch.accelerator.get_memory_info()[0] == before

    def test_outputs_are_allocated_before_an_operator_has_written_anything(self) -> None:
        norm = nn.BatchNorm1d(8).to("standin")
        batch = torch.randn(4, 8, device="standin")
        before = [tensor.clone() for tensor in norm.buffers()]
        with standin.fails_at(1), pytest.raises(torch.OutOfMemoryError):
            nn.functional.batch_norm(batch, norm.running_mean, norm.running_var, training=True)
        # The update of the statistics is a part of what did not run.
        assert all(torch.equal(a, b) for a, b in zip(before, norm.buffers(), strict=True))

    def test_workspaces_are_taken_from_the_device(self) -> None:
        image, weight = torch.randn(1, 1, 9, 9, device="standin"), torch.randn(1, 1, 3, 3, device="standin")
        with standin.recorded() as log:
            result = nn.functional.conv2d(image, weight, dilation=2)
        sizes = sorted(entry.bytes for entry in log if entry.kind == "alloc")
        assert sizes[-1] > result.nbytes or len(sizes) > 1

    def test_a_failure_at_each_allocation_is_a_typed_error(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to("standin")
        batch = torch.randn(2, 4, device="standin")
        model(batch).sum().backward()  # the first product of matrices takes a workspace for good
        model.zero_grad(set_to_none=True)
        before = standin.allocations()
        model(batch).sum().backward()
        number = standin.allocations() - before
        assert number > 4
        for index in range(1, number + 1):
            model.zero_grad(set_to_none=True)
            with standin.fails_at(index), pytest.raises(torch.OutOfMemoryError):
                model(batch).sum().backward()


class TestLog:
    @pytest.mark.parametrize(
        "act",
        [
            lambda x: x.sum().item(),
            lambda x: x.cpu(),
            lambda x: x.nonzero(),
            lambda x: x[x > 0],
            lambda x: torch.equal(x, x),
            lambda x: bool(x.sum() > 0),
            lambda x: torch.tensor([1.0, 2.0], device=x.device),
            lambda x: torch.accelerator.synchronize(),
        ],
        ids=["item", "cpu", "nonzero", "mask", "equal", "bool", "tensor", "synchronize"],
    )
    def test_what_waits_for_the_device_is_a_sync(self, act: object) -> None:
        assert callable(act)
        tensor = torch.randn(8, device="standin")
        with standin.recorded() as log:
            act(tensor)
        assert "sync" in kinds(log, "sync")

    def test_what_does_not_wait_is_none(self) -> None:
        tensor = torch.randn(8, device="standin", requires_grad=True)
        source = torch.zeros(8).pin_memory()
        with standin.recorded() as log:
            source.to("standin", non_blocking=True)
            (tensor.relu() * 2).sum().backward()
            torch.zeros(3, device="standin").fill_(2.0)
        assert kinds(log, "sync") == []
        assert kinds(log, "copy in") == ["copy in"]

    def test_segments_that_are_given_back(self) -> None:
        kept = torch.empty(30 * MIB, dtype=torch.uint8, device="standin")
        del kept
        with standin.recorded() as log:
            torch.accelerator.empty_cache()
        assert 30 * MIB in [entry.bytes for entry in log if entry.kind == "segment free"]

    def test_stacks_name_who_waited(self) -> None:
        tensor = torch.ones(1, device="standin")
        with standin.stacks_of("sync") as found:
            tensor.item()
        assert [(kind, what) for kind, what, _ in found] == [("sync", "item")]
        assert any("test_stacks_name_who_waited" in line for line in found[0][2])


class TestGenerator:
    def test_it_is_the_devices_own(self) -> None:
        torch.manual_seed(0)
        on_host = torch.rand(4)
        torch.manual_seed(0)
        there = torch.rand(4, device="standin")
        assert not torch.equal(there.cpu(), on_host)
        assert torch.equal(torch.rand(4), on_host)  # which it has left alone
        torch.manual_seed(0)
        assert torch.equal(torch.rand(4, device="standin"), there)

    def test_its_state_is_put_back(self) -> None:
        module = torch.get_device_module()
        state = module.get_rng_state()
        first = nn.functional.dropout(torch.ones(64, device="standin"))
        module.set_rng_state(state)
        assert torch.equal(nn.functional.dropout(torch.ones(64, device="standin")), first)


def test_products_round_where_tf32_is_allowed() -> None:
    torch.manual_seed(0)
    first, second = torch.randn(32, 32), torch.randn(32, 32)
    image, weight = torch.randn(1, 1, 9, 9), torch.randn(1, 1, 3, 3)

    def off(on_host: torch.Tensor, there: torch.Tensor) -> float:
        return float((there.cpu() - on_host).norm() / on_host.norm())

    def products() -> tuple[float, float]:
        conv = nn.functional.conv2d(image.to("standin"), weight.to("standin"))
        product = first.to("standin") @ second.to("standin")
        return off(first @ second, product), off(nn.functional.conv2d(image, weight), conv)

    of_matrices, of_convolutions = products()  # as PyTorch begins
    assert of_matrices < 1e-6 < 1e-5 < of_convolutions
    precision, allowed = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = False
        of_matrices, of_convolutions = products()
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = allowed
    assert of_convolutions < 1e-6 < 1e-5 < of_matrices


def test_autocast_lowers_products() -> None:
    layer, batch = nn.Linear(4, 4).to("standin"), torch.randn(2, 4, device="standin")
    with torch.autocast("standin", torch.bfloat16):
        assert layer(batch).dtype == torch.bfloat16


def test_the_clock_waits_for_work_only_where_somebody_does() -> None:
    tensor = torch.zeros(1000, device="standin")
    with standin.VirtualClock(per_launch=1.0, per_number=1.0) as clock:
        tensor.relu()
        assert clock.now() == 1.0  # 2000 numbers are read and written meanwhile
        tensor.sum().item()
        assert clock.now() == 1.0 + 2000.0 + 1001.0


def test_children_have_it_too() -> None:
    code = "import torch; print(torch.accelerator.current_accelerator())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert found.stdout.strip() == "standin"
    torch.accelerator.synchronize()
