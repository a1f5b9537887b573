"""What an estimate has come to, and how people read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoaccum._units import format_bytes
from autoaccum.reporting.shown import Facts, as_line, as_table

MOST = 3.7
"""How many times the bytes of tensors a process has been measured to take at most, in
``benchmarks/results/estimates_resident.md``: on a CPU, whose heap holds more in fragments than a device's allocator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateParts:
    """What the bytes of a peak are taken by; those of the activations once for each sample."""

    parameters: int
    """Bytes of parameters and buffers."""
    gradients: int
    """Bytes of the gradients that the micro-batches before have left."""
    optimizer: int
    """Bytes of the optimizer's state."""
    activations_per_sample: int
    """Bytes that one sample more adds to the peak."""
    working: int
    """Bytes of the rest: copies of buffers, what a backward or a step works on, whatever the number of samples."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Estimate:
    """What training is expected to take on a device, by a step that was run without values.

    ``peak_bytes`` counts tensors, as a device's allocator rounds them. A process takes more: kernels have workspaces,
    an allocator holds fragments that nobody can use. By how much is not known of a device on which nothing was run:
    ``range_bytes`` is from the tensors alone to the most that processes have been measured to take for as many.
    """

    fits: bool
    """Whether the smallest micro-batch fits, in bytes of tensors."""
    micro_batch: int
    """The largest micro-batch that fits, in samples; the smallest there is where none does."""
    accumulation_steps: int | None
    """Micro-batches of a step; None without an effective batch, and where none can be made of those that fit."""
    memory_saving: str
    """How memory is saved, as plans and reports say it: "off", or which blocks compute their forward twice."""
    peak_bytes: int
    """Most bytes that tensors take at once, with a micro-batch of that size."""
    device_memory_bytes: int
    """Bytes of the device."""
    parts: EstimateParts
    """What the peak consists of."""
    seconds: float
    """Wall time that the estimate took."""

    @property
    def range_bytes(self) -> tuple[int, int]:
        """Return the least and the most bytes that a process may take, nothing having been measured on the device."""
        return self.peak_bytes, int(MOST * self.peak_bytes)

    @property
    def is_sure(self) -> bool:
        """Return whether it fits at the far end of the range, too."""
        return self.range_bytes[1] <= self.device_memory_bytes

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def __repr__(self) -> str:
        return as_line("Estimate", self._facts())

    def _repr_html_(self) -> str:
        return as_table("Estimate", self._facts())

    def _facts(self) -> Facts:
        # What decides comes first; the parts are for the page.
        facts: Facts = {"fits": self.fits, "micro_batch": self.micro_batch}
        if self.accumulation_steps is not None:
            facts["accumulation_steps"] = self.accumulation_steps
        if self.memory_saving != "off":
            facts["memory_saving"] = self.memory_saving
        facts["peak"] = format_bytes(self.peak_bytes)
        return facts | {"device_memory": format_bytes(self.device_memory_bytes)}

    def _lines(self) -> Iterator[str]:
        # The first line answers the question, as that of a check does.
        device, samples = format_bytes(self.device_memory_bytes), "sample" if self.micro_batch == 1 else "samples"
        if self.fits:
            # By tensors alone it may be far from that: who reads no further is not to be told that it fits.
            verdict = "FITS" if self.is_sure else "MAY FIT, by tensors alone"
            yield f"{verdict}: micro-batches of {self.micro_batch} {samples} in {device}"
        else:
            yield (
                f"DOES NOT FIT: {self.micro_batch} {samples} would take {format_bytes(self.peak_bytes)}, "
                f"and there are {device}"
            )
        yield ""
        if self.accumulation_steps is not None:
            yield f"  accumulation steps    {self.accumulation_steps}"
        yield f"  memory saving         {self.memory_saving}"
        yield f"  peak of tensors       {format_bytes(self.peak_bytes)}"
        # Said wherever the figure is read: it is no measurement, and looks like one.
        least, most = map(format_bytes, self.range_bytes)
        yield f"  a process may take    {least} to {most}: nothing was measured on the device"
        yield ""
        parts = self.parts
        for name, num_bytes in (
            ("parameters, buffers", parts.parameters),
            ("gradients", parts.gradients),
            ("optimizer's state", parts.optimizer),
            ("activations a sample", parts.activations_per_sample),
            ("the rest", parts.working),
        ):
            yield f"  {name:<20}  {format_bytes(num_bytes):>10}"
        yield ""
        yield f"estimated in {self.seconds:.1f} s; autoaccum probe measures it on the device"
