"""What an estimate shows of itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autoaccum.training.estimate import MOST, Estimate, EstimateParts

GIB = 2**30
PARTS = EstimateParts(parameters=GIB, gradients=GIB, optimizer=2 * GIB, activations_per_sample=GIB // 2, working=GIB)


def report(**facts: Any) -> Estimate:
    given: dict[str, Any] = {
        "fits": True, "micro_batch": 8, "accumulation_steps": None, "memory_saving": "off", "peak_bytes": 9 * GIB,
        "device_memory_bytes": 10 * GIB, "parts": PARTS, "seconds": 1.25,
    }  # fmt: skip
    return Estimate(**{**given, **facts})


def test_in_a_line() -> None:
    assert repr(report()) == "Estimate(fits=True, micro_batch=8, peak=9.00 GiB, device_memory=10.00 GiB)"
    saving = report(memory_saving="checkpoint, model.h", accumulation_steps=4)
    assert "accumulation_steps=4, memory_saving=checkpoint, model.h" in repr(saving)
    assert saving._repr_html_().startswith("<table><caption>Estimate</caption>")


def test_in_a_page() -> None:
    lines = str(report(accumulation_steps=4)).splitlines()
    assert lines[0] == "MAY FIT, by tensors alone: micro-batches of 8 samples in 10.00 GiB"
    sure = str(report(device_memory_bytes=100 * 2**30)).splitlines()
    assert sure[0] == "FITS: micro-batches of 8 samples in 100.00 GiB"
    shown = "\n".join(lines)
    for words in (
        "accumulation steps    4",
        "memory saving         off",
        "gradients               1.00 GiB",
        "512.00 MiB",
    ):
        assert words in shown
    assert "DOES NOT FIT: 1 sample would take 9.00 GiB, and there are 8.00 GiB" in str(
        report(fits=False, micro_batch=1, device_memory_bytes=8 * GIB)
    )
    assert "accumulation steps" not in str(report())


def test_the_range_is_that_of_what_was_measured() -> None:
    found = report()
    assert found.range_bytes == (9 * GIB, int(MOST * 9 * GIB))
    assert MOST > 1
    assert not found.is_sure
    assert report(device_memory_bytes=found.range_bytes[1]).is_sure
    assert "22" not in str(found).splitlines()[0]


def test_is_a_value() -> None:
    assert report() == report()
    with pytest.raises(dataclasses.FrozenInstanceError):
        report().fits = False  # type: ignore[misc]
