"""What a run leaves to its caller."""

from __future__ import annotations

import dataclasses

import pytest
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.training.result import FitResult
from tests.models import classes, mlp


def test_it_is_what_fit_returns_and_cannot_be_changed() -> None:
    model = mlp()
    result = autoaccum.fit(
        model, classes(20), effective_batch=8, micro_batch=3, loss_fn=cross_entropy, device="cpu", progress=False
    )
    assert type(result) is autoaccum.FitResult is FitResult
    assert (result.num_steps, result.num_samples, len(result.history)) == (3, 20, 3)
    assert result.plan.sizes == (3, 3, 2)
    assert result.model is model
    assert {id(p) for group in result.optimizer.param_groups for p in group["params"]} == set(
        map(id, model.parameters())
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.num_steps = 4  # type: ignore[misc]


def test_a_notebook_shows_a_few_facts_of_it_and_not_all_that_it_holds() -> None:
    data = classes(20)
    options = {"effective_batch": 8, "loss_fn": cross_entropy, "device": "cpu"}
    result = autoaccum.fit(mlp(), data, micro_batch=3, progress=False, **options)
    loss = f"{result.history[-1].loss:.6g}"
    shown = f"num_steps=3, num_samples=20, loss={loss}, plan=2 x 3 + 2, model=Sequential"
    assert repr(result) == f"FitResult({shown})"
    assert f"<th>loss</th><td>{loss}</td>" in result._repr_html_()
    probed = autoaccum.probe(mlp(), data, max_micro_batch=4, memory_limit="8GiB", **options)
    assert repr(probed).startswith(f"ProbeReport(max_micro_batch=4, trials={len(probed.trials)}, limit=")
    assert repr(probed).endswith("plan=2 x 4)")
    assert "<th>max_micro_batch</th><td>4</td>" in probed._repr_html_()
    checked = autoaccum.check(mlp(), (data[0][:8], data[1][:8]), loss_fn=cross_entropy, device="cpu")
    assert repr(checked) == "<CheckReport: EXACT: windows that are cut have the gradient of whole ones>"
    assert checked._repr_html_().startswith("<pre>EXACT")
