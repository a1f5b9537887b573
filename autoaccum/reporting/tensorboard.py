"""A run in TensorBoard."""

from __future__ import annotations

import os
from typing import Any

from autoaccum.errors import MissingExtraError
from autoaccum.events import Resumed, Started
from autoaccum.reporting.following import Follower


class TensorBoardReporter(Follower):
    """Callback that writes a scalar of each number per step, and events as texts.

    Steps that a resume made void are purged.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Write event files to a directory, which need not be there.

        Raises:
            MissingExtraError: tensorboard is not installed.
        """
        # Imported here, for it needs a package that nothing else needs.
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError("tensorboard", "tensorboard", "TensorBoardReporter") from None
        super().__init__()
        self._made: Any = SummaryWriter
        self._directory = os.path.abspath(directory)  # callbacks may change directory
        self._writer: Any = None

    def _begin(self, started: Started | None, resumed: Resumed | None) -> None:
        # What TensorBoard shows beyond that step is of windows that are trained again.
        self._writer = self._made(self._directory, purge_step=None if resumed is None else resumed.step + 1)

    def _numbers(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def _text(self, text: str, step: int) -> None:
        self._writer.add_text("events", text, step)

    def _end(self, reason: str) -> None:
        self._writer.close()
