"""Makes PyTorch compute as on other machines; to be imported before it."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

# Of 512-bit vectors some kernels take other memory, and other roundings, than of the 256 bits that nearly all x86 has.
if platform.machine() in ("x86_64", "AMD64"):
    os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")


@contextmanager
def nothing_measured() -> Iterator[None]:
    """Let no run measure its exactness, as with ``verify=False``."""
    from autoaccum.step.verification import Examiner

    original = Examiner.__init__

    def made(self: Examiner, *args: Any, **options: Any) -> None:
        original(self, *args, **{**options, "verify": False})

    with mock.patch.object(Examiner, "__init__", made):
        yield


@contextmanager
def nothing_joined() -> Iterator[None]:
    """Let runs weigh micro-batches, as with ``accumulate="weighted"``, where nothing else is asked for."""
    from autoaccum.step.step import Step

    original = Step.__init__

    def made(self: Step, *args: Any, **options: Any) -> None:
        chosen = options.get("accumulate", "auto")
        original(self, *args, **{**options, "accumulate": "weighted" if chosen == "auto" else chosen})

    never = mock.patch("autoaccum.training.check.why_not_joined", return_value=("", ""))
    with mock.patch.object(Step, "__init__", made), never:
        yield
