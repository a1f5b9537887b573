"""A batch of any structure is counted, cut, joined and moved; what has no rows goes along unchanged."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from autoaccum.data import batches
from autoaccum.errors import DataError, RaggedBatchError

CPU = torch.device("cpu")


class Pair(NamedTuple):
    inputs: Any
    targets: Any


@dataclass
class Registered:
    inputs: Any
    scale: Any


pytree.register_dataclass(Registered)


@dataclass(frozen=True, slots=True)
class Told:
    """A batch that nobody has registered, and that takes nothing but tensors."""

    x: torch.Tensor
    names: list[str]
    scale: float = 0.5

    def __post_init__(self) -> None:
        assert isinstance(self.x, torch.Tensor)


class Encoding(UserDict[str, Any]):
    """A Mapping that torch's pytree does not know, made from a dict: so are the batches of Hugging Face tokenizers."""


class Settings(dict[str, Any]):
    """A dict of another type, which has to come back as that type."""


def matrix(first: int, last: int) -> torch.Tensor:
    """Row i is (i, -i)."""
    rows = torch.arange(first, last)
    return torch.stack([rows, -rows], dim=1)


def names(first: int, last: int) -> list[str]:
    return [f"name{index}" for index in range(first, last)]


FORMS: dict[str, Callable[[int, int], Any]] = {
    "tensor": matrix,
    "tuple": lambda a, b: (matrix(a, b), torch.arange(a, b)),
    "list": lambda a, b: [matrix(a, b), torch.arange(a, b)],
    "dict": lambda a, b: {"x": matrix(a, b), "y": torch.arange(a, b)},
    "ordered dict": lambda a, b: OrderedDict(y=torch.arange(a, b), x=matrix(a, b)),
    "defaultdict": lambda a, b: defaultdict(list, x=matrix(a, b)),
    "nested": lambda a, b: ({"x": [matrix(a, b), (torch.arange(a, b),)]}, {"y": {"z": torch.arange(a, b)}}),
    "list of tuples": lambda a, b: [(matrix(a, b), 3), (torch.arange(a, b), 4)],
    "list of dicts": lambda a, b: [{"x": matrix(a, b)}, {"y": torch.arange(a, b)}],
    "list of mappings": lambda a, b: [Encoding({"x": matrix(a, b)}), Encoding({"x": torch.arange(a, b)})],
    "list of arrays": lambda a, b: [np.arange(a, b), [torch.arange(a, b)]],
    "namedtuple": lambda a, b: Pair(matrix(a, b), torch.arange(a, b)),
    "dataclass": lambda a, b: Registered(matrix(a, b), 0.5),
    "mapping": lambda a, b: Encoding({"input_ids": matrix(a, b), "labels": torch.arange(a, b)}),
    "mapping within": lambda a, b: (Encoding({"x": matrix(a, b)}), torch.arange(a, b)),
    "dict of another type": lambda a, b: Settings(x=matrix(a, b)),
    "array": lambda a, b: (matrix(a, b).numpy(), np.arange(a, b)),
    "texts": lambda a, b: {"x": matrix(a, b), "names": names(a, b)},
    "texts alone": names,
    "numbers, None": lambda a, b: {"x": matrix(a, b), "scale": 2.5, "name": "train", "none": None, "flag": True},
    "0-dim": lambda a, b: {"x": matrix(a, b), "scale": torch.tensor(2.5), "array": np.float32(3), "zero": np.array(4)},
}
every_form = pytest.mark.parametrize("form", list(FORMS))


def plain(batch: Any) -> Any:
    """Return the same with the types of its containers named, comparable by ==."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return type(batch).__name__, str(batch.dtype), batch.tolist()
    if isinstance(batch, dict | UserDict):
        return type(batch).__name__, [(key, plain(value)) for key, value in batch.items()]
    if isinstance(batch, tuple | list):
        return type(batch).__name__, [plain(value) for value in batch]
    if isinstance(batch, Registered):
        return "Registered", plain(batch.inputs), plain(batch.scale)
    return type(batch).__name__, batch


@every_form
def test_num_samples(form: str) -> None:
    assert [batches.num_samples(FORMS[form](0, count)) for count in (1, 5)] == [1, 5]


@every_form
def test_take_cuts_all_rows_and_keeps_the_structure(form: str) -> None:
    make = FORMS[form]
    assert plain(batches.take(make(0, 7), 2, 5)) == plain(make(2, 5))
    assert plain(batches.take(make(0, 7), 5, 99)) == plain(make(5, 7))
    assert plain(batches.take(make(0, 7), 0, 7)) == plain(make(0, 7))


@every_form
def test_concat_joins_all_rows_and_keeps_the_structure(form: str) -> None:
    make = FORMS[form]
    assert plain(batches.concat([make(0, 3), make(3, 4), make(4, 9)])) == plain(make(0, 9))
    assert plain(batches.concat([make(0, 3)])) == plain(make(0, 3))


@given(st.sampled_from(list(FORMS)), st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_concat_undoes_take(form: str, sizes: list[int]) -> None:
    whole = FORMS[form](0, sum(sizes))
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    parts = [batches.take(whole, end - size, end) for end, size in zip(ends, sizes, strict=True)]
    assert [batches.num_samples(part) for part in parts] == sizes
    assert plain(batches.concat(parts)) == plain(whole)


@every_form
def test_to_device_changes_no_value(form: str) -> None:
    for copy in (False, True):
        batch = FORMS[form](0, 4)
        assert plain(batches.to_device(batch, CPU, copy=copy)) == plain(batch)


def test_take_views_tensors() -> None:
    whole = matrix(0, 7)
    batches.take({"x": whole}, 2, 4)["x"].zero_()
    assert whole[:, 0].tolist() == [0, 1, 0, 0, 4, 5, 6]


def edit(batch: Any) -> None:
    """Write into everything that can be written into."""
    for leaf in batches.flatten(batch)[0]:
        if isinstance(leaf, torch.Tensor):
            leaf.zero_()
        elif isinstance(leaf, np.ndarray):
            leaf[...] = 0
        elif isinstance(leaf, list):
            leaf.clear()


@pytest.mark.parametrize("form", ["nested", "mapping", "array", "texts", "0-dim"])
def test_a_copy_can_be_edited(form: str) -> None:
    original = FORMS[form](1, 5)
    edit(batches.to_device(original, CPU, copy=True))
    assert plain(original) == plain(FORMS[form](1, 5))


def test_nothing_is_copied_when_it_need_not_be() -> None:
    original = {"x": matrix(0, 4), "array": np.arange(4), "names": names(0, 4)}
    moved = batches.to_device(original, CPU, copy=False)
    assert all(moved[key] is original[key] for key in original)


def accelerator() -> torch.device:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return device


HOLD_NO_TENSOR = ("array", "texts alone")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=pytest.mark.device(elsewhere=True) if form in HOLD_NO_TENSOR else ()) for form in FORMS],
)
def test_to_an_accelerator_and_back(form: str) -> None:
    device = accelerator()
    for copy in (False, True):
        moved = batches.to_device(FORMS[form](0, 4), device, copy=copy)
        tensors = [leaf for leaf in batches.flatten(moved)[0] if isinstance(leaf, torch.Tensor)]
        assert all(tensor.device.type == device.type for tensor in tensors)
        assert plain(batches.to_device(moved, CPU, copy=False)) == plain(FORMS[form](0, 4))


@pytest.mark.gpu
def test_what_lies_in_pinned_memory_may_be_written_to_at_once() -> None:
    """Also while its copy is under way, which nobody waits for."""
    buffer = matrix(0, 4).pin_memory()
    moved = [batches.to_device(part, accelerator(), copy=True) for part in (buffer, buffer[1:3], buffer[:, :1])]
    buffer.zero_()
    assert [part.tolist() for part in moved] == [
        [[0, 0], [1, -1], [2, -2], [3, -3]],
        [[1, -1], [2, -2]],
        [[0], [1], [2], [3]],
    ]


@pytest.mark.gpu
def test_rows_that_share_their_memory_are_moved() -> None:
    """As those of ``position_ids.expand(samples, -1)``, which no pinned memory can hold as they are."""
    shared = torch.arange(3).expand(4, 3)
    assert batches.to_device(shared, accelerator(), copy=True).tolist() == [[0, 1, 2]] * 4


@pytest.mark.gpu
def test_what_nobody_writes_to_is_not_copied_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = matrix(0, 4).pin_memory()
    monkeypatch.setattr(torch, "empty_like", None)
    assert batches.to_device(buffer, accelerator(), copy=True, lasting=True).tolist() == buffer.tolist()


def test_num_bytes_counts_tensors_and_arrays() -> None:
    batch = {
        "x": torch.zeros(3, 5, dtype=torch.float64),  # 120
        "y": (np.zeros(3, dtype=np.int16), [torch.zeros(3, dtype=torch.bool)]),  # 6 + 3
        "scale": torch.tensor(1.0),  # 4
        "names": names(0, 3),
        "number": 7,
    }
    assert batches.num_bytes(batch) == 120 + 6 + 3 + 4
    assert batches.num_bytes(Encoding(batch)) == 133
    assert batches.num_bytes(names(0, 3)) == 0


class TestRefuses:
    @pytest.mark.parametrize(
        ("batch", "sizes"),
        [
            ((torch.zeros(5), torch.zeros(4)), {"[0]": 5, "[1]": 4}),
            ({"x": torch.zeros(5), "y": [torch.zeros(4)]}, {"['x']": 5, "['y'][0]": 4}),
            (Encoding(x=torch.zeros(5), y=torch.zeros(4)), {"['x']": 5, "['y']": 4}),
            (Registered(torch.zeros(5), np.zeros(4)), {".inputs": 5, ".scale": 4}),
            (Pair(torch.zeros(5), {"names": names(0, 4)}), {".inputs": 5, ".targets['names']": 4}),
        ],
    )
    def test_a_ragged_batch_by_the_paths_that_disagree(self, batch: Any, sizes: dict[str, int]) -> None:
        with pytest.raises(RaggedBatchError, match="disagree on dim 0") as caught:
            batches.num_samples(batch)
        assert caught.value.sizes == sizes
        assert ", ".join(f"{path}: {size}" for path, size in sizes.items()) in str(caught.value)

    @pytest.mark.parametrize(
        ("batch", "type_name"), [("text", "str"), ({"x": torch.tensor(1.0)}, "dict"), (None, "NoneType"), ((), "tuple")]
    )
    def test_a_batch_without_rows(self, batch: Any, type_name: str) -> None:
        with pytest.raises(DataError, match=f"a batch of type {type_name} holds no tensor"):
            batches.num_samples(batch)

    @pytest.mark.parametrize(
        "pair",
        [
            (torch.zeros(2, 3), torch.zeros(2, 4)),
            (np.zeros((2, 3)), np.zeros((2, 4))),
            ((torch.zeros(2), torch.zeros(2)), (torch.zeros(2),)),
            ({"x": torch.zeros(2)}, {"x": torch.zeros(2), "y": torch.zeros(2)}),
        ],
    )
    def test_batches_that_cannot_be_joined(self, pair: Any) -> None:
        with pytest.raises(DataError, match="cannot be joined into one window"):
            batches.concat(pair)


class Unnamed:
    """Registered with torch's pytree by a user who gave no function for paths."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows


pytree.register_pytree_node(Unnamed, lambda node: ([node.rows], None), lambda values, context: Unnamed(*values))


class TestUnusual:
    def test_keys_in_another_order_are_joined_by_key(self) -> None:
        joined = batches.concat([{"x": torch.zeros(2), "y": torch.ones(2)}, {"y": torch.ones(2), "x": torch.zeros(2)}])
        assert joined["x"].tolist() == [0.0] * 4

    @pytest.mark.parametrize(
        "pair",
        [
            ({"x": torch.zeros(2)}, {"y": torch.zeros(2)}),
            ((torch.zeros(2), [torch.zeros(2)]), (torch.zeros(2), torch.zeros(2))),
        ],
    )
    def test_batches_of_different_structure_are_refused(self, pair: Any) -> None:
        with pytest.raises(DataError, match="cannot be joined"):
            batches.concat(pair)

    def test_texts_as_default_collate_leaves_them_are_rows(self) -> None:
        batch = default_collate([(torch.tensor(index), f"name{index}") for index in range(4)])
        assert list(batch[1]) == names(0, 4)
        assert list(batches.take(batch, 1, 3)[1]) == names(1, 3)

    def test_a_list_of_lists_without_tensors_is_rows(self) -> None:
        batch = {"x": torch.zeros(3), "tokens": [[1, 2], [3], [4, 5, 6]]}
        assert batches.num_samples(batch) == 3
        assert batches.take(batch, 1, 3)["tokens"] == [[3], [4, 5, 6]]

    def test_a_registered_type_without_paths(self) -> None:
        assert batches.num_samples(Unnamed(torch.zeros(3))) == 3


class TestWhatHasNoRows:
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_meta_nested_and_endless(self) -> None:
        with pytest.raises(DataError, match="batch: the tensor .* of a batch is on the meta device"):
            batches.num_samples((torch.ones(3, device="meta"), torch.ones(3)), "batch")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])
        with pytest.raises(DataError, match="of a batch is nested, and has no rows"):
            batches.num_samples(nested)
        endless: list[Any] = []
        endless.append(endless)
        with pytest.raises(DataError, match="data: a batch is nested too deeply, or holds itself"):
            batches.num_samples(endless)

    def test_a_sparse_tensor_is_cut(self) -> None:
        rows = torch.eye(5).to_sparse()
        assert torch.equal(batches.take(rows, 1, 9).to_dense(), torch.eye(5)[1:9])


@pytest.mark.parametrize("entries", [["a", "b"], [1, 2], [None], []])
def test_a_list_without_tensors_is_one_leaf(entries: list[Any]) -> None:
    assert batches.flatten({"texts": entries})[0] == [entries]


def test_a_list_that_holds_tensors_somewhere_is_structure() -> None:
    assert len(batches.flatten([["a"], [torch.ones(1)]])[0]) == 2


def test_dataclasses_are_structure() -> None:
    whole = Told(matrix(0, 5), list("abcde"))
    assert batches.sizes_of(whole) == {".x": 5, ".names": 5}
    part = batches.take(whole, 1, 3)
    assert (type(part), part.names, part.scale) == (Told, ["b", "c"], 0.5)
    joined = batches.concat([batches.take(whole, 0, 1), batches.take(whole, 1, 5)])
    assert torch.equal(joined.x, whole.x)
    assert joined.names == whole.names
    moved = batches.to_device({"told": whole}, CPU, copy=True)["told"]
    assert torch.equal(moved.x, whole.x)
    assert moved.x.data_ptr() != whole.x.data_ptr()


class Named(torch.Tensor):
    """A tensor with a name for each row, and what belongs to all of them; no operation hands these on."""

    names: Any
    info: Any


class Bare(Named):
    """One whose slices are plain tensors, as those of torchvision's are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def named(cls: type[Any], rows: list[int]) -> Any:
    found = torch.tensor(rows, dtype=torch.float64)[:, None].expand(-1, 2).clone().as_subclass(cls)
    found.names = [str(row) for row in rows]
    found.info = {"offset": torch.tensor(rows), "size": (8, 8), "unit": "mm"}
    return found


def is_named(found: Any, rows: list[int]) -> bool:
    assert found.as_subclass(torch.Tensor)[:, 0].tolist() == rows == found.info["offset"].tolist()
    return bool(found.names == [str(row) for row in rows] and found.info["size"] == (8, 8))


@pytest.mark.parametrize("cls", [Named, Bare])
def test_attributes_of_a_tensor_subclass_go_with_its_rows(cls: type[Any]) -> None:
    whole = named(cls, [0, 1, 2, 3, 4])
    batch = {"image": whole, "label": torch.arange(5)}
    parts = [batches.take(batch, start, stop) for start, stop in ((1, 3), (4, 5))]
    assert is_named(parts[0]["image"], [1, 2])
    joined = batches.concat(parts)["image"]
    assert type(joined) is cls
    assert is_named(joined, [1, 2, 4])
    assert is_named(batches.pick(whole, torch.tensor([3, 0])), [3, 0])
    moved = batches.to_device(batch, torch.device("cpu"), copy=True)["image"]
    assert type(moved) is cls
    assert is_named(moved, [0, 1, 2, 3, 4])
    moved.info["offset"].zero_()
    moved.names.clear()
    assert is_named(whole, [0, 1, 2, 3, 4])


def test_parts_whose_attributes_differ_are_not_joined() -> None:
    first, second = named(Named, [0]), named(Named, [1, 2])
    second.info["unit"] = "cm"
    with pytest.raises(DataError, match="unit.*belongs to a whole batch"):
        batches.concat([first, second])


def test_a_parameter_is_a_tensor_without_attributes() -> None:
    found = batches.take(torch.nn.Parameter(torch.ones(3)), 0, 2)
    assert type(found) is torch.Tensor


def test_images_of_monai_keep_what_is_known_of_each() -> None:
    monai = pytest.importorskip("monai.data")
    rows = [
        monai.MetaTensor(
            torch.full((1, 2, 2), float(row)), affine=torch.eye(4) * (row + 1), meta={"name": f"{row}.nii"}
        )
        for row in range(5)
    ]
    whole = monai.list_data_collate([{"image": row} for row in rows])

    def holds(found: Any, rows: list[int]) -> bool:
        assert found.is_batch
        assert found.meta["name"] == [f"{row}.nii" for row in rows]
        assert found.affine[:, 0, 0].tolist() == [row + 1 for row in rows]
        return bool(found.as_tensor()[:, 0, 0, 0].tolist() == rows)

    parts = [batches.take(whole, start, stop)["image"] for start, stop in ((1, 3), (4, 5))]
    assert holds(parts[0], [1, 2])
    assert holds(batches.concat(parts), [1, 2, 4])
    assert holds(batches.pick(whole["image"], torch.tensor([3, 0])), [3, 0])
    assert holds(batches.to_device(whole, torch.device("cpu"), copy=True)["image"], [0, 1, 2, 3, 4])
