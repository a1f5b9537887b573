from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from autoaccum.memory.accelerator import AcceleratorMemory
from autoaccum.memory.cpu import CpuMemory
from autoaccum.memory.devices import memory_of
from autoaccum.memory.mps import MpsMemory
from autoaccum.memory.simulated import MemorySimulation, OutOfMemoryAt, SimulatedMemory

CPU = torch.device("cpu")
KIB = 1024


def kibibytes(number: int) -> torch.Tensor:
    return torch.ones(number * KIB // 4)


class TestCounting:
    def test_a_tensor_counts_while_it_lives(self) -> None:
        with MemorySimulation(KIB * KIB) as device:
            first = kibibytes(4)
            assert device.used == 4 * KIB
            second = kibibytes(3)
            assert device.used == 7 * KIB
            del first
            assert device.used == 3 * KIB
            del second
            assert device.used == 0

    def test_a_storage_counts_once_and_as_a_whole_until_its_last_view_is_gone(self) -> None:
        with MemorySimulation(KIB * KIB) as device:
            base = kibibytes(4)
            view = base[:2]
            other = view.view(2, 1)
            assert device.used == 4 * KIB
            del base, view
            assert device.used == 4 * KIB
            del other
            assert device.used == 0

    def test_a_tensor_from_before_counts_from_its_first_use(self) -> None:
        before = kibibytes(4)
        with MemorySimulation(KIB * KIB) as device:
            assert device.used == 0
            before.add_(1)
            assert device.used == 4 * KIB
            before.add_(1)
            assert device.used == 4 * KIB

    def test_what_backward_needs_counts_until_backward_has_run(self) -> None:
        with MemorySimulation(KIB * KIB) as device:
            weight = kibibytes(4).requires_grad_()
            output = weight.exp()  # its result is saved
            loss = output.sum()
            del output
            assert device.used == 8 * KIB + 4
            loss.backward()
            del loss
            assert device.used == 8 * KIB  # the weight and its gradient
            weight.grad = None
            assert device.used == 4 * KIB

    def test_lists_of_tensors_count(self) -> None:
        with MemorySimulation(KIB * KIB) as device:
            results = torch._foreach_add([kibibytes(1), kibibytes(2)], 1.0)
            assert device.used == 3 * KIB
            del results
            assert device.used == 0

    def test_a_storage_that_grows_or_shrinks_is_counted_at_its_new_size(self) -> None:
        with MemorySimulation(KIB * KIB) as device:
            tensor = kibibytes(1)
            tensor.resize_(4 * KIB)
            assert device.used == 16 * KIB
            tensor.untyped_storage().resize_(KIB)  # not an operation: seen at the next one
            tensor.resize_(KIB // 4)
            assert device.used == KIB
            del tensor
            assert device.used == 0

    def test_meta_and_fake_tensors_and_empty_ones_take_nothing(self) -> None:
        with MemorySimulation(KIB) as device:
            meta = torch.ones(2**40, device="meta")
            empty = torch.ones(0, 5)
            with FakeTensorMode():
                fake = torch.ones(2**40)
                assert fake.device == CPU
                assert (fake * 2).shape == fake.shape
            assert (meta * 2).numel() + empty.numel() == 2**40
            assert device.used == device.peak == 0

    def test_the_parts_of_sparse_tensors_count(self) -> None:
        dense = torch.eye(8)
        with MemorySimulation(KIB * KIB) as device:
            coo = dense.to_sparse()
            gc.collect()
            assert device.used == 8 * 8 * 4 + 8 * 4 + 2 * 8 * 8  # the dense one, the values, two int64 indices a value
            del coo
            assert device.used == 8 * 8 * 4

    @pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
    @pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
    def test_the_parts_of_compressed_sparse_tensors_count(self, layout: torch.layout) -> None:
        dense = torch.eye(8)
        with MemorySimulation(KIB * KIB) as device:
            compressed = dense.to_sparse(layout=layout)
            assert device.used >= 8 * 8 * 4 + 8 * 4 + 8 * 8 + 9 * 8
            del compressed
            assert device.used == 8 * 8 * 4

    def test_the_parts_of_a_wrapper_subclass_count(self) -> None:
        with MemorySimulation(KIB * KIB) as device:
            both = TwoTensor(kibibytes(4), kibibytes(4)) + 1
            assert device.used == 8 * KIB
            del both
            assert device.used == 0

    def test_an_opaque_layout_is_skipped(self) -> None:
        with MemorySimulation(KIB * KIB) as device:
            opaque = torch.ones(4, 4).to_mkldnn()
            assert device.used == 0
            assert opaque.to_dense().sum() == 16

    @settings(deadline=None)
    @given(st.lists(st.tuples(st.sampled_from(["new", "view", "drop"]), st.integers(0, 99)), max_size=30))
    def test_used_is_always_the_sum_of_the_distinct_live_storages(self, steps: list[tuple[str, int]]) -> None:
        with MemorySimulation(2**40) as device:
            tensors: list[torch.Tensor] = []
            most = 0
            for step, number in steps:
                if step == "new":
                    tensors.append(torch.zeros(number + 1, dtype=torch.uint8))
                elif tensors and step == "view":
                    tensors.append(tensors[number % len(tensors)][:1])
                elif tensors:
                    del tensors[number % len(tensors)]
                live = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
                most = max(most, sum(live.values()))
                assert device.used == sum(live.values())
            assert device.peak == most


class TestLimit:
    def test_exactly_the_limit_fits_and_one_byte_more_does_not(self) -> None:
        with MemorySimulation(4 * KIB) as device:
            kept = kibibytes(4)
            with pytest.raises(torch.OutOfMemoryError):
                torch.ones(1, dtype=torch.uint8)
            assert device.used == device.peak == 4 * KIB == kept.untyped_storage().nbytes()

    def test_the_error_carries_the_numbers(self) -> None:
        with MemorySimulation(4 * KIB):
            kept = kibibytes(3)
            with pytest.raises(torch.OutOfMemoryError) as raised:
                kept + 1
        assert "Tried to allocate 3.00 KiB (3072 bytes)" in str(raised.value)
        assert "capacity of 4.00 KiB (4096 bytes)" in str(raised.value)
        assert "3.00 KiB (3072 bytes) are in use" in str(raised.value)

    def test_what_did_not_fit_is_neither_counted_nor_kept_alive_by_the_error(self) -> None:
        with MemorySimulation(8 * KIB) as device:
            kept = kibibytes(4)
            try:
                torch.cat([kept, kept, kept])
            except torch.OutOfMemoryError:
                assert not [o for o in gc.get_objects() if type(o) is torch.Tensor and o.shape == (3 * KIB,)]
            assert device.used == device.peak == 4 * KIB
            again = kibibytes(4)
            assert device.used == 8 * KIB
        assert again.sum() == kept.sum()

    def test_inputs_that_do_not_fit_count_and_stop_the_operation_before_it_runs(self) -> None:
        before = kibibytes(4)
        with MemorySimulation(KIB) as device:
            with pytest.raises(torch.OutOfMemoryError):
                before.add_(1)
            assert device.used == 4 * KIB
        assert before.max() == 1

    def test_the_limit_moves_while_it_is_active(self) -> None:
        with MemorySimulation(4 * KIB) as device:
            kept = kibibytes(4)
            device.limit = 12 * KIB
            more = kibibytes(4)
            device.limit = 2 * KIB
            kept.add_(more)  # takes no memory
            with pytest.raises(torch.OutOfMemoryError):
                kept.add(more)
            assert device.used == 8 * KIB

    def test_it_raises_in_backward_and_leaves_a_graph_that_can_be_freed(self) -> None:
        weight = kibibytes(4).requires_grad_()
        with MemorySimulation(KIB * KIB) as device:
            loss = weight.exp().sum()
            device.limit = device.used
            with pytest.raises(torch.OutOfMemoryError):
                loss.backward()
            assert weight.grad is None
            del loss
            assert device.used == 4 * KIB
            device.limit = KIB * KIB
            weight.exp().sum().backward()
            assert weight.grad is not None

    def test_nothing_counts_or_raises_after_it_ends(self) -> None:
        with MemorySimulation(KIB) as device:
            pass
        assert kibibytes(4).sum() == KIB
        assert device.used == 0


class TestPeak:
    def test_it_is_the_most_that_lived_at_once_since_the_reset(self) -> None:
        with MemorySimulation(KIB * KIB) as device:
            kept = kibibytes(4)
            kibibytes(16)
            assert device.peak == 20 * KIB
            device.reset_peak()
            assert device.peak == 4 * KIB
            kibibytes(2)
            assert device.peak == 6 * KIB
            assert kept.sum() == KIB


class TestNesting:
    def test_the_innermost_wins(self) -> None:
        with MemorySimulation(4 * KIB) as outer:
            with MemorySimulation(64 * KIB) as inner:
                large = kibibytes(16)
                assert (inner.used, outer.used) == (16 * KIB, 0)
                del large
            with pytest.raises(torch.OutOfMemoryError):
                kibibytes(16)
            with MemorySimulation(KIB), pytest.raises(torch.OutOfMemoryError):
                kibibytes(2)
            kept = kibibytes(2)
            assert outer.used == 2 * KIB
            assert kept.sum() == KIB // 2


class TestSimulatedMemory:
    def test_it_reports_the_simulation_s_numbers(self) -> None:
        with MemorySimulation(64 * KIB) as device:
            memory = memory_of(CPU)
            assert isinstance(memory, SimulatedMemory)
            kept = kibibytes(4)
            kibibytes(8)
            assert (memory.limit(), memory.used(), memory.peak()) == (64 * KIB, 4 * KIB, 12 * KIB)
            memory.reset_peak()
            assert memory.peak() == 4 * KIB
            device.limit = 32 * KIB
            assert memory.limit() == 32 * KIB
            assert kept.sum() == KIB

    def test_raising_the_retries_again_and_again_is_strain(self) -> None:
        with MemorySimulation(KIB) as device:
            memory = memory_of(CPU)
            found = []
            for look in range(34):  # the first has nothing to compare with
                device.retries += look % 2
                found.append(memory.strained())
            assert [look for look, reason in enumerate(found) if reason is not None] == [16, 32]
            device.retries += 1
            assert memory.usage().retries == 18

    def test_memory_of_takes_the_backend_of_the_device(self) -> None:
        assert isinstance(memory_of(CPU), CpuMemory)
        with MemorySimulation(KIB):
            assert isinstance(memory_of(CPU), SimulatedMemory)
            assert isinstance(memory_of(torch.device("cuda", 0)), AcceleratorMemory)
            assert isinstance(memory_of(torch.device("mps")), MpsMemory)
        assert isinstance(memory_of(CPU), CpuMemory)

    def test_memory_of_takes_the_innermost_simulation(self) -> None:
        with MemorySimulation(2), MemorySimulation(1):
            assert memory_of(CPU).limit() == 1


def train_step(model: torch.nn.Module, inputs: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = checkpoint(model, inputs, use_reentrant=False)
    hidden.float().square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data.sub_(parameter.grad)
    model.zero_grad()


class TestOutOfMemoryAt:
    def test_it_raises_once_and_before_the_operation_runs(self) -> None:
        tensor = torch.zeros(3)
        with OutOfMemoryAt(2) as fault:
            tensor.add_(1)
            with pytest.raises(torch.OutOfMemoryError, match="operation 2"):
                tensor.add_(10)
            tensor.add_(100)
        assert tensor.tolist() == [101, 101, 101]
        assert fault.operations == 3

    def test_every_operation_of_forward_recomputation_backward_and_update_can_be_hit(self) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)
        )
        inputs = torch.randn(5, 4)
        with OutOfMemoryAt(None) as count:
            train_step(model, inputs)
        assert count.operations > 60
        for number in range(1, count.operations + 1):
            with OutOfMemoryAt(number) as fault, pytest.raises(torch.OutOfMemoryError):
                train_step(model, inputs)
            assert fault.operations == number
            model.zero_grad()
        with OutOfMemoryAt(count.operations + 1) as fault:
            train_step(model, inputs)
        assert fault.operations == count.operations

    def test_it_sees_the_same_operations_inside_and_outside_other_modes(self) -> None:
        model = torch.nn.Linear(4, 4)
        inputs = torch.randn(5, 4)
        with OutOfMemoryAt(None) as alone:
            train_step(model, inputs)
        with MemorySimulation(KIB * KIB), OutOfMemoryAt(None) as inside:
            train_step(model, inputs)
        with OutOfMemoryAt(None) as outside, MemorySimulation(KIB * KIB):
            train_step(model, inputs)
        assert alone.operations == inside.operations == outside.operations > 10

    def test_what_lives_after_it_raised_is_counted_right(self) -> None:
        with MemorySimulation(KIB * KIB) as device:
            model = torch.nn.Linear(64, 64)
            before = device.used
            for number in (1, 3, 5, 7):
                with OutOfMemoryAt(number), pytest.raises(torch.OutOfMemoryError):
                    train_step(model, torch.ones(32, 64))
                model.zero_grad()
                gc.collect()
                assert device.used == before
