"""The ranks of a sharded model, which write a checkpoint together and take one up together, each its own parts.

The first rank alone has the run's directory, and decides; the others are told by exchanges of the group, in which they
also hear of what has failed elsewhere. A checkpoint gets its name when all ranks have written theirs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from autoaccum.distributed.group import Group
from autoaccum.errors import CheckpointCorruptError, CheckpointError, CheckpointWriteError, ResumeError
from autoaccum.memory.oom import insist
from autoaccum.runs import parted

Written = dict[str, tuple[int, str]]
"""Number of bytes and their SHA-256 of files, by their names in a checkpoint."""


class Writers:
    """The ranks that write the checkpoints of a run together."""

    def __init__(self, group: Group) -> None:
        """Begin for a group, of which every rank makes one."""
        self._group = group
        self.share = group.rank, group.size
        """The number of this rank and of all, by which they share out what is to be read."""

    def hear(self, is_due: bool) -> bool:
        """Return whether a checkpoint is due, as the first rank says."""
        return self._group.exchange(is_due)[0]

    def write(self, parts: parted.Parts, folder: Path | None = None) -> Written:
        """Write this rank's file of a checkpoint; return those of all ranks, when all of them are written.

        Args:
            parts: the tensors that lie on several ranks.
            folder: the unfinished checkpoint; None on all but the first rank, which tells them.

        Raises:
            CheckpointWriteError: this rank cannot write them.
            RankError: another one cannot.
        """
        place = Path(self._group.exchange(None if folder is None else os.fspath(folder))[0] or "")
        name = parted.file_of(self._group.rank)
        written = _written(place / name, parts)
        # Whoever has failed meanwhile, or is gone, is heard of in this: then it gets no manifest, and no name.
        told = self._group.exchange({} if written is None else {name: written})
        return {name: described for of_rank in told for name, described in of_rank.items()}

    def offer(self, path: Path | None) -> Path | None:
        """Return which checkpoint the first rank is about to take up, which passes it; None where there is none."""
        told = self._group.exchange(None if path is None else os.fspath(path))[0]
        return None if told is None else Path(told)

    def take(self, function: Callable[[], None]) -> None:
        """Call what takes a checkpoint up, on all ranks; raise what is wrong with it on any of them.

        Raises:
            CheckpointError: it cannot be taken up on some rank; another one may.
        """
        failure: CheckpointError | None = None
        try:
            function()
        except ResumeError:  # of the run, which no other checkpoint cures
            raise
        except CheckpointError as error:
            failure = error
        # Some ranks may have put it back by now. That does no harm: whatever is taken up next takes its place whole.
        told = self._group.exchange(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        for rank, text in enumerate(told):
            if text is not None:
                raise CheckpointCorruptError("", f"cannot be read by rank {rank}: {text}")


def _written(path: Path, parts: parted.Parts) -> tuple[int, str] | None:
    """Write a file, and once more where memory ran out; return its bytes and their SHA-256, or None if it is empty."""

    # By itself, and not with all of the checkpoint, which the other ranks do not begin again.
    def write() -> tuple[int, str] | None:
        path.unlink(missing_ok=True)
        return parted.write(path, parts)

    if not path.parent.is_dir():
        reason = "is not there on this rank: a sharded model needs a run_dir that all ranks reach"
        raise CheckpointWriteError(path.parent, 0, reason)
    try:
        return insist(write, "a checkpoint was written")
    except OSError as error:
        num_bytes = sum(tensor.to_local().nbytes for tensor in parts.values())  # type: ignore[attr-defined]
        raise CheckpointWriteError(path, num_bytes, error.strerror or repr(error)) from None
