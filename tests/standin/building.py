"""Builds the stand-in device for the PyTorch of this environment, once: half a minute, and cached from then on."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE / "device.cpp"
SITE = HERE / "site"
"""What has to be on the path of a process for torch to load the device by itself."""


def missing() -> str | None:
    """Return why the device cannot be built here; None where it can."""
    if sys.platform != "linux":
        return "the stand-in device needs Linux"
    if _compiler() is None and not _built().exists():
        return "the stand-in device needs a C++ compiler (g++ or clang++), and there is none"
    return None


def _compiler() -> list[str] | None:
    """Return the command of the compiler, with what ``CXX`` gives it besides; None where there is none."""
    for command in (os.environ.get("CXX", ""), "g++", "clang++"):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    return None


def _built() -> Path:
    """Return where the device of this source and this PyTorch lies, once it is built."""
    import torch

    home = Path(torch.__file__).parent
    key = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {home}".encode()).hexdigest()[:16]
    return HERE / ".built" / f"{key}.so"


def library() -> Path:
    """Return the device as a shared library; build it where there is none of this source and this PyTorch yet.

    Raises:
        RuntimeError: it cannot be built; with what the compiler says.
    """
    import torch

    home, found = Path(torch.__file__).parent, _built()
    if found.exists():
        return found
    reason, compiler = missing(), _compiler()
    if reason is not None or compiler is None:
        raise RuntimeError(reason)
    place = found.parent
    place.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as made:
        path = Path(made) / "device.so"
        command = [*compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-w"]
        command += [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include", str(SOURCE), "-o", str(path)]
        command += [f"-L{home}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{home}/lib", "-lrt", "-lpthread"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the stand-in device does not compile:\n{done.stderr[-4000:]}")
        path.replace(found)  # at once, for several test processes may build it side by side
    return found
