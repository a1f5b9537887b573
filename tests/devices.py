"""The device of the tests that can run on one: the CPU, or the accelerator of ``pytest --device``."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

_found = torch.accelerator.current_accelerator(check_available=True)
DEVICE = "cpu" if _found is None or _found.type != "standin" else "standin:0"
"""Passed by tests that are marked ``device``. A real GPU has tests of its own, which are marked ``gpu``."""


def there(batch: Any) -> Any:
    """Return a batch, or a model, whose tensors lie on the device."""
    return tree_map(lambda leaf: leaf.to(DEVICE) if _moves(leaf) else leaf, batch, is_leaf=_moves)


def _moves(leaf: Any) -> bool:
    return hasattr(leaf, "to")
