"""A run in MLflow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from autoaccum.errors import MissingExtraError
from autoaccum.events import Resumed, Started
from autoaccum.memory import clock
from autoaccum.reporting.following import FACTS, KnownFollower

EVERY = 5.0
"""Send numbers after so many seconds, for a message of its own for each step would hold up training."""
LONGEST = 4000
"""Keep so many characters of what was told; MLflow takes 5,000 in a tag."""
EVENTS = "autoaccum.events"
"""The tag that holds them."""


class MLflowReporter(KnownFollower):
    """Callback that logs the numbers of each window to MLflow, and events in the tag ``autoaccum.events``.

    A resumed run is the same run there. Windows that are trained again are logged again, with the same values.
    """

    def __init__(
        self,
        *,
        tracking_uri: str | None = None,
        experiment: str = "Default",
        name: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Log to a new run of MLflow.

        Args:
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
        except ImportError:
            raise MissingExtraError("mlflow-skinny", "mlflow", "MLflowReporter") from None
        super().__init__()
        self._mlflow: Any = mlflow
        self._uri, self._experiment, self._name, self._tags = tracking_uri, experiment, name, dict(tags or {})
        self._client: Any = None
        self._events = ""
        # What is to be sent, and when something was sent last.
        self._metrics: list[Any] = []
        self._sent_at = 0.0

    def _begin(self, started: Started | None, resumed: Resumed | None) -> None:
        # A client and not the functions of the module: a run of the user's own may be open there.
        self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        if resumed is not None and self._id is not None:
            self._events = self._client.get_run(self._id).data.tags.get(EVENTS, "")
            self._client.update_run(self._id, status="RUNNING")
        else:
            known = self._client.get_experiment_by_name(self._experiment)
            place = self._client.create_experiment(self._experiment) if known is None else known.experiment_id
            made = self._client.create_run(place, run_name=self._name, tags=self._tags)
            self._id, self._events = str(made.info.run_id), ""
            for name in FACTS if started is not None else ():
                self._client.log_param(self._id, name, getattr(started, name))
        self._metrics, self._sent_at = [], clock.now()

    def _numbers(self, values: dict[str, float], step: int) -> None:
        stamp = int(clock.stamp() * 1000)
        for name, value in values.items():
            key = re.sub(r"[^\w\-. :/]", "_", name)  # others are refused
            self._metrics.append(self._mlflow.entities.Metric(key, float(value), stamp, step))
        if clock.now() - self._sent_at >= EVERY:
            self._send()

    def _text(self, text: str, step: int) -> None:
        self._events = f"{self._events}{text}\n"[-LONGEST:]

    def _send(self) -> None:
        """Send what there is."""
        tags = [self._mlflow.entities.RunTag(EVENTS, self._events)]
        self._client.log_batch(self._id, metrics=self._metrics, tags=tags)
        self._metrics, self._sent_at = [], clock.now()

    def _end(self, reason: str) -> None:
        self._send()
        # A callback's wish is an end like any other; a run that was interrupted may go on.
        if reason in ("budget", "stopped", "closed"):
            status = "FINISHED"
        else:
            status = "KILLED" if reason in ("interrupted", "KeyboardInterrupt") else "FAILED"
        self._client.set_terminated(self._id, status=status)
        self._client = self._id = None
