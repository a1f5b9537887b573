"""A device made of numbers, and the loop that training is, so that policy can be tested by the ten thousand windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autoaccum.planning.attempts import Piece, Reading
from autoaccum.planning.tuner import Tuner


class Device:
    """A memory and a speed."""

    def __init__(
        self,
        limit_bytes: int,
        *,
        peak: Callable[[int, int], float] = lambda size, length: 1000 + 7 * size * length,
        seconds: Callable[[int], float] | None = None,
        noise: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """Set up.

        Args:
            limit_bytes: a micro-batch whose peak is above it runs out of memory; may be changed at any time.
            peak: (samples, length that they are padded to) -> bytes.
            seconds: (samples) -> of one forward and backward.
            noise: by which a reading of time is multiplied.
        """
        self.limit_bytes = limit_bytes
        self.peak = peak
        self.seconds = seconds
        self.noise = noise


class Training:
    """Windows as ``Step`` runs them, without a gradient."""

    def __init__(
        self,
        device: Device,
        num_samples: int,
        *,
        headroom: float = 0.05,
        look_every: int = 1,
        searches: bool = True,
        ceiling: int | None = None,
        largest: int = 0,
        smallest: int = 1,
        floor: int = 1,
        few_sizes: bool = False,
    ) -> None:
        """Begin; the limit is looked at before every so many windows, or never at 0."""
        self.device = device
        self.num_samples = num_samples
        self.look_every = look_every
        self.tuner = Tuner(
            ceiling=ceiling or num_samples,
            limit_bytes=device.limit_bytes,
            headroom=headroom,
            search=searches,
            largest=largest,
            smallest=smallest,
            floor=floor,
            few_sizes=few_sizes,
        )
        self.ooms: list[int] = []
        """Windows that ran out of memory, once for each time."""
        self.shrank: list[int] = []
        """Windows before which a plan was given up for a smaller one, without running out of memory."""
        self.grew: list[int] = []
        """Windows before which growth began."""
        self.larger: list[int] = []
        """Windows after which growth had come to a larger plan."""
        self._growing_from: tuple[int, ...] | None = None
        self.windows = 0
        self.tried: list[tuple[int, int]] = []
        """(samples, length) of every micro-batch that went well, in order."""
        self.trials: list[int] = []
        self.is_settled = False

    @property
    def replans(self) -> list[int]:
        """Windows that brought a change of plan, as events tell of it."""
        return sorted({*self.ooms, *self.shrank, *self.larger})

    def run(self, windows: int = 1, strain: str | None = None) -> tuple[int, ...]:
        """Run so many full windows of samples that are alike."""
        sizes: tuple[int, ...] = ()
        for _ in range(windows):
            sizes = self.window(self.num_samples, strain=strain)
        return sizes

    def resize(self, num_samples: int) -> None:
        """A schedule asks for other windows from now on."""
        self.num_samples = num_samples
        self.tuner.resize(num_samples)

    def until_settled(self, most: int = 100) -> int:
        """How many windows it took."""
        for count in range(1, most + 1):
            self.run()
            if self.is_settled:
                return count
        raise AssertionError(f"not settled after {most} windows")

    def window(
        self, num_samples: int, lengths: Sequence[int] | None = None, strain: str | None = None
    ) -> tuple[int, ...]:
        """One window: the sizes that committed."""
        tuner = self.tuner
        if self.look_every and self.windows % self.look_every == 0:
            self._look(strain, num_samples, lengths)
        attempt = tuner.window(num_samples, lengths)
        smaller = math.inf
        while True:
            done: list[int] = []
            taken = 0.0
            failed: Piece | None = None
            for piece in attempt:
                assert piece.start == sum(done)
                assert piece.length == (1 if lengths is None else lengths[piece.start])
                peak = self.device.peak(piece.size, piece.length)
                if peak > self.device.limit_bytes:
                    failed = piece
                    break
                seconds = self.device.seconds and self.device.seconds(piece.size) * self.device.noise()
                taken += seconds or 0
                if piece.is_trial:
                    self.trials.append(piece.size)
                    attempt.fitted(Reading(piece, math.ceil(peak), seconds))
                self.tried.append((piece.size, piece.length))
                done.append(piece.size)
            if failed is None:
                break
            self.ooms.append(self.windows)
            assert attempt.replays < 60, "replayed without end"
            if lengths is None:
                assert failed.size < smaller, "what has failed in this window is tried again"
                smaller = failed.size
            attempt = attempt.ran_out(failed.size, failed.length, None, self.device.limit_bytes)
            assert sum(attempt.sizes) == num_samples
        assert sum(done) == num_samples
        assert min(done, default=num_samples) >= min(tuner.smallest, num_samples)
        is_timed = attempt.is_timed and self.device.seconds is not None
        attempt.committed(tuple(done), taken if is_timed else None)
        self.is_settled = tuner.settle(max(self.num_samples, num_samples), lengths) or (
            not tuner.searching and tuner._fastest.timing is None
        )
        if not tuner.searching and self._growing_from is not None:
            if tuner.plan(self.num_samples, lengths) != self._growing_from:
                self.larger.append(self.windows)
            self._growing_from = None
        self.windows += 1
        return tuple(done)

    def _look(self, strain: str | None, num_samples: int, lengths: Sequence[int] | None) -> None:
        tuner = self.tuner
        searching, old = tuner.searching, tuner.plan(num_samples, lengths)
        if tuner.look(self.device.limit_bytes, strain) is not None:
            self.shrank.append(self.windows)
        elif tuner.searching and not searching:
            self.grew.append(self.windows)
            self._growing_from = old
