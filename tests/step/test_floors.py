"""32 bits are multiplied as such where gradients are compared, and 64 bits tell rounding from a wrong weight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.events import Verified
from autoaccum.step.rounding import full_precision, is_right_in_64_bits
from autoaccum.step.verdict import decide
from tests.devices import DEVICE
from tests.step.measuring import measurement_of

pytestmark = pytest.mark.measured

Settings = tuple[str, str, str, str, bool]


def settings() -> Settings:
    backends: Any = torch.backends
    return (
        torch.get_float32_matmul_precision(),
        backends.cuda.matmul.fp32_precision,
        backends.mkldnn.matmul.fp32_precision,
        backends.cudnn.conv.fp32_precision,
        backends.cudnn.allow_tf32,
    )


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    precision, allowed = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = allowed


class TestFullPrecision:
    @pytest.mark.parametrize("precision", ["highest", "high", "medium"])
    def test_the_settings_are_those_of_32_bits_within_it_and_the_programs_after_it(self, precision: str) -> None:
        torch.set_float32_matmul_precision(precision)
        before = settings()
        with full_precision(torch.device("cpu")):
            assert {"tf32", "bf16"}.isdisjoint(settings())
            assert settings()[0] == "highest"
            assert not torch.backends.cudnn.allow_tf32
            assert not torch.backends.cuda.matmul.allow_tf32  # which PyTorch refuses to read where both contradict
        assert settings() == before

    def test_settings_of_the_newer_kind_alone(self) -> None:
        backends: Any = torch.backends
        place = backends.cuda.matmul
        before = place.fp32_precision
        place.fp32_precision = "tf32"
        try:
            with full_precision(torch.device("cpu")):
                assert place.fp32_precision == "ieee"
                assert torch.get_float32_matmul_precision() == "highest"
            assert place.fp32_precision == "tf32"
            with pytest.raises(RuntimeError, match="mix of the legacy"):  # as before
                torch.get_float32_matmul_precision()
        finally:
            place.fp32_precision = before

    def test_an_error_puts_them_back_too(self) -> None:
        torch.set_float32_matmul_precision("medium")
        before = settings()
        with pytest.raises(ZeroDivisionError), full_precision(torch.device("cpu")):
            _ = 1 / 0
        assert settings() == before


@pytest.mark.device
def test_a_run_that_multiplies_fewer_bits_is_measured_with_all_of_them(tmp_path: Path) -> None:
    torch.set_float32_matmul_precision("medium")
    seen = tmp_path / "seen"  # a list would be put back with the rest that a measurement leaves no trace in

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        with seen.open("a") as file:
            print(torch.get_float32_matmul_precision(), file=file)
        return cross_entropy(model(batch[0]), batch[1])

    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 64), nn.Linear(64, 3))
    data = torch.randn(32, 3, 8, 8), torch.randint(0, 3, (32,))
    options: dict[str, Any] = {"effective_batch": 16, "micro_batch": 5, "training_step": step, "device": DEVICE}
    result = autoaccum.fit(nn.Sequential(*layers), data, **options, progress=False)
    events = [event for event in result.events if isinstance(event, Verified)]
    assert [event.passed for event in events] == [True]
    assert events[0].error < 2e-5
    assert set(seen.read_text().split()) == {"medium", "highest"}
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_samples_that_meet_a_little_are_no_rounding(dtype: torch.dtype) -> None:
    """The opposite order is another loss, by as much as a cut is."""

    def meeting(model: Any, batch: Any) -> torch.Tensor:
        outputs = model(batch[0])
        return cross_entropy(outputs, batch[1]) + 1e-3 * (outputs.roll(1, 0) * outputs).mean()

    torch.manual_seed(0)
    model = nn.Linear(8, 3).to(dtype)
    batch = torch.randn(6, 8).to(dtype), torch.arange(6) % 3
    with measurement_of(meeting, model, batch=batch) as measurement:
        decision = decide(measurement, 1, "items")
    assert not decision.passed
    assert 2e-5 < decision.error < 1e-3


def test_a_gradient_that_cancels_is_rounded() -> None:
    """The mean of large numbers of both signs, in 32 bits."""

    def cancelling(model: Any, batch: Any) -> torch.Tensor:
        return (model(batch[0]) * batch[1]).mean()

    torch.manual_seed(0)
    model = nn.Linear(8, 1).to(torch.float32)
    x = torch.randn(3, 8).repeat(2, 1)
    signs = torch.tensor([1.0, 1, 1, -1, -1, -1])[:, None] * 3e3 + torch.randn(6, 1)
    with measurement_of(cancelling, model, batch=(x, signs)) as measurement:
        decision = decide(measurement, 1, "items")
    assert decision.passed
    assert decision.error > 2e-5, "or the test shows nothing"


def test_a_table_that_is_made_without_a_type_holds_64_bits_then() -> None:
    """As listwise losses fill one; a mean of large numbers that cancel, in 32 bits."""

    def filled(model: Any, batch: Any) -> torch.Tensor:
        table = torch.full((len(batch[0]), 2), -1.0)
        table[torch.arange(len(table)), 0] = (model(batch[0]) * batch[1])[:, 0].float()
        return table[:, 0].mean()

    torch.manual_seed(0)
    model, x = nn.Linear(8, 1).to(torch.float32), torch.randn(3, 8).repeat(2, 1)
    signs = torch.tensor([1.0, 1, 1, -1, -1, -1])[:, None] * 3e3 + torch.randn(6, 1)
    with measurement_of(filled, model, batch=(x, signs)) as measurement:
        decision = decide(measurement, 1, "items")
    assert decision.passed
    assert decision.error > 2e-5, "or the test shows nothing"
    assert torch.get_default_dtype() is torch.float32


class Rounded:
    """A measurement, as far as 64 bits ask for it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.parameters = [torch.ones(2, dtype=dtype, requires_grad=True), torch.ones(2, dtype=dtype)]
        self.is_wide = False

    @contextmanager
    def widened(self) -> Iterator[None]:
        self.is_wide = True
        yield
        self.is_wide = False


def is_right(measured: Rounded, error: Any) -> tuple[bool, int]:
    """Return whether such an error is right in 64 bits, and how often it was measured in them."""
    asked: list[bool] = []

    def error_of() -> float:
        asked.append(measured.is_wide)
        return error() if callable(error) else error

    found = is_right_in_64_bits(measured, error_of)
    assert all(asked), "measured in 32 bits"
    return found, len(asked)


@pytest.mark.parametrize(("error", "right"), [(1e-7, True), (1.1e-6, False), (float("nan"), False)])
def test_64_bits_are_right_up_to_their_own_tolerance(error: float, right: bool) -> None:
    assert is_right(Rounded(), error) == (right, 1)
    assert is_right(Rounded(torch.float64), error) == (False, 0), "they are in 64 bits already"


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError("CUDA out of memory"), TypeError("expected Float")])
def test_where_nothing_can_be_computed_in_64_bits_what_32_have_shown_stands(failure: Exception) -> None:
    def fail() -> float:
        raise failure

    assert is_right(Rounded(), fail)[0] is False


def test_parameters_that_somebody_listens_to_are_not_widened() -> None:
    measured = Rounded()
    p = measured.parameters[0]
    adder = p.expand_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert is_right(measured, 0.0) == (False, 0), "it is held"
    del adder
    assert is_right(measured, 0.0) == (True, 1)


def convolutions(size: int = 96) -> tuple[nn.Module, Any]:
    """Pictures so large that the gradient of a bias, a sum over all places of them, is off in its fourth digit."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))
    return model, (torch.randn(6, 3, size, size), torch.randint(0, 4, (6,)))


class TestIn64Bits:
    def test_what_only_rounds_is_exact_and_says_up_to_where(self) -> None:
        model, batch = convolutions()
        before = [(p.data_ptr(), p.detach().clone()) for p in model.parameters()]
        found = autoaccum.check(model, batch, loss_fn=cross_entropy, device="cpu")
        assert found.passed
        assert found.error is not None
        assert found.error <= found.tolerance < 1e-2
        for p, (place, values) in zip(model.parameters(), before, strict=True):
            assert p.dtype is torch.float32
            assert p.data_ptr() == place
            assert torch.equal(p, values)

    @pytest.mark.weighted
    @pytest.mark.parametrize("wrong", [3e-5, 1e-3])
    def test_a_weight_that_is_a_little_wrong_is_no_rounding(self, wrong: float) -> None:
        model, batch = convolutions(8)

        def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return cross_entropy(outputs, labels) * (1 + wrong * len(labels))

        assert autoaccum.check(model, batch, loss_fn=loss, device="cpu").passed is False

    @pytest.mark.weighted
    def test_what_goes_by_the_type_is_no_rounding(self) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        batch = torch.randn(6, 4), torch.randn(6, 1)

        def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            squares = (outputs - targets).square()
            return squares.sum() / (len(squares) + torch.finfo(squares.dtype).eps ** 0.5)

        assert autoaccum.check(model, batch, loss_fn=loss, device="cpu").passed is False

    @pytest.mark.weighted
    def test_where_there_is_no_memory_for_it_what_32_bits_have_shown_stands(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(batch: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr("autoaccum.step.measurement.widen", full)
        model, batch = convolutions()
        assert autoaccum.check(model, batch, loss_fn=cross_entropy, device="cpu").passed is False
        assert {p.dtype for p in model.parameters()} == {torch.float32}

    @pytest.mark.weighted
    def test_whoever_holds_what_adds_to_gradients_keeps_it(self) -> None:
        model, batch = convolutions()
        seen: list[int] = []
        adders = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]  # type: ignore[union-attr]
        for adder in adders:
            adder.register_hook(lambda *_: seen.append(1))
        assert autoaccum.check(model, batch, loss_fn=cross_entropy, device="cpu").passed is False
        seen.clear()
        cross_entropy(model(batch[0]), batch[1]).backward()
        assert len(seen) == len(adders)

    @pytest.mark.weighted
    def test_a_buffer_that_a_failed_forward_has_replaced_is_what_it_was(self) -> None:
        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
                self.register_buffer("seen", torch.zeros(4))

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                self.seen = self.seen * 0.9 + inputs.mean(0).detach()
                return self.drop(self.layer(inputs) @ torch.eye(4))  # type: ignore[no-any-return]

        torch.manual_seed(0)
        model, batch = Counting(), (torch.randn(6, 4), torch.randint(0, 4, (6,)))

        def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return cross_entropy(outputs, labels) * (1 + 1e-3 * len(labels))

        assert autoaccum.check(model, batch, loss_fn=loss, device="cpu").passed is False
        assert model.seen.dtype is torch.float32

    @pytest.mark.weighted
    @pytest.mark.every(3)
    @pytest.mark.parametrize("wrong", [0.0, 1e-3])
    @pytest.mark.parametrize("how", ["weights", "product", "float", "type", "softmax", "written"])
    def test_code_that_is_written_for_32_bits_is_computed_in_64(self, how: str, wrong: float) -> None:
        """A wrong weight is found by that, and rounding is none."""
        model, batch = convolutions()
        weights, ones = torch.tensor([0.3, 1.0, 2.5, 0.7]), torch.ones(4, 4)

        def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            factor = 1 + wrong * len(labels)
            if how == "weights":  # which are divided by, so that cuts are weighted by what they come to
                return cross_entropy(outputs, labels, weight=weights) * factor
            if how == "product":
                outputs = outputs @ ones + outputs
            elif how == "float":
                outputs = outputs.float()
            elif how == "type":
                outputs = outputs.to(torch.float32).to(device="cpu", dtype=torch.float32)
            elif how == "softmax":
                return -outputs.log_softmax(1, dtype=torch.float32).gather(1, labels[:, None]).mean() * factor
            else:
                made = torch.zeros_like(outputs, dtype=torch.float32)
                made[:] = outputs
                outputs = made
            return cross_entropy(outputs, labels) * factor

        found = autoaccum.check(model, batch, loss_fn=loss, device="cpu")
        assert found.passed is (wrong == 0.0)
        assert found.error is not None
        assert found.error > 2e-5, "off by more than what all kernels are"

    def test_a_nan_is_none(self) -> None:
        model, batch = convolutions(8)
        model[0].register_forward_hook(lambda module, args, output: output * torch.tensor(float("inf")) * 0)
        with pytest.raises(autoaccum.AutoaccumError):
            autoaccum.check(model, batch, loss_fn=cross_entropy, device="cpu")

    @pytest.mark.parametrize("seed", [5, 6, 11])
    def test_a_relu_that_rounding_turns_is_no_wrong_weight(self, seed: int) -> None:
        """Its input is 0 but for rounding, before a normalisation, so that a bias has another gradient in some cuts."""

        def block(inputs: int, outputs: int) -> list[nn.Module]:
            return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()]

        torch.manual_seed(seed)
        layers = [*block(3, 8), *block(8, 8), nn.MaxPool2d(2), *block(8, 16), *block(16, 16), nn.MaxPool2d(2)]
        model = nn.Sequential(*layers, *block(16, 32), *block(32, 32), nn.Conv2d(32, 3, 1))
        batch = torch.randn(3, 3, 64, 64), torch.randint(0, 3, (3, 16, 16))
        assert autoaccum.check(model, batch, loss_fn=cross_entropy, device="cpu").passed

    def test_dropout_and_buffers_are_what_they_were(self) -> None:
        model, batch = convolutions()
        model = nn.Sequential(model[:4], nn.Dropout2d(0.2), nn.BatchNorm2d(32).eval(), model[4:])  # type: ignore[index]
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.train(False)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        random_state = torch.get_rng_state()
        autoaccum.check(model, batch, loss_fn=cross_entropy, device="cpu")
        assert torch.equal(torch.get_rng_state(), random_state)
        for name, value in model.state_dict().items():
            assert value.dtype is state[name].dtype
            assert torch.equal(value, state[name]), name
