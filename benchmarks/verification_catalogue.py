"""All cases of benchmarks/verification.py, in the order of its table."""

from __future__ import annotations

from importlib import import_module

LOSSES = ("plain", "masked", "terms", "coupled", "contrastive", "forms", "vision", "policies", "inside")
MODELS = ("norms", "state", "sequences", "layers", "random", "collated")


def load() -> None:
    """Import the files that hold them, each of which adds its own; their tensors are of PyTorch's default type."""
    for name in LOSSES:
        import_module(f"verification_losses_{name}")
    for name in MODELS:
        import_module(f"verification_models_{name}")
