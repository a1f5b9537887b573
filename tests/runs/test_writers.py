"""What ranks tell each other while they write a checkpoint together, and take one up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autoaccum.errors import CheckpointCorruptError, CheckpointWriteError, ResumeError
from autoaccum.runs import parted, states
from autoaccum.runs.writers import Writers
from tests.runs.meshes import as_rank, cut


class Two:
    """A group of two, the other one of which says what it is given to say."""

    size = 2

    def __init__(self, rank: int, *heard: Any) -> None:
        self.rank, self.heard, self.told = rank, list(heard), []  # type: ignore[var-annotated]

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def exchange(self, told: Any) -> list[Any]:
        self.told.append(told)
        other = self.heard.pop(0)
        return [told, other] if self.is_first else [other, told]


def writers(rank: int, *heard: Any) -> Writers:
    return Writers(Two(rank, *heard))  # type: ignore[arg-type]


def test_the_first_rank_says_what_is_due_and_what_is_taken_up() -> None:
    assert writers(0, False).hear(True)
    assert not writers(1, False).hear(True)
    assert writers(0, None).offer(Path("a")) == Path("a")
    assert writers(1, "a").offer(None) == Path("a")
    assert writers(1, None).offer(None) is None


def written(rank: int, folder: Path | None, *heard: Any) -> Any:
    with as_rank(rank, 2) as mesh:
        model = {"weight": cut(torch.arange(6.0), mesh), "buffer": torch.ones(2)}
        moments = states.examined({"moment": cut(torch.arange(4.0), mesh)})
        return writers(rank, *heard).write({**states.of_weights(model).parts, **moments.parts}, folder)


def test_each_rank_writes_its_own_file(tmp_path: Path) -> None:
    own = written(0, tmp_path, None, {"theirs": (1, "2")})
    assert own.keys() == {parted.file_of(0), "theirs"}
    others = written(1, None, str(tmp_path), {})
    assert others.keys() == {parted.file_of(1)}
    files = parted.Files(tmp_path, [parted.file_of(0), *others])
    assert [len(files.chunks(name)) for name in ("weights.weight", "weights.buffer", "moment")] == [2, 0, 2]


def test_a_directory_that_a_rank_does_not_reach_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointWriteError, match="all ranks reach"):
        written(1, None, str(tmp_path / "elsewhere"))


def _raise(error: Exception) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


def test_what_one_rank_cannot_take_up_no_rank_does() -> None:
    torn = CheckpointCorruptError("there", "is torn")
    with pytest.raises(CheckpointCorruptError, match="is torn"):
        writers(0, None).take(_raise(torn))
    with pytest.raises(CheckpointCorruptError, match="by rank 1: it is torn"):
        writers(0, "it is torn").take(lambda: None)
    writers(0, None).take(lambda: None)
    two = writers(0)
    with pytest.raises(ResumeError):
        two.take(_raise(ResumeError("there", ["a"])))
