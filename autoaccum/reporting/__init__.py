"""Ways to look at a run, while it goes on and after: callbacks, and what reads the records that they keep."""

from autoaccum.reporting.logs import LoggingReporter
from autoaccum.reporting.progress import ProgressBar
from autoaccum.reporting.records import RecordWriter, environment, read_records, write_json
from autoaccum.reporting.runs import Run, load_run
from autoaccum.reporting.tensorboard import TensorBoardReporter

__all__ = [
    "LoggingReporter",
    "ProgressBar",
    "RecordWriter",
    "Run",
    "TensorBoardReporter",
    "environment",
    "load_run",
    "read_records",
    "write_json",
]
