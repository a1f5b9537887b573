"""Builds the stand-in device for the PyTorch of this environment, once: half a minute, and cached from then on."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SITE = HERE / "site"
"""What has to be on the path of a process for torch to load the device by itself."""


def missing() -> str | None:
    """Return why the device cannot be built here; None where it can."""
    if sys.platform != "linux":
        return "the stand-in device needs Linux"
    if _compiler() is None:
        return "the stand-in device needs a C++ compiler (g++ or clang++), and there is none"
    return None


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def library() -> Path:
    """Return the device as a shared library; build it where there is none of this source and this PyTorch yet.

    Raises:
        RuntimeError: it cannot be built; with what the compiler says.
    """
    import torch

    home = Path(torch.__file__).parent
    source = HERE / "device.cpp"
    key = hashlib.sha256(source.read_bytes() + f"{torch.__version__} {home}".encode()).hexdigest()[:16]
    place = HERE / ".built"
    found = place / f"{key}.so"
    if found.exists():
        return found
    reason = missing()
    if reason is not None:
        raise RuntimeError(reason)
    place.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as made:
        path = Path(made) / "device.so"
        command = [str(_compiler()), "-std=c++20", "-O1", "-fPIC", "-shared", "-w"]
        command += [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include", str(source), "-o", str(path)]
        command += [f"-L{home}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{home}/lib", "-lrt", "-lpthread"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the stand-in device does not compile:\n{done.stderr[-4000:]}")
        path.replace(found)  # at once, for several test processes may build it side by side
    return found
