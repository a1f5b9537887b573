"""``probe``: the answer, and law 5: no trace."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum import errors
from autoaccum.testing import simulated_memory
from tests.models import classes, mlp, noisy, wide


def probe(model: nn.Module, data: Any = None, **options: Any) -> autoaccum.ProbeReport:
    return autoaccum.probe(
        model, classes(5000) if data is None else data, **{"loss_fn": cross_entropy, "device": "cpu", **options}
    )


class TestAnswer:
    @pytest.mark.parametrize("limit", ["1MiB", "3MiB", "10MiB"])
    def test_within_two_percent_of_an_exhaustive_search(self, limit: str) -> None:
        with simulated_memory(limit):
            report = probe(wide(), headroom=0.0)
        found = report.max_micro_batch

        def fits(size: int) -> bool:
            with simulated_memory(limit):
                try:
                    report = probe(wide(), headroom=0.0, max_micro_batch=size)
                except errors.NothingFitsError:
                    return False
                return report.max_micro_batch == size

        assert fits(found)
        assert not fits(int(found * 1.02) + 1)
        assert found in [trial.micro_batch for trial in report.trials if trial.fits]
        assert len(report.trials) <= 6
        assert report.memory_model is not None
        peak = next(t.peak_bytes for t in report.trials if t.micro_batch == found)
        assert report.memory_model.predict(found) == pytest.approx(peak, rel=0.02)
        assert report.time_model is not None

    def test_leaves_headroom(self) -> None:
        with simulated_memory("3MiB"):
            report = probe(wide(), headroom=0.2)
        assert max(t.peak_bytes or 0 for t in report.trials if t.fits) <= 0.8 * 3 * 2**20

    def test_memory_limit_within_the_device(self) -> None:
        with simulated_memory("1GiB"):
            report = probe(wide(), memory_limit="3MiB")
            assert report.limit_bytes == 3 * 2**20
            assert max(t.peak_bytes or 0 for t in report.trials if t.fits) <= 3 * 2**20

    @pytest.mark.parametrize(
        ("effective_batch", "plan"), [("4, 10:6", (6,)), ("noise 2:5", (5,)), (lambda progress: 3, None)]
    )
    def test_of_a_schedule_the_most_is_planned(self, effective_batch: Any, plan: tuple[int, ...] | None) -> None:
        report = autoaccum.probe(
            mlp(), classes(20), loss_fn=cross_entropy, effective_batch=effective_batch, device="cpu", max_micro_batch=20
        )
        assert (report.plan and report.plan.sizes) == plan
        assert report.max_micro_batch == (max(plan) if plan else 20)

    @pytest.mark.parametrize("samples", [1, 7])
    def test_few_samples_are_repeated(self, samples: int) -> None:
        """How much data there is says nothing of what fits."""
        with simulated_memory("2MiB"):
            report = autoaccum.probe(mlp(), classes(samples), loss_fn=cross_entropy)
        assert report.max_micro_batch > 5000
        assert report.trials[-1].predicted_bytes is not None

    def test_stops_at_the_effective_batch_and_plans_it(self) -> None:
        with simulated_memory("1GiB"):
            report = probe(wide(), effective_batch=300)
        assert report.max_micro_batch == 300
        assert report.plan is not None
        assert report.plan.sizes == (300,)
        with simulated_memory("2MiB"):
            plan = probe(wide(), effective_batch=300).plan
        assert plan is not None
        assert sum(plan.sizes) == 300
        assert len(plan.sizes) > 1

    def test_counts_the_optimizers_state(self) -> None:
        with simulated_memory("3MiB"):
            plain = probe(wide(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)).max_micro_batch
            momentum = probe(wide(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)).max_micro_batch
            adam = probe(wide()).max_micro_batch
        weights = sum(p.nbytes for p in wide().parameters())
        per_sample = 3 * 1000 * 4
        assert plain - momentum == pytest.approx(weights / per_sample, abs=4)
        assert momentum - adam == pytest.approx(weights / per_sample, abs=4)

    def test_a_fit_at_its_answer_meets_no_oom(self) -> None:
        with simulated_memory("3MiB"):
            found = probe(wide()).max_micro_batch
            result = autoaccum.fit(
                wide(),
                classes(5000),
                effective_batch=1000,
                micro_batch=found,
                loss_fn=cross_entropy,
                device="cpu",
                progress=False,
            )
        assert sum(report.replays for report in result.history) == 0

    def test_nothing_fits(self) -> None:
        model = wide(100_000)
        needed = sum(p.nbytes for p in model.parameters()) * 4
        with (
            simulated_memory(needed + 400_000),
            pytest.raises(errors.NothingFitsError, match="probe: a micro-batch of 1"),
        ):
            probe(model)

    def test_the_model_alone_is_too_much(self) -> None:
        model, data = wide(10_000), classes(100)
        with simulated_memory("100KiB"), pytest.raises(errors.LimitBelowModelError, match=r"100\.00 KiB may be used"):
            probe(model, data)

    def test_an_iterator_is_left_alone(self) -> None:
        batches = iter([classes(4)])
        with pytest.raises(errors.DataError, match="read only once"):
            probe(wide(), batches)
        assert next(batches)

    @pytest.mark.parametrize(
        ("options", "kind"),
        [
            ({"effective_batch": 0}, errors.ArgumentError),
            ({"max_micro_batch": 2.0}, errors.ArgumentTypeError),
            ({"headroom": -0.1}, errors.ArgumentError),
            ({"precision": "fp8"}, errors.ArgumentError),
            ({"training_step": print}, errors.ConflictingArgumentsError),
            ({"loss_fn": "ce"}, errors.ArgumentTypeError),
            ({"device": "gpu"}, errors.UnknownDeviceError),
        ],
    )
    def test_bad_input(self, options: dict[str, Any], kind: type[Exception]) -> None:
        with pytest.raises(kind):
            probe(wide(), **options)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    name: getattr(torch.optim, name)
    for name in (
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
    )
}
OPTIMIZERS["SGD"] = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
OPTIMIZERS["SGD, dampened"] = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5)
OPTIMIZERS["AdamW, fused"] = lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Whatever a probe could leave a trace in, copied."""
    return copy.deepcopy(
        {
            "parameters": [p.detach() for p in model.parameters()],
            "gradients": [p.grad for p in model.parameters()],
            "buffers": list(model.buffers()),
            "training": [module.training for module in model.modules()],
            "optimizer": optimizer.state_dict(),
            "torch": torch.get_rng_state(),
            "python": random.getstate()[1][:5],
            "numpy": np.random.get_state()[1],
        }
    )


class TestNoTrace:
    """Law 5."""

    @pytest.mark.parametrize("name", list(OPTIMIZERS))
    @pytest.mark.parametrize("stepped", [False, True])
    def test_everything_is_as_it_was(self, name: str, stepped: bool) -> None:
        model = noisy()
        model[3].eval()
        optimizer = OPTIMIZERS[name](model.parameters())
        if stepped:
            cross_entropy(model(classes(8)[0]), classes(8)[1]).backward()
            optimizer.step()
        identities = [id(t) for t in (*model.parameters(), *model.buffers())]
        gradients = [id(p.grad) for p in model.parameters()]
        before = everything(model, optimizer)
        report = probe(model, optimizer=optimizer, max_micro_batch=16)
        assert report.max_micro_batch == 16
        torch.testing.assert_close(everything(model, optimizer), before, rtol=0, atol=0)
        assert [id(t) for t in (*model.parameters(), *model.buffers())] == identities
        assert [id(p.grad) for p in model.parameters()] == gradients

    def test_after_an_oom_and_after_an_error_too(self) -> None:
        def fails(model: nn.Module, batch: Any) -> torch.Tensor:
            loss = cross_entropy(model(batch[0]), batch[1])
            if len(batch[0]) == 8:
                raise errors.StopTraining
            if len(batch[0]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss

        for data in (classes(5000), classes(8)):
            model = noisy()
            optimizer = torch.optim.AdamW(model.parameters())
            before = everything(model, optimizer)
            if len(data[0]) > 8:
                assert (
                    autoaccum.probe(model, data, training_step=fails, optimizer=optimizer, device="cpu").max_micro_batch
                    == 2
                )
            else:
                with pytest.raises(errors.StopTraining):
                    probe(
                        model,
                        data,
                        training_step=lambda m, b: fails(m, (b[0].repeat(4, 1), b[1].repeat(4))),
                        loss_fn=None,
                    )
            torch.testing.assert_close(everything(model, optimizer), before, rtol=0, atol=0)

    def test_training_goes_on_as_if_nothing_had_been(self) -> None:
        def train(probing: bool) -> list[torch.Tensor]:
            model = noisy()
            optimizer = torch.optim.AdamW(model.parameters())
            torch.manual_seed(7)
            for step in range(4):
                if probing and step == 2:
                    probe(model, optimizer=optimizer, max_micro_batch=16)
                optimizer.zero_grad()
                cross_entropy(model(classes(8, seed=step)[0]), classes(8, seed=step)[1]).backward()
                optimizer.step()
            return [*model.parameters(), *model.buffers()]

        assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))


def test_hooks_that_step_are_refused_before_they_have_stepped() -> None:
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(errors.LossSideEffectError, match=r"a hook, .* called optimizer\.step\(\)"):
        autoaccum.probe(model, classes(8), loss_fn=cross_entropy, device="cpu")
    assert all(map(torch.equal, before, model.parameters()))
    optimizers[model[0].weight].step()  # which is refused no longer
