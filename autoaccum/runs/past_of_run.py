"""One run's use of past trials: they are recalled before its first window, and its own are kept after the last."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoaccum.data.base import Window
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.planning.costs import Trial
from autoaccum.planning.patience import SURELY_MORE
from autoaccum.planning.tuner import Tuner
from autoaccum.runs.cost_key import describe, key
from autoaccum.runs.past import Past, tried

# By directory and key, what ran out of memory in this process, and with how many bytes of room for it. In a file it
# would outlive its reasons: what else was on the device then, and how memory was fragmented.
_refused: dict[tuple[Path, str], tuple[Trial, int]] = {}


class PastOfRun:
    """What one run takes from the files of ``Past``, and what it leaves there for later runs of the same cost."""

    def __init__(
        self, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, *, device: torch.device, **facts: Any
    ) -> None:
        """Prepare for a run of these; ``facts`` are the other arguments of ``cost_key.key`` but the batch."""
        self._past = Past()
        # The key is known once there is a first window; as long as it is None, nothing is recalled or kept.
        self._key: str | None = None
        self._key_of = partial(key, modules, optimizer, device=device, **facts)
        self._model, self._device = type(modules[0]).__name__, device
        self._optimizer = optimizer

    def recall(self, window: Window, tuner: Tuner, used_bytes: int) -> None:
        """Let a tuner begin from what was kept, if anything.

        The shapes are those of the first window, for data need not bear to be read beside the pass that trains.

        Args:
            window: the run's first.
            tuner: of the run, before its first trial.
            used_bytes: in use now, before the first sample.
        """
        try:
            example = window.micro_batch(0, min(tuner.smallest, window.num_samples))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return
        try:
            self._key = self._key_of(batch=example, differ_in_length=window.lengths is not None)
        except Exception:  # code of others is asked what it is, and no answer of it may end the run
            return
        # The gradients are not there yet, and every peak that was measured has them in it.
        gradient_bytes = sum(p.nbytes for group in self._optimizer.param_groups for p in group["params"])
        self._used_bytes = used_bytes
        refused, room_bytes = _refused.get((self._past.where, self._key), (None, 0))
        # What failed is tried again once there is clearly more room for it than there was.
        has_no_more_room = tuner.limits.limit_bytes - used_bytes < SURELY_MORE * room_bytes
        past = self._past.load(self._key, tuner.limits.limit_bytes)
        limit_bytes = max(self._past.limits(self._key).values(), default=None)
        tuner.recall(past, used_bytes + gradient_bytes, refused if has_no_more_room else None, limit_bytes)

    def keep(self, tuner: Tuner) -> None:
        """Keep for later runs what was measured; and for those of this process, what failed with so much memory."""
        if self._key is None:
            return
        measured = [trial for trial in tuner.learnt() if trial.peak_bytes is not None]
        if measured:  # else what is there stays, untouched
            # What was not tried in this run keeps the limit of the one that has.
            limits = dict.fromkeys(map(tried, measured), tuner.limits.limit_bytes)
            now = set(map(tried, tuner.history))
            limits |= {one: limit for one, limit in self._past.limits(self._key).items() if one not in now}
            self._past.save(
                self._key, [*tuner.past, *measured], model=self._model, device=describe(self._device), limits=limits
            )
        refused = tuner.refused()
        if refused is not None and refused != tuner.told:
            _refused[self._past.where, self._key] = refused, tuner.refused_at - self._used_bytes
        elif refused is None and tuner.told is not None:  # it has fitted after all
            _refused.pop((self._past.where, self._key), None)
