"""The device of the tests that can run on one: the CPU, or the accelerator of ``pytest --device``."""

from __future__ import annotations

import os
from typing import Any

from torch.utils._pytree import tree_map

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
"""Passed by tests that are marked ``device``."""


def there(batch: Any) -> Any:
    """Return a batch, or a model, whose tensors lie on the device."""
    return tree_map(lambda leaf: leaf.to(DEVICE) if _moves(leaf) else leaf, batch, is_leaf=_moves)


def _moves(leaf: Any) -> bool:
    return hasattr(leaf, "to")
