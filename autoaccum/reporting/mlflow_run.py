"""A run in MLflow."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoaccum.errors import MissingExtraError
from autoaccum.events import Event, Finished, Resumed, Started, StepReport, Validated
from autoaccum.memory import clock
from autoaccum.reporting.following import Follower, keep, kept_of, numbers_of, text_of, validation_of

ID = "mlflow.json"
"""The file in a run's directory that keeps the id of the run in MLflow."""
MOST = 500
"""Send numbers once there are so many of them; MLflow takes 1,000 at once."""
EVERY = 5.0
"""Send them after so many seconds in any case."""
LONGEST = 4000
"""Keep so many characters of what was told; MLflow takes 5,000 in a tag."""
TRAINED, VALIDATED, EVENTS = "autoaccum.step", "autoaccum.validated", "autoaccum.events"
"""Tags: the last step that has its numbers, the last that was validated, what was told."""


class MLflowReporter(Follower):
    """Callback that logs the numbers of each window to MLflow, and what was told as the tag ``autoaccum.events``.

    A run that goes on is the same run there. Windows that are trained again are logged once: as they repeat what they
    were, those stay that MLflow has already.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        tracking_uri: str | None = None,
        experiment: str = "Default",
        name: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Log to a new run of MLflow.

        Args:
            directory: that of the run (its ``run_dir``), where the id of the MLflow run is kept to go on with it.
            tracking_uri: where to; MLflow's own when left out.
            experiment: its name; made where there is none.
            name: of the run.
            tags: of the run.

        Raises:
            MissingExtraError: mlflow is not installed.
        """
        # Imported here, for it needs a package that nothing else needs.
        try:
            import mlflow
            from mlflow.exceptions import MlflowException
        except ImportError:
            raise MissingExtraError("mlflow-skinny", "mlflow", "MLflowReporter") from None
        super().__init__()
        self._mlflow: Any = mlflow
        self._missing: Any = MlflowException
        self._directory = None if directory is None else Path(directory).absolute()
        self._uri, self._experiment, self._name, self._tags = tracking_uri, experiment, name, dict(tags or {})
        self._client: Any = None
        self._run_id = ""
        self._step = 0
        # What is to be sent, and when something was sent last.
        self._metrics: list[Any] = []
        self._changed: dict[str, str] = {}
        self._sent_at = 0.0
        # What MLflow has: numbers up to these steps, and texts.
        self._last = {TRAINED: 0, VALIDATED: 0}
        self._events = ""
        self._had = 0  # the last step of an earlier process

    def _begin(self, started: Started | None, resumed: Resumed | None) -> None:
        # A client and not the functions of the module: a run of the user's own may be open there.
        self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        known = None if resumed is None else kept_of(self._directory, ID).get("id")
        tags = None if known is None else self._taken_up(known)
        if tags is None:
            self._run_id = self._made()
            for name in ("device", "num_steps", "num_samples", "limit_bytes") if started is not None else ():
                self._client.log_param(self._run_id, name, getattr(started, name))
        keep(self._directory, ID, id=self._run_id)
        tags = tags or {}
        self._last = {name: int(tags.get(name, 0)) for name in (TRAINED, VALIDATED)}
        self._had = self._last[TRAINED]
        self._events = tags.get(EVENTS, "")
        self._metrics, self._changed, self._sent_at = [], {}, clock.now()

    def _taken_up(self, run_id: str) -> dict[str, str] | None:
        """Go on with a run, and return its tags; None where it is there no more."""
        try:
            found = self._client.get_run(run_id)
            self._client.update_run(run_id, status="RUNNING")
        except self._missing:  # deleted by hand, or of another store
            return None
        self._run_id = run_id
        return dict(found.data.tags)

    def _made(self) -> str:
        """Make a run, and return its id."""
        known = self._client.get_experiment_by_name(self._experiment)
        place = self._client.create_experiment(self._experiment) if known is None else known.experiment_id
        return str(self._client.create_run(place, run_name=self._name, tags=self._tags).info.run_id)

    def _window(self, report: StepReport) -> None:
        self._log(TRAINED, report.step, numbers_of(report))

    def _validation(self, validated: Validated) -> None:
        self._log(VALIDATED, validated.step, validation_of(validated))
        self._send()

    def _told(self, event: Event) -> None:
        # Of windows that are trained again it was told before, with their numbers.
        if not isinstance(event, Resumed | Finished) and 0 < getattr(event, "step", 0) <= self._had:
            return
        self._events = f"{self._events}{text_of(event)}\n"[-LONGEST:]
        self._changed[EVENTS] = self._events

    def _log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Keep numbers of a step to be sent, unless MLflow has them; send what there is when it is time."""
        if step <= self._last[kind]:
            return
        self._last[kind] = step
        self._changed[kind] = str(step)  # in one message with the numbers, so that it is true of them
        stamp = int(clock.stamp() * 1000)
        for name, value in values.items():
            key = re.sub(r"[^\w\-. :/]", "_", name)  # others are refused
            self._metrics.append(self._mlflow.entities.Metric(key, float(value), stamp, step))
        if len(self._metrics) >= MOST or clock.now() - self._sent_at >= EVERY:
            self._send()

    def _send(self) -> None:
        """Send what there is."""
        tags = [self._mlflow.entities.RunTag(name, text) for name, text in self._changed.items()]
        if self._metrics or tags:
            self._client.log_batch(self._run_id, metrics=self._metrics, tags=tags)
        self._metrics, self._changed, self._sent_at = [], {}, clock.now()

    def _end(self, reason: str) -> None:
        self._send()
        # A callback's wish is an end like any other; a run that was interrupted may go on.
        if reason in ("budget", "stopped", "closed"):
            status = "FINISHED"
        else:
            status = "KILLED" if reason in ("interrupted", "KeyboardInterrupt") else "FAILED"
        self._client.set_terminated(self._run_id, status=status)
        self._client = None
