"""A run in Weights & Biases."""

from __future__ import annotations

import uuid
from typing import Any

from autoaccum.errors import MissingExtraError
from autoaccum.events import Resumed, Started
from autoaccum.reporting.following import FACTS, KnownFollower


class WandbReporter(KnownFollower):
    """Callback that logs the numbers of each window to Weights & Biases, over ``step``, and events as texts.

    A resumed run is the same run there. Windows that are trained again are logged again, with the same values.
    """

    def __init__(self, **options: Any) -> None:
        """Log to a new run of W&B.

        Args:
            options: those of ``wandb.init``: project, name, config, mode and the like.

        Raises:
            MissingExtraError: wandb is not installed.
        """
        # Imported here, for it needs a package that nothing else needs.
        try:
            import wandb
        except ImportError:
            raise MissingExtraError("wandb", "wandb", "WandbReporter") from None
        super().__init__()
        self._wandb: Any = wandb
        self._options = options
        self._run: Any = None

    def _begin(self, started: Started | None, resumed: Resumed | None) -> None:
        known = None if resumed is None else self._id
        # Not drawn from a generator that training draws from.
        self._id = self._options.get("id") or known or uuid.uuid4().hex[:8]
        # A run of the user's own that is open in this process is left alone.
        options = {"reinit": "create_new", "resume": "allow", **self._options, "id": self._id}
        self._run = self._wandb.init(**options)
        # W&B takes no step of its own twice, but any number of values over another axis.
        self._run.define_metric("*", step_metric="step")
        if started is not None:
            facts = {name: getattr(started, name) for name in FACTS}
            self._run.config.update({"autoaccum": facts}, allow_val_change=True)

    def _numbers(self, values: dict[str, float], step: int) -> None:
        self._run.log({"step": step, **values})

    def _text(self, text: str, step: int) -> None:
        self._run.log({"step": step, "event": text})

    def _end(self, reason: str) -> None:
        # Ctrl-C and a callback's wish are no failures.
        is_done = reason in ("budget", "stopped", "interrupted", "closed")
        self._run.finish(exit_code=0 if is_done else 1)
        self._run = self._id = None
