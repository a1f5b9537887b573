"""A LightningModule as it is, in one line more: what Lightning would have computed, in micro-batches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from autoaccum import errors
from autoaccum.events import OutOfMemory, Verified
from autoaccum.integrations.lightning import AutoAccum
from autoaccum.testing import oom_at, simulated_memory
from tests.integrations.lightning_runs import (
    MODULES,
    OF_CHILDREN,
    QUIET,
    Classifier,
    Convolutional,
    Tagger,
    Watch,
    data_of,
    farthest,
    module_of,
    run,
    trainer_of,
)

pytestmark = [pytest.mark.integrations, *QUIET]


class Fault(pl.Callback):
    """Memory that runs out at an operation of a window."""

    def __init__(self, operation: int | None, window: int = 0) -> None:
        self.fault = oom_at(operation)
        self._window = window

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == self._window:
            self.fault.__enter__()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if trainer.global_step == self._window:
            self.fault.__exit__(None, None, None)


class TestExactness:
    @pytest.mark.parametrize("kind", MODULES)
    def test_gradients_of_ten_windows_are_those_of_the_big_batch(self, kind: type) -> None:
        # The data end in a short window; micro-batches of 5 divide none of them.
        expected = run(module_of(kind, torch.float32), 16, max_steps=10)
        callback = AutoAccum(effective_batch=16, micro_batch=5)
        found = run(module_of(kind, torch.float32), 4, callback, max_steps=10)
        assert len(callback.micro_batches) > 1
        assert len(found.gradients) == 10
        assert farthest(found.gradients, expected.gradients) < 1e-5

    @pytest.mark.parametrize("kind", MODULES)
    def test_losses_and_logs_of_twenty_steps_are_those_of_the_big_batch(self, kind: type) -> None:
        expected = run(module_of(kind), 16)
        found = run(module_of(kind), 4, AutoAccum(effective_batch=16, micro_batch=5))
        assert found.losses == pytest.approx(expected.losses, rel=1e-10)
        assert len(found.losses) == 20
        assert found.rates == expected.rates
        for logged, stock in zip(found.logged, expected.logged, strict=True):
            assert logged == pytest.approx(stock, rel=1e-10)

    def test_a_batch_that_fits_draws_what_lightning_draws(self) -> None:
        expected = run(module_of(Convolutional, dropout=0.5), 16)
        found = run(module_of(Convolutional, dropout=0.5), 4, AutoAccum(16, micro_batch=16, verify=False))
        assert found.losses == pytest.approx(expected.losses, rel=1e-12)

    def test_of_clipped_gradients(self) -> None:
        for kind in ("norm", "value"):
            clipping = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": kind}
            expected = run(module_of(Classifier), 16, **clipping)
            found = run(module_of(Classifier), 4, AutoAccum(16, micro_batch=5), **clipping)
            assert found.losses == pytest.approx(expected.losses, rel=1e-10)


class TestReplay:
    @pytest.mark.parametrize("where", [0.02, 0.2, 0.4, 0.6])
    def test_is_the_run_that_had_the_smaller_micro_batches(self, where: float) -> None:
        count = Fault(None)
        run(module_of(Convolutional, dropout=0.5), 4, AutoAccum(16, micro_batch=8, verify=False), count, max_steps=1)
        expected = run(module_of(Convolutional, dropout=0.5), 4, AutoAccum(16, micro_batch=4, verify=False))
        # What comes last are the values that are logged.
        fault = Fault(int(count.fault.operations * where))
        callback = AutoAccum(16, micro_batch=8, verify=False)
        found = run(module_of(Convolutional, dropout=0.5), 4, callback, fault)
        assert [type(e) for e in callback.accumulator.events if isinstance(e, OutOfMemory)] == [OutOfMemory]
        assert callback.micro_batches == (4, 4, 4)  # of the short window at the end
        assert found.losses == expected.losses
        assert found.logged == expected.logged
        assert found.rates == expected.rates

    def test_in_memory_that_holds_no_whole_batch(self) -> None:
        data = data_of(Classifier, samples=512)
        expected = run(module_of(Classifier), 256, data=data, max_steps=6)
        with simulated_memory("140KiB") as device, pytest.raises(torch.OutOfMemoryError):
            run(module_of(Classifier), 256, data=data, max_steps=6)
        callback = AutoAccum(256)
        with simulated_memory("140KiB") as device:
            found = run(module_of(Classifier), 256, callback, data=data, max_steps=6)
        assert device.peak <= device.limit
        assert len(callback.micro_batches) > 1
        assert found.losses == pytest.approx(expected.losses, rel=1e-10)
        assert found.logged[-1] == pytest.approx(expected.logged[-1], rel=1e-10)

    def test_where_not_one_sample_fits_it_says_so(self) -> None:
        module, data = module_of(Classifier), data_of(Classifier)
        with simulated_memory("9KiB"), pytest.raises(errors.MemoryLimitError):
            run(module, 16, AutoAccum(16), data=data, max_steps=1)


class TestResume:
    @pytest.mark.parametrize(("kind", "memory"), [(Classifier, "13KiB"), (Convolutional, "48KiB")])
    def test_goes_on_to_the_bit_without_a_search(self, kind: type, memory: str, tmp_path: Path) -> None:
        data = data_of(kind)

        def trained(steps: int, start: str | None = None) -> tuple[Any, AutoAccum]:
            module, callback = module_of(kind), AutoAccum(16)
            torch.manual_seed(steps)  # a checkpoint of Lightning has no random numbers, and nothing is drawn
            saving = ModelCheckpoint(tmp_path, "at-{step}", every_n_train_steps=8, save_top_k=-1)
            trainer = trainer_of([callback, saving], max_steps=steps, enable_checkpointing=True)
            with simulated_memory(memory):
                trainer.fit(module, DataLoader(data, batch_size=4), ckpt_path=start)
            assert trainer.global_step == steps
            return module, callback

        whole, searching = trained(24)
        _, half = trained(16)
        resumed, callback = trained(24, str(tmp_path / "at-step=16.ckpt"))
        assert len(half.micro_batches) > 1
        assert half.micro_batches == searching.micro_batches == callback.micro_batches
        assert [e for e in callback.accumulator.events if isinstance(e, OutOfMemory | Verified)] == []
        for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(one, other)

    def test_a_second_fit_by_the_same_trainer_goes_on(self) -> None:
        losses = []
        for callbacks, batch in (((), 16), ((AutoAccum(16, micro_batch=5),), 4)):
            module, watch = module_of(Classifier), Watch()
            trainer = trainer_of([*callbacks, watch], max_steps=-1, max_epochs=2)
            loader = DataLoader(data_of(Classifier), batch_size=batch)
            trainer.fit(module, loader)
            trainer.fit_loop.max_epochs = 4
            trainer.fit(module, loader)
            losses.append(watch.losses)
        assert losses[1] == pytest.approx(losses[0], rel=1e-10)
        assert len(losses[0]) == 16


class TestWhatLightningExpectsOfAccumulation:
    def test_steps_batches_and_epochs_are_those_of_the_big_batch(self) -> None:
        trainer = trainer_of([AutoAccum(16)], max_steps=-1, max_epochs=3)
        trainer.fit(module_of(Classifier), DataLoader(data_of(Classifier), batch_size=4))
        assert (trainer.global_step, trainer.num_training_batches, trainer.current_epoch) == (12, 4, 3)
        assert trainer.accumulate_grad_batches == 1

    def test_limits_count_windows(self) -> None:
        for limit, batches in ((3, 3), (0.5, 2)):
            trainer = trainer_of([AutoAccum(16)], max_steps=-1, max_epochs=2, limit_train_batches=limit)
            trainer.fit(module_of(Classifier), DataLoader(data_of(Classifier), batch_size=4))
            assert trainer.global_step == 2 * batches

    def test_steps_are_foreseen_for_schedulers(self) -> None:
        class Foreseeing(Classifier):
            def configure_optimizers(self) -> Any:
                self.foreseen = self.trainer.estimated_stepping_batches
                return super().configure_optimizers()

        module = module_of(Foreseeing)
        data = DataLoader(data_of(Classifier), batch_size=4)
        trainer_of([AutoAccum(16)], max_steps=-1, max_epochs=3).fit(module, data)
        assert module.foreseen == 12

    @pytest.mark.parametrize("interval", ["step", "epoch"])
    def test_schedulers_step_once_a_window_or_epoch(self, interval: str) -> None:
        rates = []
        for callbacks, batch in (((), 16), ((AutoAccum(16, micro_batch=3),), 4)):
            module = module_of(Classifier)
            module.interval = interval
            rates.append(run(module, batch, *callbacks, max_steps=9).rates)
        assert rates[1] == rates[0]
        assert len(set(rates[0])) == (9 if interval == "step" else 3)

    def test_a_plateau_and_early_stopping_see_the_same(self) -> None:
        class OfPlateau(Classifier):
            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
                schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

        found = []
        for callbacks, batch in (((), 16), ((AutoAccum(16, micro_batch=3),), 4)):
            watch, stopping = Watch(), EarlyStopping("val_loss", patience=2, min_delta=1.0)
            trainer = trainer_of([*callbacks, watch, stopping], max_steps=-1, max_epochs=9)
            loader = DataLoader(data_of(Classifier), batch_size=batch)
            trainer.fit(module_of(OfPlateau), loader, DataLoader(data_of(Classifier), batch_size=16))
            found.append((trainer.current_epoch, trainer.global_step, watch.rates))
        assert found[1] == found[0]
        assert found[0][:2] == (3, 12)
        assert len(set(found[0][2])) == 2

    def test_what_fits_is_found_and_the_batch_stays(self) -> None:
        callback = AutoAccum(48, max_micro_batch=20)
        found = run(module_of(Classifier), 4, callback, max_steps=8)
        assert max(callback.micro_batches) <= 20
        assert found.losses == pytest.approx(run(module_of(Classifier), 48, max_steps=8).losses, rel=1e-10)

    def test_the_trainer_is_left_as_it_was(self) -> None:
        callback = AutoAccum(16)
        trainer = trainer_of([callback], max_steps=3)
        before = set(vars(trainer.strategy)), set(vars(trainer.fit_loop.epoch_loop.automatic_optimization))
        trainer.fit(module_of(Classifier), DataLoader(data_of(Classifier), batch_size=4))
        assert before == (
            set(vars(trainer.strategy)),
            set(vars(trainer.fit_loop.epoch_loop.automatic_optimization)),
        )

        class Failing(Classifier):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                raise KeyError("own")

        with pytest.raises(KeyError, match="own"):
            trainer_of([callback], max_steps=3).fit(module_of(Failing), DataLoader(data_of(Classifier), batch_size=4))
        assert callback.accumulator is not None


_DDP = """
import sys, warnings
warnings.simplefilter("ignore")
import lightning.pytorch as pl, torch
from torch.utils.data import DataLoader
from autoaccum.integrations.lightning import AutoAccum
from tests.integrations.lightning_runs import *

class Seen(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        batches.append(batch)

batches = []
watch, callback = Watch(), AutoAccum(16, micro_batch=3)
module = module_of(Tagger)
trainer = trainer_of([callback, watch, Seen()], max_steps=6, strategy="ddp", devices=2)
trainer.fit(module, DataLoader(data_of(Tagger), batch_size=4, shuffle=True))
found = {"losses": watch.losses, "batches": batches, "logged": watch.logged, "weights": list(module.parameters())}
torch.save(found | {"micro_batches": callback.micro_batches}, f"{sys.argv[1]}/{trainer.global_rank}.pt")
"""


class TestRanks:
    def test_of_ddp_step_on_the_gradient_of_the_joined_batch(self, tmp_path: Path) -> None:
        script = tmp_path / "train.py"
        script.write_text(_DDP)
        command = [sys.executable, str(script), str(tmp_path)]
        subprocess.run(command, check=True, capture_output=True, timeout=600, env=OF_CHILDREN)
        ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1)]
        # One process on the batches of both, joined: their loss is a mean over tokens of all of them.
        pairs = zip(*(rank["batches"] for rank in ranks), strict=True)
        joined = [{name: torch.cat([one[name], other[name]]) for name in one} for one, other in pairs]
        assert {len(batch["tokens"]) for batch in joined} == {16, 12}
        module = module_of(Tagger)
        expected = run(module, 16, data=_Batches(joined), max_steps=6)
        for rank in ranks:
            assert rank["losses"] == pytest.approx(expected.losses, rel=1e-10)
            assert [logged["train_loss"] for logged in rank["logged"]] == pytest.approx(expected.losses, rel=1e-10)
            for own, weight in zip(rank["weights"], module.parameters(), strict=True):
                torch.testing.assert_close(own, weight, rtol=1e-9, atol=1e-12)


class _Batches:
    """Batches that are there, in no DataLoader."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return iter(self._batches)


class TestTheOtherPackage:
    def test_is_the_same(self) -> None:
        code = (
            "import pytorch_lightning as pl, torch\n"
            "from torch.utils.data import DataLoader, TensorDataset\n"
            "from autoaccum.integrations.lightning import AutoAccum\n"
            "class Module(pl.LightningModule):\n"
            "    def __init__(self): super().__init__(); self.layer = torch.nn.Linear(4, 1)\n"
            "    def training_step(self, batch): return self.layer(batch[0]).square().mean()\n"
            "    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)\n"
            "callback = AutoAccum(32, micro_batch=10)\n"
            "trainer = pl.Trainer(max_epochs=2, callbacks=callback, logger=False, enable_checkpointing=False,\n"
            "    accelerator='cpu', enable_progress_bar=False, enable_model_summary=False)\n"
            "trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(64, 4)), 4))\n"
            "assert isinstance(callback, pl.Callback)\n"
            "print(trainer.global_step, callback.micro_batches)\n"
        )
        command = [sys.executable, "-W", "ignore", "-c", code]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        assert done.stdout.splitlines()[-1] == "4 (8, 8, 8, 8)"


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "cure"),
        [
            ({"precision": "bf16"}, "Trainer"),
            ({"clip_norm": 1.0}, "gradient_clip_val"),
            ({"training_step": print}, "LightningModule"),
            ({"accumulate_grad_batches": 4}, "Leave it out"),
            ({"effective_batch": 0}, "at least 1"),
            ({"effective_batch": "auto"}, "int"),
            ({"micro": 4}, "micro_batch"),
            ({"efective_batch": 3}, r"^AutoAccum\(\) has no argument 'efective_batch'\. Did you mean effective_batch"),
        ],
    )
    def test_wrong_ones_are_refused_with_a_cure(self, options: Any, cure: str) -> None:
        with pytest.raises(errors.ArgumentError, match=cure):
            AutoAccum(**options)

    def test_it_is_told_before_there_is_a_window(self) -> None:
        callback = AutoAccum(16)
        assert callback.accumulator is None
        assert callback.micro_batches == ()
