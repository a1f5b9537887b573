from __future__ import annotations

from typing import Any

import pytest
import torch

import autoaccum.testing
from autoaccum.errors import ArgumentError
from autoaccum.memory import clock as clock_in_use
from autoaccum.memory.devices import memory_of
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.testing import manual_clock, oom_at, simulated_memory


def gradient(model: torch.nn.Module, inputs: torch.Tensor, micro_batch: int) -> tuple[list[torch.Tensor], int]:
    """A loop as users write it: halves on an out-of-memory error, and starts the batch again."""
    while True:
        try:
            for chunk in inputs.split(micro_batch):
                model(chunk).square().sum().backward()
            break
        except RuntimeError as error:
            if not is_out_of_memory(error) or micro_batch == 1:
                raise
        model.zero_grad()
        micro_batch //= 2
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return gradients, micro_batch


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)).double()


def test_a_loop_that_halves_survives_a_small_memory(model: torch.nn.Module) -> None:
    inputs = torch.randn(256, 8, dtype=torch.float64)
    expected, _ = gradient(model, inputs, 256)
    with simulated_memory("256KiB") as device:
        found, micro_batch = gradient(model, inputs, 256)
    assert 1 < micro_batch < 256
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert 128 * 1024 < device.peak <= device.limit == 256 * 1024


def test_a_loop_that_halves_survives_an_error_at_every_operation(model: torch.nn.Module) -> None:
    inputs = torch.randn(8, 8, dtype=torch.float64)
    expected, _ = gradient(model, inputs, 8)
    with oom_at(None) as count:
        gradient(model, inputs, 8)
    for number in range(1, count.operations + 1):
        with oom_at(number):
            found, micro_batch = gradient(model, inputs, 8)
        assert micro_batch == 4
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_memory_below_one_sample_s_need_is_reported(model: torch.nn.Module) -> None:
    inputs = torch.randn(8, 8, dtype=torch.float64)
    with simulated_memory(30_000), pytest.raises(torch.OutOfMemoryError):
        gradient(model, inputs, 8)


@pytest.mark.parametrize(("limit", "limit_bytes"), [("64MiB", 64 * 2**20), ("1.5 kB", 1500), (4096, 4096), (0, 0)])
def test_the_limit_is_bytes_or_a_text_with_a_unit(limit: int | str, limit_bytes: int) -> None:
    with simulated_memory(limit) as device:
        assert device.limit == limit_bytes
        assert memory_of(torch.device("cpu")).limit() == limit_bytes


@pytest.mark.parametrize("limit", ["64 miles", "", -1, "-1", 1.5, None])
def test_a_limit_that_is_no_number_of_bytes_is_refused_by_name(limit: Any) -> None:
    with pytest.raises(ArgumentError, match="limit_bytes=") as raised:
        simulated_memory(limit)
    assert raised.value.value == limit
    assert isinstance(raised.value, TypeError) == (limit is None or isinstance(limit, float))


@pytest.mark.parametrize("n", [0, -1, 1.5, "2"])
def test_an_operation_that_cannot_be_is_refused_by_name(n: Any) -> None:
    with pytest.raises(ArgumentError, match="n="):
        oom_at(n)


def test_everything_public_is_listed() -> None:
    assert sorted(autoaccum.testing.__all__) == ["manual_clock", "oom_at", "simulated_memory"]


def test_a_manual_clock_moves_when_it_is_told_to_and_by_waiting() -> None:
    with manual_clock(5.0) as clock:
        assert (clock.now(), clock.stamp()) == (5.0, 5.0)
        clock.advance(1.5)
        clock.sleep(2.0)
        assert (clock.now(), clock.stamp()) == (8.5, 8.5)
        clock_in_use.sleep(1.0)
        assert (clock_in_use.now(), clock_in_use.stamp()) == (9.5, 9.5)
    with manual_clock() as clock:
        assert clock_in_use.now() == 0.0


def test_a_run_reads_the_manual_clock_and_no_other() -> None:
    with manual_clock() as clock:

        def training_step(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            clock.advance(0.25)
            loss: torch.Tensor = model(batch[0]).square().mean()
            return loss

        result = autoaccum.fit(
            torch.nn.Linear(8, 1),
            (torch.zeros(16, 8),),
            training_step=training_step,
            effective_batch=8,
            micro_batch=2,
            device="cpu",
            progress=False,
        )
    assert [report.seconds for report in result.history] == [1.0, 1.0], "four micro-batches each"


def test_flags_are_no_numbers() -> None:
    for refused in (lambda: simulated_memory(True), lambda: oom_at(True)):
        with pytest.raises(ArgumentError):
            refused()
    with pytest.raises(ArgumentError, match="seconds"), manual_clock("3"):  # type: ignore[arg-type]
        pass
