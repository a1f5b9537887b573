"""Makes PyTorch compute as on other machines; to be imported before it."""

import os
import platform

# Of 512-bit vectors some kernels take other memory, and other roundings, than of the 256 bits that nearly all x86 has.
if platform.machine() in ("x86_64", "AMD64"):
    os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
