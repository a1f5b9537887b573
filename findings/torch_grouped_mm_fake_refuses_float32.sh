#!/usr/bin/env bash
# torch 2.13.0 (CPU): torch.nn.functional.grouped_mm multiplies float32 matrices, and its fake tensor refuses them. So a model that
# computes eagerly raises as soon as it is traced: under FakeTensorMode, and by torch.compile with any backend. transformers calls this
# function for the experts of its mixture models, such as Mixtral. bfloat16 works in all three. On 2.14.1 it is the same, in other words:
# "Expected mat_a to be BFloat16 or supported Float16 matrix, got torch.float32."
#
# Output seen:
#   bfloat16: eager computes, fake computes, compiled computes
#   float32: eager computes, fake raises RuntimeError, compiled raises TorchRuntimeError
#
# It fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.13.0" numpy
cat > "$folder/grouped.py" <<'PY'
import logging

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

logging.disable(logging.CRITICAL)


def outcome(compute):
    try:
        compute()
    except Exception as error:
        return f"raises {type(error).__name__}"
    return "computes"


def grouped(first, second, ends):
    return torch.nn.functional.grouped_mm(first, second, offs=ends)


found = {}
for dtype in (torch.bfloat16, torch.float32):
    tensors = torch.randn(8, 16, dtype=dtype), torch.randn(2, 16, 16, dtype=dtype), torch.tensor([4, 8], dtype=torch.int32)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in tensors]
        fake = outcome(lambda: grouped(*fakes))
    eager = outcome(lambda: grouped(*tensors))
    compiled = outcome(lambda: torch.compile(grouped, backend="eager")(*tensors))
    name = str(dtype).removeprefix("torch.")
    found[name] = f"eager {eager}, fake {fake}, compiled {compiled}"
    print(f"{name}: {found[name]}")
assert found["bfloat16"] == "eager computes, fake computes, compiled computes", found
assert found["float32"] == "eager computes, fake raises RuntimeError, compiled raises TorchRuntimeError", found
PY
"$folder/venv/bin/python" -W ignore "$folder/grouped.py"
