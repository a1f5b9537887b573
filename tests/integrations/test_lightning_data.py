"""Train DataLoaders whose batches are windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from autoaccum import errors
from autoaccum.events import Notice
from autoaccum.integrations.lightning import AutoAccum
from autoaccum.integrations.lightning_checks import remade
from tests.integrations.lightning_runs import QUIET, Classifier, Watch, data_of, module_of, run, trainer_of

pytestmark = [pytest.mark.integrations, *QUIET]
DATA = data_of(Classifier)


class Streamed(IterableDataset[Any]):
    """Samples whose number nobody knows."""

    def __iter__(self) -> Any:
        return iter(DATA)


@dataclass
class Told:
    """A batch of a class of its own, which Lightning moves field by field."""

    inputs: torch.Tensor
    targets: torch.Tensor


class Own(DataLoader[Any]):
    """A loader whose class takes other arguments."""

    def __init__(self, path: str, batch_size: int) -> None:
        super().__init__(DATA, batch_size)
        self.path = path


class TestRemade:
    def test_has_the_batch_and_all_else_of_the_other(self) -> None:
        loader = DataLoader(DATA, 4, shuffle=True, drop_last=True, generator=torch.Generator())
        made = remade(loader, 16, 1)
        assert (made.batch_size, len(made), made.drop_last) == (16, 3, True)
        assert made.sampler is loader.sampler
        assert made.generator is loader.generator
        assert (loader.batch_size, len(loader)) == (4, 15)
        assert remade(loader, 32, 2).batch_size == 16
        assert len(next(iter(made))[0]) == 16

    def test_of_a_stream_and_of_another_class(self) -> None:
        assert [len(batch[0]) for batch in remade(DataLoader(Streamed(), 4), 25, 1)] == [25, 25, 10]
        made = remade(Own("a", 4), 25, 1)
        assert (type(made), made.path, len(made)) == (Own, "a", 3)

    @pytest.mark.parametrize(
        ("loader", "why"),
        [
            (list(DataLoader(DATA, 4)), "a list, and no DataLoader"),
            ("a text", "a str"),
            (DataLoader(DATA, batch_size=None), "of its own"),
            (DataLoader(DATA, batch_sampler=[[0, 1]]), "of its own"),
            (
                DataLoader(DATA, batch_sampler=type("Sampler", (BatchSampler,), {})(SequentialSampler(DATA), 4, False)),
                "of its own",
            ),
        ],
    )
    def test_what_is_not_cut_by_a_size_is_refused(self, loader: Any, why: str) -> None:
        with pytest.raises(errors.ArgumentError, match=f"effective_batch.*{why}"):
            remade(loader, 16, 1)

    def test_as_are_ranks_that_do_not_divide_it(self) -> None:
        with pytest.raises(errors.ArgumentError, match="multiple of the 3 ranks"):
            remade(DataLoader(DATA, 4), 16, 3)


class TestInARun:
    def test_of_fewer_samples_than_a_step_asks_for_that_is_told(self) -> None:
        callback = AutoAccum(80, micro_batch=20)
        with pytest.warns(
            errors.AutoaccumWarning, match="effective_batch=80 is more than the data's 60 samples"
        ) as caught:
            run(module_of(Classifier), 4, callback, max_steps=3)
        assert len([w for w in caught if "more than the data" in str(w.message)]) == 1
        assert isinstance(callback.accumulator.events[0], Notice)

    def test_of_a_stream(self) -> None:
        expected = run(module_of(Classifier), 16, data=DataLoader(Streamed(), 16), max_steps=6)
        found = run(module_of(Classifier), 4, AutoAccum(16, micro_batch=5), data=DataLoader(Streamed(), 4), max_steps=6)
        assert found.losses == pytest.approx(expected.losses, rel=1e-10)

    @pytest.mark.parametrize("source", ["module", "datamodule"])
    def test_of_a_hook_that_makes_one_each_epoch(self, source: str) -> None:
        # The batch and the shuffling by position, which Lightning remembers of loaders that hooks make.
        class WithData(Classifier):
            size = 16

            def train_dataloader(self) -> Any:
                return DataLoader(DATA, self.size, True, drop_last=True)

        class Data(pl.LightningDataModule):
            size = 16
            train_dataloader = WithData.train_dataloader

        losses = []
        for callbacks, size in (((), 16), ((AutoAccum(16, micro_batch=5),), 4)):
            module = module_of(WithData if source == "module" else Classifier)
            data = Data()
            data.size = module.size = size
            watch = Watch()
            torch.manual_seed(1)
            trainer = trainer_of([*callbacks, watch], max_steps=8, reload_dataloaders_every_n_epochs=1)
            trainer.fit(module, **({} if source == "module" else {"datamodule": data}))
            assert trainer.num_training_batches == 3
            losses.append(watch.losses)
        assert losses[1] == pytest.approx(losses[0], rel=1e-10)

    def test_without_a_size_the_loaders_own_batches_are_the_windows(self) -> None:
        def sequences(size: int) -> Any:
            return CombinedLoader({"a": DataLoader(DATA, size), "b": DataLoader(DATA, size)}, "min_size")

        class OfTwo(Classifier):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return super().training_step(batch["a"], 0) + super().training_step(batch["b"], 0)

        expected = run(module_of(OfTwo), 1, data=sequences(16), max_steps=6)
        callback = AutoAccum(micro_batch=5)
        found = run(module_of(OfTwo), 1, callback, data=sequences(16), max_steps=6)
        assert sum(callback.micro_batches) == 16
        assert found.losses == pytest.approx(expected.losses, rel=1e-10)

    def test_batches_may_be_dataclasses(self) -> None:
        class OfFields(Classifier):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return super().training_step((batch.inputs, batch.targets), batch_idx)

        def told(samples: Any) -> Told:
            return Told(*map(torch.stack, zip(*samples, strict=True)))

        def loader() -> Any:
            return DataLoader(DATA, 16, collate_fn=told)

        expected = run(module_of(OfFields), 1, data=loader(), max_steps=6)
        callback = AutoAccum(micro_batch=5)
        found = run(module_of(OfFields), 1, callback, data=loader(), max_steps=6)
        assert callback.micro_batches == (4, 4, 4, 4)
        assert found.losses == pytest.approx(expected.losses, rel=1e-10)

    def test_overfitting_takes_the_same_batches(self) -> None:
        expected = run(module_of(Classifier), 16, max_steps=6, overfit_batches=2)
        found = run(module_of(Classifier), 4, AutoAccum(16, micro_batch=5), max_steps=6, overfit_batches=2)
        assert found.losses == pytest.approx(expected.losses, rel=1e-10)
