"""Tensors of a saved state are put where those of a run lie, and what is no state is handed on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.errors import CheckpointCorruptError
from autoaccum.runs import parted, parts
from autoaccum.runs.placing import placed
from tests.runs.meshes import as_rank, cut


def run() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with tied weights, and its optimizer after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def saved(folder: Path) -> tuple[Any, Any]:
    """Return such a state with parts in the place of all tensors of more than one number."""
    model, optimizer = run()
    (folder / parts.MOMENTS).mkdir()
    tensors: dict[str, torch.Tensor] = {}

    def away(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        tensors[name] = value.detach().clone()
        return parted.Parted(files, parts.MOMENTS, name, "F32", list(value.shape))

    files = parted.Files(folder, [parts.file_of(parts.MOMENTS, 0)])
    weights = {name: away(name, value) for name, value in model.state_dict().items()}
    weights["1.weight"] = weights["0.weight"]
    state = optimizer.state_dict()
    kept = {n: {name: away(f"{n} {name}", v) for name, v in of.items()} for n, of in state["state"].items()}
    with as_rank(0, 1) as mesh:
        own = {name: cut(tensor, mesh) for name, tensor in tensors.items()}
        parts.write(folder / parts.file_of(parts.MOMENTS, 0), own)
    return weights, {"optimizer": {**state, "state": kept}, "modules": [], "step": 3}


def test_of_a_process_that_has_all_of_the_model(tmp_path: Path) -> None:
    weights, state = saved(tmp_path)
    model, optimizer = run()
    found, others = placed(model, [], optimizer, weights, state)
    assert found["0.weight"] is found["1.weight"], "what is one tensor stays one"
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    for number, values in optimizer.state_dict()["state"].items():
        assert all(torch.equal(others["optimizer"]["state"][number][name], value) for name, value in values.items())
    assert others["step"] == 3
    assert isinstance(weights["0.bias"], parted.Parted), "what was passed is left alone"


def test_of_a_module_beside_the_model(tmp_path: Path) -> None:
    weights, state = saved(tmp_path)
    model, optimizer = run()
    _, others = placed(model, [model], optimizer, {}, {**state, "modules": [{"state": weights, "buffers": {}}]})
    assert torch.equal(others["modules"][0]["state"]["0.bias"], model.state_dict()["0.bias"])


def test_what_belongs_nowhere_is_named(tmp_path: Path) -> None:
    _, state = saved(tmp_path)
    model, optimizer = run()
    state["optimizer"]["state"][0]["odd"] = state["optimizer"]["state"][1]["exp_avg"]
    with pytest.raises(CheckpointCorruptError, match=r"optimizer.state\[0\].odd has the shape \(3,\), not \(3, 3\)"):
        placed(model, [], optimizer, {}, state)


@pytest.mark.parametrize("state", [None, 3, {}, {"optimizer": None}, {"optimizer": {"state": 3}}, {"modules": 3}])
def test_what_is_no_state_is_left_to_the_check(state: Any) -> None:
    model, optimizer = run()
    assert placed(model, [], optimizer, 5, state) == (5, state)
