"""Workers end with the process that started them, whoever holds what they read; what they raise is told as here."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import autoaccum
from autoaccum.errors import DataError

OPTIONS: dict[str, Any] = {"effective_batch": 16, "loss_fn": cross_entropy, "progress": False, "device": "cpu"}


class Killed(Dataset[Any]):
    """Samples of which one ends the worker that reads it, as the kernel does when memory runs out."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if index == 27 and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(4), torch.tensor(index % 3)


class KilledStream(IterableDataset[Any]):
    """The same without indices."""

    def __iter__(self) -> Any:
        return map(Killed().__getitem__, range(40))


# PyTorch leaves a file of its own open where it raises.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("dataset", [Killed(), KilledStream()])
def test_a_worker_that_was_killed_says_what_to_do(dataset: Any) -> None:
    with pytest.raises(DataError, match="a worker ended without an error of Python .*fewer workers.*num_workers=0"):
        autoaccum.fit(nn.Linear(4, 3), DataLoader(dataset, 8, num_workers=1), **OPTIONS)
    # Until the iterator is gone, PyTorch's handler of SIGCHLD may raise once more, in whatever runs.
    gc.collect()


class Broken(Dataset[Any]):
    """Forty samples, of which one is missing, or None."""

    def __init__(self, is_none: bool) -> None:
        self._is_none = is_none

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if index == 27:
            if self._is_none:
                return torch.ones(4), None
            raise FileNotFoundError("x27.wav")
        return torch.ones(4), torch.tensor(index % 3)


_SCRIPT = """
import sys, autoaccum
from torch import nn
from tests.data.test_workers import OPTIONS, Broken

try:
    autoaccum.fit(nn.Linear(4, 3), Broken(False), num_workers=2, cache=False, **OPTIONS)
except FileNotFoundError as error:
    kept = error  # and with it the frames that hold what is read
print("end")
"""


def test_a_process_ends_whoever_holds_what_its_workers_read() -> None:
    """In a process of its own, which would wait for its workers; a test that fails here has waited two minutes."""
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False, timeout=120, cwd=root
    )
    assert (run.returncode, run.stdout) == (0, "end\n"), run.stderr


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_a_dataset_names_the_sample(num_workers: int) -> None:
    with pytest.raises(FileNotFoundError, match="x27.wav") as caught:
        autoaccum.fit(nn.Linear(4, 3), Broken(False), num_workers=num_workers, **OPTIONS)
    assert "It was raised for sample 27." in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_that_make_no_batch_are_told_alike(num_workers: int) -> None:
    with pytest.raises(DataError, match=r"^data: default_collate makes no batch of .*NoneType"):
        autoaccum.fit(nn.Linear(4, 3), Broken(True), num_workers=num_workers, **OPTIONS)
