"""The pages on Lightning and Accelerate: before and after their diffs is the same run."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lightning")

import torch

from autoaccum.integrations.lightning import AutoAccum
from tests.integrations.lightning_runs import QUIET
from tests.integrations.pages import blocks, halves, namespace_after

pytestmark = [pytest.mark.integrations, *QUIET]


@pytest.mark.parametrize("number", [0, 1])
def test_lightning_before_and_after(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where Lightning writes its logs
    page = "coming_from_lightning.md"
    diff = blocks(page, "diff")[number]
    assert len([line for line in diff.splitlines() if line[0] == "+"]) == 1
    before, after = (namespace_after(page, half) for half in halves(diff))
    assert after["trainer"].global_step == before["trainer"].global_step == 12
    (callback,) = [one for one in after["trainer"].callbacks if isinstance(one, AutoAccum)]
    assert sum(callback.micro_batches) == 128
    for one, other in zip(before["autoencoder"].parameters(), after["autoencoder"].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_accelerate_before_and_after() -> None:
    from accelerate.state import AcceleratorState, GradientState

    page = "coming_from_accelerate.md"
    (diff,) = blocks(page, "diff")
    weights = []
    for half in halves(diff):
        namespace = namespace_after(page, half)
        weights.append([p.detach().clone() for p in namespace["model"].parameters()])
        rate = namespace["optimizer"].param_groups[0]["lr"]
        assert rate == pytest.approx(0.0025)  # after four steps
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    for one, other in zip(*weights, strict=True):
        # Adam divides by what is near 0, and so by what a processor's own order of sums leaves of it.
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
