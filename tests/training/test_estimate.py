"""``estimate``: counted bytes within 1 % of a run's, nothing touched, and what cannot be estimated says so."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset

import autoaccum
from autoaccum import errors
from autoaccum.testing import simulated_memory
from tests.models import classes, mlp

MIB = 2**20


class Block(nn.Module):
    """Attention and two layers, as in a GPT."""

    def __init__(self, width: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.inner_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.attend(self.norm(x)).chunk(3, -1)]
        mixed = scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.inner(self.inner_norm(x)))


def gpt(*, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(64, dropout=dropout) for _ in range(6)]
    return nn.Sequential(nn.Embedding(256, 64), *blocks, nn.Linear(64, 256))


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), *[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)])


def recurrent() -> nn.Module:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(32, 64, num_layers=2, batch_first=True), nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.head(self.lstm(x)[0][:, -1])
            return found

    torch.manual_seed(0)
    return Recurrent()


def of_tokens(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def tokens(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(num_samples, 48, dtype=torch.long), torch.zeros(num_samples, 48, dtype=torch.long)


def images(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(num_samples, 3, 24, 24), torch.zeros(num_samples, dtype=torch.long)


def rows(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(num_samples, 64), torch.randn(num_samples, 256)


def series(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(num_samples, 20, 32), torch.zeros(num_samples, dtype=torch.long)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], Callable[..., Any]]] = {
    "a GPT": (gpt, tokens, of_tokens),
    "a GPT with dropout": (lambda: gpt(dropout=0.1), tokens, of_tokens),
    "a net of convolutions": (conv_net, images, cross_entropy),
    "a deep net": (deep, rows, mse_loss),
}


def counted(
    model: nn.Module, data: Any, micro_batch: int, limit: int | str = "8GiB", **options: Any
) -> autoaccum.StepReport:
    """The report of a steady window of a run on a simulated device."""
    sizes: dict[str, Any] = {"micro_batch": micro_batch} if limit == "8GiB" else {
        "min_micro_batch": micro_batch, "max_micro_batch": micro_batch
    }  # fmt: skip
    with simulated_memory(limit):
        result = autoaccum.fit(
            model, data, effective_batch=2 * micro_batch, steps=3, device="cpu", progress=False, cache=False,
            verify=False, headroom=0.0, **sizes, **options,
        )  # fmt: skip
    return result.history[-1]


def estimate(model: nn.Module, batch: Any = None, **options: Any) -> autoaccum.Estimate:
    given = {"loss_fn": cross_entropy, "device_memory": "1GiB", **options}
    return autoaccum.estimate(model, classes(6) if batch is None else batch, **given)


def bytes_of(data: Any) -> int:
    """Those of tensors that a simulated device holds, and a real one does not: the data that windows are cut from."""
    return sum(tensor.nbytes for tensor in data)


class TestBytes:
    @pytest.mark.filterwarnings("ignore::autoaccum.errors.AutoaccumWarning")
    @pytest.mark.every(3)
    @pytest.mark.parametrize("memory_saving", ["off", "checkpoint"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_are_those_of_a_run_within_a_percent(self, kind: str, memory_saving: Any) -> None:
        make, data_of, loss_fn = KINDS[kind]
        data = data_of(64)
        found = estimate(make(), data_of(3), loss_fn=loss_fn, max_micro_batch=32, memory_saving=memory_saving)
        real = counted(make(), data, 32, loss_fn=loss_fn, memory_saving=memory_saving)
        assert found.micro_batch == 32
        assert found.memory_saving == real.memory_saving
        assert found.peak_bytes == pytest.approx(real.peak_bytes - bytes_of(data), rel=0.01)

    def test_on_the_level_that_a_run_stands_on(self) -> None:
        data = tokens(64)
        off = estimate(gpt(), tokens(4), loss_fn=of_tokens, max_micro_batch=32, memory_saving="off").peak_bytes
        limit = int(0.9 * off)
        found = estimate(
            gpt(),
            tokens(4),
            loss_fn=of_tokens,
            min_micro_batch=32,
            max_micro_batch=32,
            device_memory=limit,
            headroom=0.0,
        )
        real = counted(gpt(), data, 32, limit + bytes_of(data), loss_fn=of_tokens)
        assert found.memory_saving.startswith("checkpoint")
        assert found.memory_saving == real.memory_saving
        assert found.peak_bytes == pytest.approx(real.peak_bytes - bytes_of(data), rel=0.01)

    @pytest.mark.parametrize("precision", ["bf16", "fp32"])
    def test_in_each_precision(self, precision: Any) -> None:
        data = tokens(64)
        found = estimate(gpt(), tokens(2), loss_fn=of_tokens, max_micro_batch=32, precision=precision)
        real = counted(gpt(), data, 32, loss_fn=of_tokens, precision=precision)
        assert found.peak_bytes == pytest.approx(real.peak_bytes - bytes_of(data), rel=0.01)

    @pytest.mark.parametrize(
        "optimizer",
        [
            lambda p: torch.optim.SGD(p, lr=0.1),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            lambda p: torch.optim.AdamW(p, foreach=True),
            lambda p: torch.optim.AdamW(p, foreach=False),
            torch.optim.Adafactor,
        ],
        ids=["SGD", "momentum", "foreach", "one by one", "Adafactor"],
    )
    def test_with_each_optimizer(self, optimizer: Any) -> None:
        """Whose step may be the peak: it is of few samples."""
        data = rows(4)
        found = estimate(deep(), rows(2), loss_fn=mse_loss, max_micro_batch=2, optimizer=optimizer)
        real = counted(deep(), data, 2, loss_fn=mse_loss, optimizer=optimizer)
        assert found.peak_bytes == pytest.approx(real.peak_bytes - bytes_of(data), rel=0.02)

    def test_of_an_lstm(self) -> None:
        """Whose kernel keeps a workspace, of which its fake tells nothing."""
        data = series(64)
        found = estimate(recurrent(), series(2), max_micro_batch=32)
        real = counted(recurrent(), data, 32, loss_fn=cross_entropy)
        assert found.peak_bytes == pytest.approx(real.peak_bytes - bytes_of(data), rel=0.01)

    def test_parts_add_up_to_the_peak(self) -> None:
        found = estimate(gpt(), tokens(4), loss_fn=of_tokens, max_micro_batch=32)
        parts = found.parts
        weights = sum(p.nbytes for p in gpt().parameters())
        assert parts.parameters == parts.gradients == pytest.approx(weights, rel=0.01)
        assert parts.optimizer == pytest.approx(2 * weights, rel=0.05)  # AdamW's moments, and blocks for its counts
        held = parts.parameters + parts.gradients + parts.optimizer + parts.working
        assert held + 32 * parts.activations_per_sample == found.peak_bytes
        assert 0 <= parts.working < 0.2 * found.peak_bytes


class TestAnswer:
    def test_the_micro_batch_is_the_largest_that_fits_within_two_percent(self) -> None:
        found = estimate(gpt(), tokens(4), loss_fn=of_tokens, device_memory="64MiB")
        assert found.fits
        assert found.memory_saving == "off"
        assert 0.9 * 0.95 * 64 * MIB < found.peak_bytes <= 0.95 * 64 * MIB
        more = estimate(
            gpt(), tokens(4), loss_fn=of_tokens, device_memory="64MiB", min_micro_batch=int(1.05 * found.micro_batch) + 1,
            memory_saving="off",
        )  # fmt: skip
        assert more.peak_bytes > 0.95 * 64 * MIB

    def test_no_larger_than_is_of_use(self) -> None:
        assert estimate(mlp(), max_micro_batch=7).micro_batch == 7
        found = estimate(mlp(), effective_batch=100, max_micro_batch=30)
        assert (found.micro_batch, found.accumulation_steps) == (30, 4)
        assert estimate(mlp(), effective_batch=5).accumulation_steps == 1
        assert estimate(mlp()).accumulation_steps is None

    def test_goes_down_the_levels_of_a_run(self) -> None:
        """Of 32 samples at once: the limit is a little below what they take plainly."""
        options: dict[str, Any] = {"loss_fn": of_tokens, "min_micro_batch": 32, "max_micro_batch": 32, "headroom": 0.0}
        off = estimate(gpt(), tokens(4), **options)
        below = estimate(gpt(), tokens(4), **options, device_memory=off.peak_bytes - 1)
        assert off.fits
        assert below.fits
        assert off.memory_saving == "off"
        assert below.memory_saving.startswith("checkpoint, every ")
        refused = estimate(gpt(), tokens(4), **options, device_memory=off.peak_bytes - 1, memory_saving="off")
        assert not refused.fits
        assert (refused.micro_batch, refused.peak_bytes) == (32, off.peak_bytes)

    def test_what_does_not_fit_at_all_says_how_many_bytes_it_would_take(self) -> None:
        model = nn.Linear(1024, 1024)
        weights = sum(p.nbytes for p in model.parameters())
        found = estimate(model, (torch.randn(2, 1024), torch.randn(2, 1024)), loss_fn=mse_loss, device_memory="1MiB")
        assert not found.fits
        assert found.micro_batch == 1
        assert 4 * weights < found.peak_bytes < 5.1 * weights  # weights, gradients, two moments, a new gradient
        assert found.device_memory_bytes == MIB
        assert "DOES NOT FIT: 1 sample would take 20" in str(found)
        assert "there are 1.00 MiB" in str(found)

    def test_a_model_on_the_meta_device(self) -> None:
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(8192, 8192, bias=False) for _ in range(64)])
        found = estimate(model, (torch.randn(1, 8192), torch.randn(1, 8192)), loss_fn=mse_loss, device_memory="80GiB")
        assert found.fits
        assert found.parts.parameters == 64 * 8192 * 8192 * 4 == 16 * 1024 * MIB
        assert found.peak_bytes > 4 * found.parts.parameters
        assert all(p.is_meta for p in model.parameters())

    def test_two_samples_at_least_where_batch_norm_needs_them(self) -> None:
        assert estimate(conv_net(), images(2), device_memory=600).micro_batch == 2

    def test_of_data_as_fit_takes_it(self) -> None:
        class Rows(Dataset[Any]):
            def __len__(self) -> int:
                return 50

            def __getitem__(self, index: int) -> Any:
                return {"x": torch.randn(64), "y": torch.randn(256)}

        def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return mse_loss(model(batch["x"]), batch["y"])

        expected = estimate(deep(), rows(4), loss_fn=mse_loss, max_micro_batch=100).peak_bytes
        for data in (
            Rows(), DataLoader(Rows(), batch_size=3), {"x": torch.randn(5, 64), "y": torch.randn(5, 256)},
        ):  # fmt: skip
            found = estimate(deep(), data, loss_fn=None, training_step=step, max_micro_batch=100)
            assert found.peak_bytes == expected

    def test_samples_in_dim_1(self) -> None:
        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            return mse_loss(model(batch[0]).sum(0), batch[1])

        data = torch.randn(7, 4, 64), torch.randn(4, 256)
        found = estimate(deep(), data, loss_fn=None, training_step=step, batch_dim=1, max_micro_batch=10)
        plain = estimate(deep(), rows(4), loss_fn=mse_loss, max_micro_batch=70)
        assert found.peak_bytes == pytest.approx(plain.peak_bytes, rel=0.1)


class Looping(nn.Module):
    """A layer that is called with one sample at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.layer(row) for row in x])


class TestModelThatLoopsOverItsSamples:
    def test_is_estimated_up_to_a_size(self) -> None:
        assert estimate(Looping(), device_memory="1GiB", max_micro_batch=300).micro_batch == 300

    def test_and_where_memory_ends_before(self) -> None:
        assert 1 < estimate(Looping(), device_memory="64KiB").micro_batch < 300


class TestNoTrace:
    def test_the_model_and_random_states_are_what_they_were(self) -> None:
        model = conv_net()
        model.eval()
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        values = {name: tensor.clone() for name, tensor in tensors.items()}
        gradient = next(model.parameters()).grad = torch.ones(32, 3, 3, 3)
        np.random.seed(0)
        batch = images(4)
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index]

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            random.random()
            np.random.rand()
            return cross_entropy(nn.functional.dropout(model(batch[0])), batch[1])

        optimizer = torch.optim.Adam(model.parameters())
        estimate(model, batch, loss_fn=None, training_step=step, optimizer=optimizer, max_micro_batch=8)
        now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        assert all(now[name] is tensor for name, tensor in tensors.items())
        assert all(torch.equal(now[name], value) for name, value in values.items())
        assert next(model.parameters()).grad is gradient
        assert torch.equal(gradient, torch.ones(32, 3, 3, 3))
        assert not model.training
        assert not optimizer.state
        assert torch.equal(states[0], torch.get_rng_state())
        assert states[1] == random.getstate()
        assert np.array_equal(states[2], np.random.get_state()[1])  # type: ignore[index]

    def test_what_functions_keep_is_what_it_was(self) -> None:
        losses: list[Any] = []
        calls = 0
        head = nn.Linear(3, 3)

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            loss = cross_entropy(head(model(batch[0])), batch[1])
            losses.append(loss)
            return loss

        before = copy.deepcopy(head.state_dict())
        found = estimate(mlp(), loss_fn=None, training_step=step, max_micro_batch=4)
        assert losses == []
        assert calls == 0
        assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())
        assert all(p.grad is None for p in head.parameters())
        plain = estimate(mlp(), max_micro_batch=4)
        assert found.parts.parameters == plain.parts.parameters + 2 * 512, "what a function holds is trained, too"


class Routed(nn.Module):
    """Sends each sample to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(-1)
        outputs = x.new_zeros(len(x), 3)
        for index, expert in enumerate(self.experts):
            (where,) = torch.where(chosen == index)
            outputs = outputs.index_add(0, where, expert(x[where]))
        return outputs


class TestWhatNeedsValues:
    def test_routing_names_the_operation(self) -> None:
        with pytest.raises(errors.ValuesNeededError, match=r"model='Routed'.*nonzero.*autoaccum probe") as caught:
            estimate(Routed())
        assert "aten.nonzero" in caught.value.operation

    @pytest.mark.parametrize(
        ("ask", "operation"),
        [(lambda loss: loss.item(), "item|local_scalar"), (bool, "local_scalar|nonzero"),
         (lambda loss: loss.detach().numpy(), "numpy|tensor"), (lambda loss: loss.tolist(), "local_scalar|fake|tensor")],
        ids=["item", "bool", "numpy", "tolist"],
    )  # fmt: skip
    def test_so_does_python_that_asks_for_a_value(self, ask: Callable[[torch.Tensor], Any], operation: str) -> None:
        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            loss = cross_entropy(model(batch[0]), batch[1])
            ask(loss)
            return loss

        with pytest.raises(errors.ValuesNeededError) as caught:
            estimate(mlp(), loss_fn=None, training_step=step)
        assert any(word in caught.value.operation for word in operation.split("|")), caught.value.operation

    def test_an_error_of_the_users_own_is_as_it_is(self) -> None:
        with pytest.raises(RuntimeError, match="reduction dim|mat1") as caught:
            estimate(mlp(), (torch.randn(4, 9), torch.zeros(4, dtype=torch.long)))
        assert not isinstance(caught.value, errors.AutoaccumError)

    def test_a_parameter_that_nothing_passed_holds(self) -> None:
        other, model = nn.Linear(3, 3), mlp()
        model.register_forward_hook(lambda module, args, output: other(output))
        with pytest.raises(errors.ArgumentError, match="model='Sequential'.*a hook"):
            estimate(model)
        assert all(p.grad is None for p in other.parameters())


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no unit": ({"device_memory": "24 stone"}, errors.ArgumentError, "device_memory='24 stone': expected bytes"),
    "a share": ({"device_memory": 0.5}, errors.ArgumentTypeError, "device_memory=0.5"),
    "nothing": ({"device_memory": 0}, errors.ArgumentError, "device_memory=0"),
    "a number of GiB": (
        {"device_memory": 24}, errors.ArgumentError, r"^device_memory=24 is 24 bytes\. Pass device_memory='24GiB'\.$"
    ),
    "true": ({"device_memory": True}, errors.ArgumentTypeError, "device_memory=True"),
    "no model": ({"model": lambda x: x}, errors.ArgumentTypeError, "torch.nn.Module"),
    "a lazy model": ({"model": nn.LazyLinear(3)}, errors.ArgumentError, "Call it once on a batch"),
    "nothing to train": ({"model": mlp().requires_grad_(False)}, errors.NoTrainableParametersError, "model="),
    "another's optimizer": (
        {"optimizer": torch.optim.SGD(mlp().parameters(), lr=0.1)}, errors.ForeignOptimizerError, "optimizer='SGD'"
    ),
    "a precision": ({"precision": "fp8"}, errors.ArgumentError, "precision='fp8'"),
    "a name of other trainers": ({"batch_size": 8}, errors.ArgumentTypeError, "batch_size"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSED))
def test_wrong_arguments(case: str) -> None:
    options, kind, message = REFUSED[case]
    options = dict(options)
    with pytest.raises(kind, match=message) as caught:
        estimate(options.pop("model", mlp()), **options)
    assert type(caught.value) is kind
