"""The public name of splits leads to those of data, and is imported with its first use."""

from __future__ import annotations

import autoaccum
from autoaccum import splits
from autoaccum.data import splits as inner


def test_every_name_is_that_of_data() -> None:
    assert autoaccum.splits is splits
    assert set(splits.__all__) == {"Split", "flattened", "graphs", "packed", "samples", "tensors"}
    for name in splits.__all__:
        assert getattr(splits, name) is getattr(inner, name)
