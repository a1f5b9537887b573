"""What any number of ranks has written in parts, any other number reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.errors import CheckpointCorruptError
from autoaccum.runs import parted
from tests.runs.meshes import as_rank, cut


def written(folder: Path, tensors: dict[str, torch.Tensor], *shape: int, dim: int = 0) -> list[str]:
    """Write tensors as the ranks of a mesh would; return the names of their files."""
    names = []
    for rank in range(torch.Size(shape).numel()):
        with as_rank(rank, *shape) as mesh:
            own = {name: cut(tensor, mesh, min(dim, tensor.dim() - 1)) for name, tensor in tensors.items()}
            name = parted.file_of(rank)
            if parted.write(folder / name, own) is not None:
                names.append(name)
    return names


def whole() -> dict[str, torch.Tensor]:
    """Return tensors of few and many rows, and of one number."""
    torch.manual_seed(0)
    return {
        "wide": torch.randn(7, 5, dtype=torch.float64),
        "few": torch.randn(2, 3).bfloat16(),
        "one": torch.randn(1),
        "deep": torch.randn(4, 3, 2, dtype=torch.float16),
    }


def there_of(folder: Path, names: list[str], name: str, like: torch.Tensor) -> parted.Parted:
    return parted.Parted(parted.Files(folder, names), name, like.dtype, list(like.shape))


@pytest.mark.parametrize("now", [(1,), (2,), (5,), (2, 2)])
@pytest.mark.parametrize(("then", "dim"), [((1,), 0), ((3,), 0), ((2,), 1), ((2, 2), 0)])
def test_ranks_read_what_others_have_written(
    then: tuple[int, ...], dim: int, now: tuple[int, ...], tmp_path: Path
) -> None:
    tensors = whole()
    names = written(tmp_path, tensors, *then, dim=dim)
    for rank in range(torch.Size(now).numel()):
        with as_rank(rank, *now) as mesh:
            for name, tensor in tensors.items():
                there = cut(torch.zeros_like(tensor), mesh)
                found: Any = there_of(tmp_path, names, name, tensor).like(there)
                expected: Any = cut(tensor, mesh)
                assert torch.equal(found.to_local(), expected.to_local())
                assert (found.placements, found.shape) == (there.placements, tensor.shape)  # type: ignore[attr-defined]
    for name, tensor in tensors.items():
        assert torch.equal(there_of(tmp_path, names, name, tensor).like(torch.zeros_like(tensor)), tensor)


def test_what_is_cut_otherwise_now_is_read(tmp_path: Path) -> None:
    tensor = whole()["wide"]
    names = written(tmp_path, {"wide": tensor}, 3)
    with as_rank(1, 2) as mesh:
        found: Any = there_of(tmp_path, names, "wide", tensor).like(cut(torch.zeros_like(tensor), mesh, 1))
        assert torch.equal(found.to_local(), tensor[:, 3:])


def test_a_whole_tensor_is_put_as_a_part_and_others_as_they_are() -> None:
    tensor = whole()["wide"]
    with as_rank(1, 3) as mesh:
        found = parted.put(tensor, cut(torch.zeros_like(tensor), mesh))
        assert torch.equal(found.to_local(), tensor[3:6])
        assert parted.put(found, found) is found
    assert parted.put(tensor, torch.zeros_like(tensor)) is tensor
    assert parted.put(tensor, torch.zeros(3)) is tensor
    assert parted.put(3, tensor) == 3
    assert parted.put(tensor, None) is tensor


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    tensor = whole()["wide"]
    names = written(tmp_path, {"wide": tensor}, 3)
    with pytest.raises(CheckpointCorruptError, match="wide is not there as a whole"):
        there_of(tmp_path, names[:2], "wide", tensor).like(tensor)
    with pytest.raises(CheckpointCorruptError, match="not of torch.float32"):
        parted.Parted(parted.Files(tmp_path, names), "wide", torch.float32, [7, 5]).like(tensor)


@pytest.mark.parametrize("told", [{"wide": ([0], torch.ones(7, 5))}, {"wide": torch.ones(7, 5)}, [], Path("a"), b""])
def test_a_strangers_file_is_refused(told: Any, tmp_path: Path) -> None:
    name, tensor = parted.file_of(0), torch.ones(7, 5)
    torch.save(told, tmp_path / name)
    with pytest.raises(CheckpointCorruptError, match="where its parts begin"):
        there_of(tmp_path, [name], "wide", tensor).like(tensor)
    (tmp_path / name).write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(CheckpointCorruptError, match="where its parts begin"):
        there_of(tmp_path, [name], "wide", tensor).like(tensor)


def test_a_shape_is_taken_for_one_alone() -> None:
    with pytest.raises(ValueError, match="shape"):
        parted.Parted(parted.Files(Path(), []), "wide", torch.float32, [-1])


def test_of_copies_the_first_is_written(tmp_path: Path) -> None:
    assert written(tmp_path, whole(), 2, 2) == [parted.file_of(rank) for rank in (0, 1)]


def test_names_of_files() -> None:
    assert all(parted.is_file(parted.file_of(rank)) for rank in (0, 99_998))
    for name in ("model.pt", "../shard-00001.pt", "shard-1.pt"):
        assert not parted.is_file(name)


def test_only_what_is_cut_along_its_dimensions_can_be_told() -> None:
    from torch.distributed.tensor import DTensor, Partial

    with as_rank(0, 2) as mesh:
        assert parted.is_cut(cut(torch.ones(4), mesh))
        assert not parted.is_cut(DTensor.from_local(torch.ones(4), mesh, [Partial()]))


# Where tensors of a saved state are put.


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
    tensors: dict[str, torch.Tensor] = {}

    def away(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        tensors[name] = value.detach().clone()
        return parted.Parted(files, name, value.dtype, list(value.shape))

    files = parted.Files(folder, [parted.file_of(0)])
    weights = {name: away(name, value) for name, value in model.state_dict().items()}
    weights["1.weight"] = weights["0.weight"]
    state = optimizer.state_dict()
    kept = {n: {name: away(f"{n} {name}", v) for name, v in of.items()} for n, of in state["state"].items()}
    with as_rank(0, 1) as mesh:
        own = {name: cut(tensor, mesh) for name, tensor in tensors.items()}
        parted.write(folder / parted.file_of(0), own)
    return weights, {"optimizer": {**state, "state": kept}, "modules": [], "step": 3}


def test_of_a_process_that_has_all_of_the_model(tmp_path: Path) -> None:
    weights, state = saved(tmp_path)
    model, optimizer = run()
    found, others = parted.placed(model, [], optimizer, weights, state)
    assert found["0.weight"] is found["1.weight"], "what is one tensor stays one"
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    for number, values in optimizer.state_dict()["state"].items():
        assert all(torch.equal(others["optimizer"]["state"][number][name], value) for name, value in values.items())
    assert others["step"] == 3
    assert isinstance(weights["0.bias"], parted.Parted), "what was passed is left alone"


def test_of_a_module_beside_the_model(tmp_path: Path) -> None:
    weights, state = saved(tmp_path)
    model, optimizer = run()
    _, others = parted.placed(model, [model], optimizer, {}, {**state, "modules": [{"state": weights, "buffers": {}}]})
    assert torch.equal(others["modules"][0]["state"]["0.bias"], model.state_dict()["0.bias"])


def test_what_belongs_nowhere_is_named(tmp_path: Path) -> None:
    _, state = saved(tmp_path)
    model, optimizer = run()
    state["optimizer"]["state"][0]["odd"] = state["optimizer"]["state"][1]["exp_avg"]
    with pytest.raises(CheckpointCorruptError, match=r"optimizer.state\[0\].odd has the shape \(3,\), not \(3, 3\)"):
        parted.placed(model, [], optimizer, {}, state)


@pytest.mark.parametrize("state", [None, 3, {}, {"optimizer": None}, {"optimizer": {"state": 3}}, {"modules": 3}])
def test_what_is_no_state_is_left_to_the_check(state: Any) -> None:
    model, optimizer = run()
    assert parted.placed(model, [], optimizer, 5, state) == (5, state)
