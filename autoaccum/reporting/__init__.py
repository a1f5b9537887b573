"""Ways to look at a run while it goes on: each is a callback."""

from autoaccum.reporting.progress import ProgressBar

__all__ = ["ProgressBar"]
