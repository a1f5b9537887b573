#!/usr/bin/env bash
# torch 2.13.0: linear_cross_entropy(..., options=LinearCrossEntropyOptions()) never holds all logits. The number of tokens
# that it takes at once is its own choice: about tokens * hidden / words. Of 2,048 tokens, 64 hidden numbers and 32,000
# words that is 4 tokens, so that the loss takes 512 small products of matrices. With batch_chunk_size=128 it takes 16.
# On one thread of a CPU the first took 2.1 s, the second 0.5 s, and cross_entropy with all logits 0.97 s.
#
# Output seen:
#   of its own choice: 512 products, 4 rows at once
#   batch_chunk_size=128: 16 products, 128 rows at once
#
# It fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.13.0"
cat > "$folder/chunks.py" <<'PY'
import torch
from torch import nn
from torch.nn.functional import linear_cross_entropy
from torch.profiler import ProfilerActivity, profile

assert torch.__version__.startswith("2.13.0"), torch.__version__
hidden, words = (torch.randn(n, 64, requires_grad=True) for n in (2_048, 32_000))
targets = torch.randint(0, 32_000, (2_048,))
found = []
for name, size in (("of its own choice", None), ("batch_chunk_size=128", 128)):
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=size)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        linear_cross_entropy(hidden, words, targets, options=options).backward()
    products = [event.input_shapes for event in profiled.events() if event.name == "aten::mm"]
    rows = products[0][0][0]
    found.append((len(products), rows))
    print(f"{name}: {len(products)} products, {rows} rows at once")
assert found == [(512, 4), (16, 128)], found
PY
"$folder/venv/bin/python" -W ignore "$folder/chunks.py"
