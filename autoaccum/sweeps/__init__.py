"""Studies over learning rate and effective batch: their trials, who runs which, and what they come to."""

from autoaccum.errors import MissingExtraError

try:
    import optuna  # noqa: F401
except ModuleNotFoundError:
    raise MissingExtraError("optuna", "sweep", "A sweep") from None
