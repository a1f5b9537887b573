#!/usr/bin/env bash
# torch 2.13.0: copy.deepcopy of a parameter, or of a module, forgets the grad_dtype of parameters. The original accumulates
# gradients in 32 bits, its copy in 16 bits, without a warning.
#
# Output seen:
#   original: grad_dtype torch.float32, gradient torch.float32
#   its copy: grad_dtype torch.bfloat16, gradient torch.bfloat16
#
# It fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.13.0"
cat > "$folder/copies.py" <<'PY'
import copy

import torch

assert torch.__version__.startswith("2.13.0"), torch.__version__
layer = torch.nn.Linear(4, 2).bfloat16()
for parameter in layer.parameters():
    parameter.grad_dtype = torch.float32
found = []
for name, module in (("original", layer), ("its copy", copy.deepcopy(layer))):
    module(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
    found.append((module.weight.grad_dtype, module.weight.grad.dtype))
    print(f"{name}: grad_dtype {found[-1][0]}, gradient {found[-1][1]}")
assert found == [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)], found
PY
"$folder/venv/bin/python" -W ignore "$folder/copies.py"
