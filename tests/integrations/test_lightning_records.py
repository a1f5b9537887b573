"""What micro-batches log and return, as one value of the window."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from torch.nn.functional import cross_entropy

from autoaccum import errors
from autoaccum.integrations.lightning import AutoAccum
from tests.integrations.lightning_runs import (
    QUIET,
    Classifier,
    TwoLosses,
    data_of,
    module_of,
    run,
)

pytestmark = [pytest.mark.integrations, *QUIET]


class Logging(Classifier):
    """Logs in each way there is."""

    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self.net(x)
        loss = cross_entropy(logits, y)
        self.calls += 1
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("detached", loss.detach(), prog_bar=True)
        self.log("number", loss.item())
        self.log("sum", y.double().sum(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("max", logits.max(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log("min", logits.min(), reduce_fx=torch.min, on_step=True, on_epoch=True)
        self.log("of_batch", x.mean(), on_step=True, on_epoch=True)
        self.log("stated", x.mean(), on_step=True, on_epoch=True, batch_size=2 * len(x))
        self.log_dict({"one": x[:, 0].mean(), "constant": 3})
        self.log("twice", x[:, 1].mean(), on_step=False, on_epoch=True)
        self.log("twice", x[:, 2].mean(), on_step=False, on_epoch=True)
        return loss


class TestLogged:
    def test_values_are_those_of_the_window(self) -> None:
        expected = run(module_of(Logging), 16, max_steps=9)
        module = module_of(Logging)
        found = run(module, 4, AutoAccum(16, micro_batch=5), max_steps=9)
        assert module.calls > 9 * 3
        assert set(found.logged[-1]) >= {"loss_step", "loss_epoch", "sum_epoch", "max", "stated_epoch", "twice"}
        for logged, stock in zip(found.logged, expected.logged, strict=True):
            assert logged == pytest.approx(stock, rel=1e-6)  # a number becomes a float32

    def test_a_window_that_is_run_again_logs_once(self) -> None:
        # Nothing fits but four at once, in each window of the first epoch.
        class Refusing(Logging):
            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                loss = super().training_step(batch, batch_idx)
                if len(batch[0]) > 4:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                return loss

        expected = run(module_of(Logging), 16, max_steps=4)
        found = run(module_of(Refusing), 4, AutoAccum(16, verify=False), max_steps=4)
        assert found.logged[-1] == pytest.approx(expected.logged[-1], rel=1e-6)

    def test_of_a_loss_over_tokens_it_is_the_loss_and_of_values_a_mean_over_samples(self) -> None:
        class Weighted(Classifier):
            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                x, y = batch
                loss = cross_entropy(self.net(x), y, ignore_index=0)
                self.log("loss", loss)
                self.log("twice_the_loss", 2 * loss)
                self.log("stated", 2 * loss, batch_size=max(1, int((y != 0).sum())))
                return loss

        expected = run(module_of(Weighted), 16, max_steps=1)
        found = run(module_of(Weighted), 4, AutoAccum(16, micro_batch=3), max_steps=1)
        assert found.logged[0]["loss"] == pytest.approx(expected.logged[0]["loss"], rel=1e-10)
        assert found.logged[0]["stated"] == pytest.approx(expected.logged[0]["stated"], rel=1e-10)
        assert found.logged[0]["twice_the_loss"] != pytest.approx(expected.logged[0]["twice_the_loss"], rel=1e-4)


class TestReturned:
    def test_scalars_are_means_and_rows_are_joined(self) -> None:
        expected = run(module_of(TwoLosses), 16, max_steps=3)
        found = run(module_of(TwoLosses), 4, AutoAccum(16, micro_batch=5), max_steps=3)
        for outputs, stock in zip(found.returned, expected.returned, strict=True):
            assert outputs.keys() == stock.keys()
            for name, value in stock.items():
                torch.testing.assert_close(outputs[name], value.detach(), rtol=1e-10, atol=1e-14)

    def test_the_loss_under_another_name_is_the_loss(self) -> None:
        class Named(Classifier):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = cross_entropy(self.net(batch[0]), batch[1], ignore_index=0)
                return {"loss": loss, "train_loss": loss.detach()}

        found = run(module_of(Named), 4, AutoAccum(16, micro_batch=3), max_steps=2)
        assert [float(outputs["train_loss"]) for outputs in found.returned] == found.losses

    def test_what_no_window_can_have_one_of_is_refused(self) -> None:
        class Texts(Classifier):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return {"loss": super().training_step(batch, batch_idx), "names": ["a"]}

        with pytest.raises(errors.OutputError, match=r"names.*extend by it, a list .* holds the last micro-batch's"):
            run(module_of(Texts), 4, AutoAccum(16), data=data_of(Classifier))


class Keeping(Classifier):
    """Keeps what it computes in lists, as Lightning's docs have it for the end of an epoch."""

    most = 1000

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []
        self.outputs: list[Any] = []
        self.counts: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self.net(x)
        loss = cross_entropy(logits, y, ignore_index=0)
        self.losses.append(loss)
        self.outputs.append({"number": loss.item(), "pair": (logits.detach(), y), "scale": x.mean()})
        self.counts.append(len(x))
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss


class TestLists:
    def test_get_an_entry_for_each_micro_batch_that_holds(self) -> None:
        stock, module = module_of(Keeping), module_of(Keeping)
        run(stock, 16, max_steps=6)
        module.most = 6
        callback = AutoAccum(16, micro_batch=12)  # runs out of memory in the first window
        run(module, 4, callback, max_steps=6)
        assert max(callback.micro_batches) <= 6
        assert len(module.losses) == len(module.outputs) == len(module.counts)
        for place in (0, 1):
            rows, expected = (torch.cat([one["pair"][place] for one in each.outputs]) for each in (module, stock))
            torch.testing.assert_close(rows, expected, rtol=1e-10, atol=1e-12)
        # What was broken off or measured is not among them.
        assert sum(module.counts) == sum(stock.counts)
        assert len(module.counts) > 6
