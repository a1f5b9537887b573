"""What reaches MLflow: the real library, with a store in a file of SQLite and no network."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from autoaccum.errors import MissingExtraError
from autoaccum.events import Finished, Notice, OutOfMemory, Replanned
from autoaccum.reporting import MLflowReporter
from autoaccum.testing import manual_clock
from tests.reporting.following import Broken, no_network, train
from tests.reporting.synthetic import report, started

if importlib.util.find_spec("mlflow") is None:
    pytest.skip("mlflow is not installed", allow_module_level=True)

pytestmark = [
    # Of its own, and of what it is made with.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("no_network"),
]
__all__ = ["no_network"]


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store, which takes a second to be made."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'store.db'}"


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # where it puts artifacts


def only_run(uri: str, experiment: str) -> Any:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return found


def history(uri: str, run: Any, name: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    found = MlflowClient(tracking_uri=uri).get_metric_history(run.info.run_id, name)
    return [(metric.step, metric.value) for metric in found]


def test_a_run_that_failed_goes_on_as_the_same_run(uri: str, tmp_path: Path, no_network: list[Any]) -> None:
    run_dir, whole = tmp_path / "run", train(None)
    tell = MLflowReporter(tracking_uri=uri, experiment="goes on", name="a name", tags={"by": "hand"})
    with pytest.raises(Broken):
        train(run_dir, tell, ends=3)
    failed = only_run(uri, "goes on")
    assert (failed.info.status, failed.info.run_name, failed.data.tags["by"]) == ("FAILED", "a name", "hand")
    assert failed.data.params["num_steps"] == "6"
    assert [step for step, _ in history(uri, failed, "loss")] == [1, 2, 3]
    train(run_dir, MLflowReporter(tracking_uri=uri, experiment="goes on"))
    run = only_run(uri, "goes on")
    assert (run.info.run_id, run.info.status) == (failed.info.run_id, "FINISHED")
    # Window 3 was trained twice, and is there twice, with the same values.
    for name in ("loss", "grad_norm", "lr", "peak_bytes", "replays", "micro_batch", "train/half"):
        assert [step for step, _ in history(uri, run, name)] == [1, 2, 3, 3, 4, 5, 6], name
    losses = [report.loss for report in whole.history]
    assert [value for _, value in history(uri, run, "loss")] == [*losses[:3], *losses[2:]]
    assert [step for step, _ in history(uri, run, "validation/loss")] == [2, 4, 6]
    assert [step for step, _ in history(uri, run, "validation/near")] == [2, 4, 6]
    told = run.data.tags["autoaccum.events"]
    assert told.count("step 2: resumed from ") == 1
    assert told.endswith("Finished\n")
    assert no_network == []


def test_events_names_and_numbers_that_mlflow_would_refuse(uri: str) -> None:
    tell = MLflowReporter(tracking_uri=uri, experiment="events")
    window = report(1, loss=math.nan, outputs={"top@5": 0.5})
    replan = Replanned(step=2, old=(4, 4), new=(2, 2, 2, 2), reason="out of memory")
    ran_out, done = OutOfMemory(step=2, phase="training", micro_batch=4), Finished(step=2, reason="interrupted")
    for record in (started(), window, ran_out, replan, Notice(cause="A", consequence="B", cure="C"), done):
        tell(record)
    run = only_run(uri, "events")
    assert run.info.status == "KILLED"
    assert history(uri, run, "train/top_5") == [(1, 0.5)]
    assert len(history(uri, run, "loss")) == 1
    told = "OutOfMemory\nstep 2: out of memory: 4 x 2 -> 2 x 4\nA. B. C.\nFinished\n"
    assert run.data.tags["autoaccum.events"] == told


def test_numbers_are_sent_now_and_then(uri: str) -> None:
    """MLflow itself takes 1,000 numbers at once."""
    with manual_clock(1000.0) as clock:
        tell = MLflowReporter(tracking_uri=uri, experiment="lots")
        tell(started())
        for step in range(1, 101):
            tell(report(step))
        assert history(uri, only_run(uri, "lots"), "loss") == []
        clock.advance(5.0)
        tell(report(101))
        assert len(history(uri, only_run(uri, "lots"), "loss")) == 101
        tell(report(102))
        tell.close()
    assert [step for step, _ in history(uri, only_run(uri, "lots"), "loss")] == list(range(1, 103))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtraError, match=r"needs mlflow-skinny, .* -m pip install mlflow-skinny$") as raised:
        MLflowReporter()
    assert (raised.value.package, raised.value.extra) == ("mlflow-skinny", "mlflow")
