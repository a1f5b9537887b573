"""The ranks of a sharded model, which write a checkpoint together and take one up together, each its own parts.

The first rank alone has the run's directory, and decides; the others are told by exchanges of the group, in which they
also hear of what has failed elsewhere. A checkpoint gets its name when all ranks have written theirs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from autoaccum.errors import CheckpointCorruptError, CheckpointError, CheckpointWriteError, ResumeError
from autoaccum.memory.oom import insist
from autoaccum.ranks.group import Group
from autoaccum.runs import parts, states
from autoaccum.runs.files import sync_directory
from autoaccum.runs.tensor_files import Tensors

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

    def write(self, packed: states.Packed, folder: Path | None = None) -> Written:
        """Write this rank's files of a checkpoint; return those of all ranks, when all of them are written.

        Args:
            packed: the state, as this rank has it.
            folder: the unfinished checkpoint; None on all but the first rank, which tells them.

        Raises:
            CheckpointWriteError: this rank cannot write them.
            RankError: another one cannot.
        """
        # Folders are made by one rank before the others hear of them, so that a rank that finds none reaches none.
        if folder is not None:
            for name in parts.FOLDERS:
                (folder / name).mkdir()
        place = Path(self._group.exchange(None if folder is None else os.fspath(folder))[0] or "")
        # Whoever has failed meanwhile, or is gone, is heard of in this: then it gets no manifest, and no name.
        told = self._group.exchange(self._own(place, packed))
        if folder is not None:
            for name in parts.FOLDERS:
                sync_directory(folder / name)
        return {name: described for of_rank in told for name, described in of_rank.items()}

    def _own(self, place: Path, packed: states.Packed) -> Written:
        written: Written = {}
        for folder in parts.FOLDERS:
            path = place / parts.file_of(folder, self._group.rank)
            # Of what lies on no other rank, such as buffers, the first rank's is kept.
            others: Tensors = packed.weights if folder == parts.MODEL and self._group.is_first else {}
            found = _written(path, packed.distributed.get(folder, {}), others)
            if found is not None:
                written[parts.file_of(folder, self._group.rank)] = found
        return written

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


def _written(path: Path, distributed: parts.Parts, others: Tensors) -> tuple[int, str] | None:
    """Write a file, and once more where memory ran out; return its bytes and their SHA-256, or None if it is empty."""

    # By itself, and not with all of the checkpoint, which the other ranks do not begin again.
    def write() -> tuple[int, str] | None:
        path.unlink(missing_ok=True)
        return parts.write(path, distributed, others)

    if not path.parent.is_dir():
        reason = "is not there on this rank: a sharded model needs a run_dir that all ranks reach"
        raise CheckpointWriteError(path.parent, 0, reason)
    try:
        return insist(write, "a checkpoint was written")
    except OSError as error:
        num_bytes = sum(tensor.to_local().nbytes for tensor in distributed.values())  # type: ignore[attr-defined]
        raise CheckpointWriteError(path, num_bytes, error.strerror or repr(error)) from None
