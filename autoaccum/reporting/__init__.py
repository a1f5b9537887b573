"""Ways to look at a run, while it goes on and after: callbacks, and what reads the records that they keep."""

from autoaccum.reporting.columns import Run, load_run
from autoaccum.reporting.logs import LoggingReporter
from autoaccum.reporting.mlflow_run import MLflowReporter
from autoaccum.reporting.progress import ProgressBar
from autoaccum.reporting.tensorboard import TensorBoardReporter
from autoaccum.reporting.wandb_run import WandbReporter
from autoaccum.runs.records import RecordWriter, environment, read_records, write_json

__all__ = [
    "LoggingReporter",
    "MLflowReporter",
    "ProgressBar",
    "RecordWriter",
    "Run",
    "TensorBoardReporter",
    "WandbReporter",
    "environment",
    "load_run",
    "read_records",
    "write_json",
]
