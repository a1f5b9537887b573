"""What stands in the place of ``training_step`` and ``backward``: hooks, precision, and what a step may return."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from autoaccum import errors
from autoaccum.integrations.lightning import AutoAccum
from tests.integrations.lightning_runs import (
    QUIET,
    Classifier,
    data_of,
    farthest,
    module_of,
    run,
    trainer_of,
)

pytestmark = [pytest.mark.integrations, *QUIET]

_HOOKS = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"),
    *("lr_scheduler_step", "on_train_batch_end", "on_before_batch_transfer"),
)


class Hooked(Classifier):
    """Counts what Lightning calls."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []
        self.transferred: list[tuple[str, int]] = []

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.transferred.append(("transfer", len(batch[0])))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.transferred.append(("after", len(batch[0])))
        return [batch[0] * 2, batch[1]]


def _counting(name: str) -> Any:
    def hook(self: Hooked, *args: Any, **kwargs: Any) -> Any:
        self.called.append(name)
        return getattr(super(Hooked, self), name)(*args, **kwargs)

    return hook


for _name in _HOOKS:
    setattr(Hooked, _name, _counting(_name))


class TestHooks:
    def test_are_called_once_a_window(self) -> None:
        stock, own = module_of(Hooked), module_of(Hooked)
        expected = run(stock, 16, max_steps=6)
        found = run(own, 4, AutoAccum(16, micro_batch=5), max_steps=6)
        assert sorted(own.called) == sorted(stock.called)
        assert own.called.count("on_after_backward") == 6
        assert found.losses == pytest.approx(expected.losses, rel=1e-10)

    def test_of_transfer_get_micro_batches(self) -> None:
        module = module_of(Hooked)
        run(module, 4, AutoAccum(16, micro_batch=8, verify=False), max_steps=2)
        assert module.transferred == [("transfer", 8), ("after", 8)] * 4

    def test_find_the_window_on_the_host_and_its_gradient(self) -> None:
        class Looking(pl.Callback):
            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
                self.rows = len(batch[0])

            def on_after_backward(self, trainer: Any, module: Any) -> None:
                self.has_gradient = all(p.grad is not None for p in module.parameters())

        looking = Looking()
        run(module_of(Classifier), 4, AutoAccum(16, micro_batch=5), looking, max_steps=1)
        assert looking.rows == 16
        assert looking.has_gradient


class TestPrecision:
    @pytest.mark.parametrize(("precision", "most"), [("64-true", 1e-12), ("bf16-mixed", 2**-7)])
    def test_is_the_trainers(self, precision: Any, most: float) -> None:
        dtype = torch.float32
        expected = run(module_of(Classifier, dtype), 16, max_steps=5, precision=precision)
        callback = AutoAccum(16, micro_batch=5)
        found = run(module_of(Classifier, dtype), 4, callback, max_steps=5, precision=precision)
        assert farthest(found.gradients, expected.gradients) < most
        assert found.losses == pytest.approx(expected.losses, rel=most)

    def test_of_a_scaler_has_its_scale_and_clips_after_it(self) -> None:
        seen = []
        for callbacks, batch in (((), 16), ((AutoAccum(16, micro_batch=5),), 4)):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
            plugin = MixedPrecision("16-mixed", "cpu", scaler)
            module = module_of(Classifier, torch.float32)
            watch = run(module, batch, *callbacks, max_steps=8, plugins=[plugin], gradient_clip_val=0.1)
            seen.append((watch, scaler.get_scale()))
        assert farthest(seen[1][0].gradients, seen[0][0].gradients) < 2**-9
        assert seen[1][0].losses == pytest.approx(seen[0][0].losses, rel=2**-9)
        assert seen[1][1] == seen[0][1] == 2.0**14

    def test_of_a_scale_that_overflows_skips_the_step(self) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
        module = module_of(Classifier, torch.float32)
        before = [p.clone() for p in module.parameters()]
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        watch = run(module, 4, AutoAccum(16, micro_batch=5, verify=False), max_steps=1, plugins=[plugin])
        assert scaler.get_scale() == 2.0**29
        assert all(torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True))
        assert watch.losses[0] == pytest.approx(1.05, abs=0.2)


class TestReturned:
    def test_none_skips_the_batch(self) -> None:
        class Skipping(Classifier):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return None if batch_idx % 2 else super().training_step(batch, batch_idx)

        class Ends(pl.Callback):
            def __init__(self) -> None:
                self.outputs: list[Any] = []

            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
                self.outputs.append(outputs["loss"].item() if outputs else outputs)

        seen = []
        for callbacks, batch in (((), 16), ((AutoAccum(16, micro_batch=5),), 4)):
            ends = Ends()
            trainer = trainer_of([*callbacks, ends], max_steps=6)
            trainer.fit(module_of(Skipping), DataLoader(data_of(Classifier), batch_size=batch))
            seen.append(ends.outputs)
        assert seen[0][1] == seen[1][1] == {}
        assert [x for x in seen[1] if x] == pytest.approx([x for x in seen[0] if x], rel=1e-10)
        assert len(seen[1]) == 6

    def test_none_for_a_part_of_a_batch_is_refused(self) -> None:
        class Partly(Classifier):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return super().training_step(batch, batch_idx) if len(batch[0]) == 6 else None

        with pytest.raises(errors.DataError, match="returned None for some micro-batches"):
            run(module_of(Partly), 4, AutoAccum(16, micro_batch=6, verify=False), shuffle=False)

    @pytest.mark.parametrize("returned", ["a text", {"los": 1}])
    def test_what_is_no_loss_is_lightnings_error(self, returned: Any) -> None:
        class Wrong(Classifier):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return returned

        messages = []
        for callbacks in ((), (AutoAccum(16),)):
            with pytest.raises(Exception, match="training_step|'loss' key") as caught:
                run(module_of(Wrong), 16, *callbacks)
            messages.append((type(caught.value), str(caught.value)))
        assert messages[0] == messages[1]


class TestOptimizers:
    def test_one_that_calls_the_closure_again_is_given_the_exact_gradient(self) -> None:
        class ByLBFGS(Classifier):
            def configure_optimizers(self) -> Any:
                return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

        expected = run(module_of(ByLBFGS), 16, max_steps=4)
        found = run(module_of(ByLBFGS), 4, AutoAccum(16, micro_batch=5), max_steps=4)
        assert found.losses == pytest.approx(expected.losses, rel=1e-8)

    def test_parameters_may_be_added_later(self) -> None:
        class Unfreezing(BaseFinetuning):
            def freeze_before_training(self, module: Any) -> None:
                self.freeze(module.net[0])

            def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
                if epoch == 1:
                    self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.01)

        class Partly(Classifier):
            def configure_optimizers(self) -> Any:
                return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)

        expected = run(module_of(Partly), 16, Unfreezing(), max_steps=9)
        found = run(module_of(Partly), 4, Unfreezing(), AutoAccum(16, micro_batch=5), max_steps=9)
        assert [len(gradients) for gradients in found.gradients] == [2] * 4 + [4] * 5
        assert found.losses == pytest.approx(expected.losses, rel=1e-10)

    def test_a_loss_that_compares_samples_logs_what_the_big_batch_does(self) -> None:
        class Contrastive(Classifier):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                x, _ = batch
                logits = self.net(x)
                self.log("spread", logits.std(0).mean(), on_step=True, on_epoch=True)
                loss = super().training_step(batch, batch_idx)
                return loss + (logits @ logits.T / 4).logsumexp(1).mean()

        expected = run(module_of(Contrastive), 16, max_steps=3)
        found = run(module_of(Contrastive), 4, AutoAccum(16, micro_batch=3), max_steps=3)
        assert found.losses == pytest.approx(expected.losses, rel=1e-10)
        assert found.logged == [pytest.approx(logged, rel=1e-10) for logged in expected.logged]

    def test_averaged_weights_and_their_batch_norm_are_lightnings(self) -> None:
        class Normed(Classifier):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

        found = []
        for callbacks, batch in (((), 16), ((AutoAccum(16, accumulate="joined", micro_batch=8),), 4)):
            module = module_of(Normed)
            averaging = StochasticWeightAveraging(0.01, swa_epoch_start=1)
            run(module, batch, averaging, *callbacks, max_steps=-1, max_epochs=4)
            found.append(module.state_dict())
        for name, value in found[0].items():
            torch.testing.assert_close(found[1][name], value, rtol=1e-9, atol=1e-12)


class TestCompiled:
    def test_a_module_whose_net_is_compiled(self) -> None:
        class Compiled(Classifier):
            def __init__(self) -> None:
                super().__init__()
                self.net = torch.compile(self.net, backend="eager", dynamic=True)

        expected = run(module_of(Classifier), 16, max_steps=3)
        found = run(module_of(Compiled), 4, AutoAccum(16, micro_batch=5), max_steps=3)
        assert found.losses == pytest.approx(expected.losses, rel=1e-10)
