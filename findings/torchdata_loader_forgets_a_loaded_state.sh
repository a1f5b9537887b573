#!/usr/bin/env bash
# torchdata 0.11.0, torch 2.13.0: a nodes.Loader whose state_dict() is called before its first iteration ignores the state that is
# loaded next. It begins with the first sample again, without a warning. Without that call it goes on where the state was taken.
#
# Output seen:
#   not asked before: [3, 4, 5]
#   asked before: [0, 1, 2, 3, 4, 5]
#
# It fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.13.0" "torchdata==0.11.0"
cat > "$folder/states.py" <<'PY'
from torchdata.nodes import IterableWrapper, Loader

first = Loader(IterableWrapper(range(6)))
iterator = iter(first)
for _ in range(3):
    next(iterator)
place = first.state_dict()
found = []
for asks in (False, True):
    loader = Loader(IterableWrapper(range(6)))
    if asks:
        loader.state_dict()
    loader.load_state_dict(place)
    found.append(list(loader))
    print(f"{'asked' if asks else 'not asked'} before: {found[-1]}")
assert found == [[3, 4, 5], [0, 1, 2, 3, 4, 5]], found
PY
"$folder/venv/bin/python" -W ignore "$folder/states.py"
