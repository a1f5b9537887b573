"""A run in Weights & Biases."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from autoaccum.errors import MissingExtraError
from autoaccum.events import Event, Finished, Resumed, Started, StepReport, Validated
from autoaccum.reporting.following import Follower, keep, kept_of, numbers_of, text_of, validation_of

ID = "wandb.json"
"""The file in a run's directory that keeps the id of the run in W&B."""


class WandbReporter(Follower):
    """Callback that logs the numbers of each window to Weights & Biases, by its step, and events as texts.

    A run that goes on is the same run there. Windows that are trained again are logged once: as they repeat what they
    were, those stay that W&B has already.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, **options: Any) -> None:
        """Log to a new run of W&B.

        Args:
            directory: that of the run (its ``run_dir``), where the id of the W&B run is kept to go on with it.
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
        self._directory = None if directory is None else Path(directory).absolute()
        self._options = options
        self._run: Any = None
        self._step = 0
        self._had = 0  # the last window that an earlier process has logged
        self._texts: list[str] = []  # of this step, of which W&B keeps one text

    def _begin(self, started: Started | None, resumed: Resumed | None) -> None:
        # Without a Resumed it is another run, whatever has been in the directory before.
        known = {} if resumed is None else kept_of(self._directory, ID)
        # Not drawn from a generator that training draws from.
        run_id = self._options.get("id") or known.get("id") or uuid.uuid4().hex[:8]
        # A run of the user's own that is open in this process is left alone.
        options = {"reinit": "create_new", "resume": "allow", **self._options, "id": run_id}
        self._run = self._wandb.init(**options)
        # W&B itself knows how far it is while it is online; an offline run is told by what was kept.
        self._had = int(known.get("step", 0))
        keep(self._directory, ID, id=run_id, step=self._had)
        self._step, self._texts = 0 if resumed is None else resumed.step, []
        if started is not None:
            facts = {name: getattr(started, name) for name in ("device", "num_steps", "num_samples", "limit_bytes")}
            self._run.config.update({"autoaccum": facts}, allow_val_change=True)

    def _window(self, report: StepReport) -> None:
        if report.step > self._had:
            self._log(report.step, numbers_of(report))

    def _validation(self, validated: Validated) -> None:
        self._log(validated.step, validation_of(validated))

    def _told(self, event: Event) -> None:
        step = getattr(event, "step", self._step)  # a notice has none
        if isinstance(event, Resumed):
            step = max(step, self._run.step)  # it is no window that is trained again
        elif 0 < step <= self._had and not isinstance(event, Finished):
            return
        if step != self._step:
            self._texts = []
        self._texts.append(text_of(event))
        self._log(step, {"event": "\n".join(self._texts)})

    def _log(self, step: int, values: dict[str, Any]) -> None:
        """Log what is of a step, beside what else is of it, unless W&B has gone further."""
        if step != self._step:
            self._step, self._texts = step, self._texts if "event" in values else []
        # Steps cannot be written again, and W&B would warn of each.
        if step >= self._run.step:
            self._run.log(values, step=step)

    def _end(self, reason: str) -> None:
        # Ctrl-C and a callback's wish are no failures.
        is_done = reason in ("budget", "stopped", "interrupted", "closed")
        keep(self._directory, ID, id=self._run.id, step=max(self._had, self._step))
        self._run.finish(exit_code=0 if is_done else 1)
        self._run = None
