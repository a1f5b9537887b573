#!/usr/bin/env bash
# heavyball 3.2.1, torch 2.13.0: copy.deepcopy of an optimizer gives one that cannot step. torch.optim.Optimizer.__getstate__ hands
# on defaults, state and param_groups alone, and heavyball's optimizers keep more than that as attributes. The same copy of an
# optimizer of torch steps.
#
# Output seen:
#   torch.optim.SGD: the copy steps
#   heavyball.SGD: AttributeError: 'SGD' object has no attribute 'use_ema'
#   heavyball.AdamW: AttributeError: 'AdamW' object has no attribute 'use_ema'
#
# It fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.13.0" "heavyball==3.2.1"
cat > "$folder/copies.py" <<'PY'
import copy

import heavyball
import torch

heavyball.utils.compile_mode = None
found = []
for kind in (torch.optim.SGD, heavyball.SGD, heavyball.AdamW):
    model = torch.nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()
    model, optimizer = copy.deepcopy((model, optimizer))
    model(torch.ones(4, 3)).square().mean().backward()
    try:
        optimizer.step()
        found.append("the copy steps")
    except AttributeError as error:
        found.append(f"AttributeError: {error}")
    print(f"{kind.__module__.partition('.')[0]}{'.optim' if kind is torch.optim.SGD else ''}.{kind.__name__}: {found[-1]}")
assert found[0] == "the copy steps", found
assert all(line.endswith("has no attribute 'use_ema'") for line in found[1:]), found
PY
"$folder/venv/bin/python" -W ignore "$folder/copies.py"
