"""Which learning rate for which effective batch? A sweep over both on scikit-learn's digits, in 2 MiB of memory.

    python examples/sweep_digits.py           # about a minute on one core of an AMD EPYC
    autoaccum report sweeps/digits            # the same with pictures; also while it runs

Called again, it goes on where it was stopped.

What one run found, of one seed, which was not reproduced: with AdamW and six epochs the best learning rates are
about 0.0012, 0.007 and 0.003 at effective batches of 16, 64 and 256, with losses of 0.046, 0.048 and 0.107. That is a
power of 0.3 +- 0.5: no reason to scale lr linearly, and too few trials to tell the square root from no scaling at all.
A batch of 64 forgives most: from 0.001 to 0.016 its loss stays below 0.07. At 256, where there are but 34 steps, it is
three times its least at either end. None of the effective batches fits; all 18 trials ended without an OOM, on
micro-batches that the first of them has found.
"""

from typing import Any

import digits
import torch
from optuna.pruners import NopPruner
from optuna.samplers import GridSampler

import autoaccum
from autoaccum.sweeps.page import write_study_report
from autoaccum.testing import simulated_memory

GRID = {"lr": [5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3], "effective_batch": [16, 64, 256]}
"""All of it is tried, to the end: Optuna's own choice would hardly look at 256, whose losses are higher."""
SAMPLES = 6 * 1437
"""Of each trial: six epochs."""
MEMORY = "2MiB"
"""Enough for some ten digits in a micro-batch."""


def recipe() -> dict[str, Any]:
    torch.manual_seed(0)  # the same weights for each trial: chance enters by the order of the data, and by dropout
    train, held_out = digits.load()
    return {
        "model": digits.make_model(),
        "data": train,
        "training_step": digits.training_step,
        "validation_data": held_out,
    }


def main() -> None:
    rates, batches = GRID.values()
    with simulated_memory(MEMORY):
        study = autoaccum.sweep(
            recipe,
            lr=(min(rates), max(rates)),
            effective_batch=batches,
            samples=SAMPLES,
            num_trials=len(rates) * len(batches),
            sampler=lambda seed: GridSampler(GRID),
            pruner=NopPruner(),
            study_name="digits",
        )
    for batch in batches:
        best = min((trial for trial in study.trials if trial.params["effective_batch"] == batch), key=lambda t: t.value)
        print(f"best lr at effective batch {batch:>3}: {best.params['lr']:.2g}, loss {best.value:.3f}")
    print(f"report: {write_study_report(study, 'sweeps/digits')}")


if __name__ == "__main__":
    main()
