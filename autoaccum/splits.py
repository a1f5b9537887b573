"""What cuts batches of other forms than tensors with a row a sample: the public name of ``autoaccum.data.splits``."""

from __future__ import annotations

from autoaccum.data.splits import Split, flattened, graphs, packed, samples, tensors

__all__ = ["Split", "flattened", "graphs", "packed", "samples", "tensors"]
