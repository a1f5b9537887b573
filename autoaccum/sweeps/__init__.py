"""Studies over learning rate and effective batch: their trials, who runs which, and what they come to."""
