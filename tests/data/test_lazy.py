"""Arrays that lie in files are read by rows, by workers too, and runs are those of the same numbers in memory."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss

from autoaccum import Accumulator, evaluate, fit
from autoaccum.data.lazy import LazyRows
from autoaccum.errors import ArgumentTypeError, AutoaccumError, DataError, RaggedBatchError

DRAWN = torch.Generator().manual_seed(5)
X = torch.randn(24, 5, generator=DRAWN, dtype=torch.float64)
Y = torch.randn(24, 1, generator=DRAWN, dtype=torch.float64)


class InFile:
    """An array that is read when it is sliced, in a file that only the process that opened it may read."""

    def __init__(self, filename: str, mode: str = "r") -> None:
        self.filename, self.name, self.file, self._process = filename, "x", self, os.getpid()
        self.shape, self.dtype = tuple(X.shape), np.dtype("float64")
        assert mode == "r"

    def __getitem__(self, where: Any) -> Any:
        if where == "x":  # as the file, of which it is the only array
            return self
        assert self._process == os.getpid(), "a file that another process has opened"
        return np.load(self.filename, mmap_mode="r")[where]

    def __reduce__(self) -> Any:
        raise TypeError("open files cannot be pickled")


@pytest.fixture
def in_file(tmp_path: Path) -> InFile:
    np.save(tmp_path / "x.npy", X.numpy())
    return InFile(str(tmp_path / "x.npy"))


def trained(data: Any, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if isinstance(data, tuple):
        options["loss_fn"] = mse_loss
    else:
        options["training_step"] = lambda model, batch: mse_loss(model(batch["x"]), batch["y"])
    fit(model, data, effective_batch=12, micro_batch=5, optimizer=optimizer, progress=False, **options)
    return model.weight.detach()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_beside_tensors_are_those_in_memory(in_file: InFile, num_workers: int) -> None:
    right = trained((X, Y))
    assert torch.equal(trained((in_file, Y), num_workers=num_workers), right)
    assert torch.equal(trained({"x": in_file, "y": Y.numpy()}, num_workers=num_workers), right)


def test_what_is_sent_to_a_worker_opens_the_file_there(in_file: InFile) -> None:
    rows = LazyRows({"x": in_file, "name": ["a"] * 24, "scale": 2.0}, "data")
    again = pickle.loads(pickle.dumps(rows))
    assert len(again) == 24
    assert torch.equal(again[3]["x"], X[3])
    assert (again[3]["name"], again[3]["scale"]) == ("a", 2.0)


def test_a_batch_of_them_is_read(in_file: InFile) -> None:
    model = torch.nn.Linear(5, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss = Accumulator(model, optimizer, loss_fn=mse_loss, micro_batch=5).step((in_file, Y)).detach()
    assert float(loss) == pytest.approx(float(mse_loss(model(X), Y).detach()), rel=1e-12)
    found = evaluate(model, (in_file, Y), loss_fn=mse_loss)
    assert found.loss == pytest.approx(float(loss), rel=1e-12)


def test_other_numbers_of_rows_are_refused(in_file: InFile) -> None:
    with pytest.raises(RaggedBatchError):
        trained((in_file, Y[:7]))


def test_a_dim_of_it_is_refused(in_file: InFile) -> None:
    with pytest.raises(DataError, match=r"array\[:\], or leave them out"):
        trained((in_file, Y), batch_dim=1)


def test_an_npz_is_a_dict_of_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X.numpy(), y=Y.numpy())
    with np.load(tmp_path / "a.npz") as found:
        assert torch.equal(trained(found), trained({"x": X, "y": Y}))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_files_of_h5py(tmp_path: Path, num_workers: int) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = X.numpy(), Y.numpy()
    with h5py.File(tmp_path / "a.h5", "r") as file:
        assert torch.equal(trained((file["x"], Y), num_workers=num_workers), trained((X, Y)))
        assert torch.equal(trained(file, num_workers=num_workers), trained((X, Y)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_groups_of_zarr(tmp_path: Path, num_workers: int) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(str(tmp_path / "a"), mode="w")
    group["x"], group["y"] = X.numpy(), Y.numpy()
    assert torch.equal(trained((group["x"], Y), num_workers=num_workers), trained((X, Y)))
    assert torch.equal(trained(group, num_workers=num_workers), trained((X, Y)))


def test_tables_and_columns_are_refused_with_a_line_that_works() -> None:
    pyarrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    table = pyarrow.table({"x": X.tolist(), "y": Y.tolist()})
    with pytest.raises(ArgumentTypeError) as refused:
        trained(table)
    line = str(refused.value).partition("as tensors: ")[2].removesuffix(".")
    assert trained({name: part.double() for name, part in eval(line, {"torch": torch, "table": table}).items()}).numel()
    columns = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()})
    for data in ((columns["x"], Y), {"x": columns["x"], "y": columns["y"]}):
        with pytest.raises(AutoaccumError, match=r"torch\.tensor\(column\[:\]\)"):
            trained(data)
    with pytest.raises(ArgumentTypeError, match=r"torch\.tensor\(column\.to_pylist\(\)\)"):
        trained((table["x"], Y))
