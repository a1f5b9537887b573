"""What a check takes for its samples, and what it refuses before anything runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, default_collate

import autoaccum
from autoaccum import errors
from tests.models import classes, mlp, noisy
from tests.step.measuring import Log
from tests.training.checks import DOUBLE, assert_same, check, everything


class TestWhatIsTaken:
    def test_any_batch(self) -> None:
        inputs, targets = classes(12, DOUBLE)

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            assert type(batch) is dict
            assert isinstance(batch["x"], torch.Tensor)
            assert isinstance(batch["names"], list)
            assert batch["scale"] == 2
            return cross_entropy(model(batch["x"]), batch["y"]) * batch["scale"]

        names = [f"sample {index}" for index in range(12)]
        batch = {"x": inputs.numpy(), "y": targets, "names": names, "scale": 2}
        assert check(mlp(DOUBLE), batch, training_step=step).passed

    def test_a_list_is_a_batch_as_a_data_loader_yields_it(self) -> None:
        loader = DataLoader(TensorDataset(*classes(12, DOUBLE)), batch_size=8)
        batch = next(iter(loader))
        assert isinstance(batch, list)
        assert check(mlp(DOUBLE), batch).passed

    def test_a_list_of_samples_is_data_as_fit_takes_it(self) -> None:
        inputs, targets = classes(12, DOUBLE)
        pairs = list(zip(inputs, targets.tolist(), strict=True))
        assert check(mlp(DOUBLE), pairs).passed
        assert check(mlp(DOUBLE), list(map(list, pairs))).passed

        # What a training_step takes may be such a list itself, as of images and their boxes.
        def stacked(model: Any, samples: list[Any]) -> torch.Tensor:
            return cross_entropy(model(torch.stack([x for x, _ in samples])), torch.tensor([y for _, y in samples]))

        assert check(mlp(DOUBLE), pairs, loss_fn=None, training_step=stacked).passed
        # Where the entries could be batches, as matrices are, a collate_fn says that they are samples.
        texts = [(torch.randn(8, 8, dtype=DOUBLE), torch.randint(0, 3, (8,))) for _ in range(12)]
        shapes = Log()

        def step(model: Any, batch: Any) -> torch.Tensor:
            shapes.append(tuple(batch[0].shape[1:]))
            return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

        assert check(mlp(DOUBLE), texts, loss_fn=None, training_step=step, collate_fn=default_collate).passed
        assert set(shapes) == {(8, 8)}

    @pytest.mark.parametrize(
        "batch",
        [
            lambda x, y: [{"x": x, "z": x.sum(1)}, {"y": y}],  # a DataLoader's, of samples ({...}, {...})
            lambda x, y: [{"x": x, "scale": 0.5}, {"y": y}],
            lambda x, y: [(x, x.sum(1)), (y, y)],
            lambda x, y: [[x, x], [y, y]],
        ],
    )
    def test_a_list_of_parts_stays_a_batch(self, batch: Any) -> None:
        def step(model: Any, given: Any) -> torch.Tensor:
            inputs, targets = (
                part["x" if "x" in part else "y"] if isinstance(part, dict) else part[0] for part in given
            )
            return cross_entropy(model(inputs), targets)

        assert check(mlp(DOUBLE), batch(*classes(12, DOUBLE)), loss_fn=None, training_step=step).passed

    def test_an_empty_list(self) -> None:
        with pytest.raises(errors.ArgumentError, match="0 samples"):
            check(mlp(DOUBLE), [])
        for given in ({}, {"collate_fn": default_collate}):
            with pytest.raises(errors.EmptyDatasetError, match="^batch holds no sample"):
                autoaccum.estimate(mlp(DOUBLE), [], loss_fn=cross_entropy, device_memory="1GiB", **given)

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_data(self, num_workers: int) -> None:
        dataset = TensorDataset(*classes(30, DOUBLE))
        loader = DataLoader(dataset, batch_size=1, num_workers=num_workers, timeout=9 if num_workers else 0)
        assert check(mlp(DOUBLE), dataset).passed
        report = check(mlp(DOUBLE), loader)
        assert report.passed
        assert report.samples == 6
        assert loader.num_workers == num_workers

    def test_a_batch_is_not_written_to(self) -> None:
        batch = classes(12, DOUBLE)
        before = copy.deepcopy(batch)

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            batch[0].mul_(2)
            return cross_entropy(model(batch[0]), batch[1])

        assert check(mlp(DOUBLE), batch, training_step=step).passed
        assert all(torch.equal(now, then) for now, then in zip(batch, before, strict=True))

    @pytest.mark.parametrize("num_samples", [0, 1])
    def test_of_one_sample_there_is_nothing_to_cut(self, num_samples: int) -> None:
        with pytest.raises(errors.ArgumentError, match="batch='.* sample.*': expected at least 2 samples. Pass more"):
            check(mlp(DOUBLE), classes(num_samples, DOUBLE))

    @pytest.mark.weighted
    def test_batch_norm_needs_four(self) -> None:
        with pytest.raises(errors.ArgumentError, match="at least 4 samples.*needs 2 where BatchNorm trains"):
            check(noisy().double(), classes(3, DOUBLE))
        assert check(noisy().double(), classes(4, DOUBLE)).passed is False

    @pytest.mark.parametrize(
        ("batch", "options", "kind"),
        [
            (iter([classes(4)]), {}, errors.ArgumentTypeError),
            (3, {}, errors.ArgumentTypeError),
            ("digits", {}, errors.ArgumentTypeError),
            (torch.tensor(1.0), {}, errors.DataError),
            ((torch.ones(3, 8), torch.ones(4)), {}, errors.RaggedBatchError),
            (classes(4), {"collate_fn": list}, errors.ConflictingArgumentsError),
            (classes(4), {"num_items": 3}, errors.ArgumentTypeError),
            (classes(4), {"device": "gpu"}, errors.UnknownDeviceError),
            (classes(4), {"loss_fn": nn.CrossEntropyLoss}, errors.ArgumentTypeError),
            (classes(4), {"loss_fn": print, "training_step": print}, errors.ConflictingArgumentsError),
            (classes(4), {"loss_fn": lambda outputs, targets: outputs.sum() * float("nan")}, errors.NonFiniteLossError),
            (classes(4), {"loss_fn": lambda outputs, targets: outputs}, errors.NonScalarLossError),
            (classes(4), {"ranks": "all"}, errors.ArgumentError),
        ],
    )
    def test_bad_input(self, batch: Any, options: dict[str, Any], kind: type[Exception]) -> None:
        model = mlp()
        before = everything(model)
        with pytest.raises(kind):
            check(model, batch, **options)
        assert_same(everything(model), before)

    def test_no_model(self) -> None:
        with pytest.raises(errors.ArgumentTypeError):
            check(classes(4), mlp())  # type: ignore[arg-type]
        with pytest.raises(errors.NoTrainableParametersError):
            check(mlp().requires_grad_(False))

    def test_an_error_of_the_users_comes_out_as_it_is(self) -> None:
        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            raise KeyError("my own")

        with pytest.raises(KeyError, match="my own"):
            check(mlp(), classes(4), training_step=step)

    def test_a_loss_with_its_own_backward_is_refused(self) -> None:
        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            loss = cross_entropy(model(batch[0]), batch[1])
            loss.backward(retain_graph=True)
            return loss

        model = mlp()
        with pytest.raises(errors.LossSideEffectError):
            check(model, classes(4), training_step=step)
        assert all(p.grad is None for p in model.parameters())

    def test_not_within_a_run(self) -> None:
        def within(record: object) -> None:
            check(mlp())

        with pytest.raises(errors.AlreadyRunningError, match="check"):
            autoaccum.fit(
                mlp(), classes(8), effective_batch=4, loss_fn=cross_entropy, callbacks=[within], progress=False,
                cache=False, device="cpu",
            )  # fmt: skip
