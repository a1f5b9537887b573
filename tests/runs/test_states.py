"""States in files: what goes in comes out, of the same types and to the bit, or is refused with its place."""

from __future__ import annotations

import copy
import enum
import math
import os
import pickle
import random
import subprocess
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel

from autoaccum.errors import CheckpointCorruptError, CheckpointStateError, CheckpointUnsafeError
from autoaccum.runs import states
from autoaccum.runs.files import write_durably
from autoaccum.runs.parted import Files

NONE = Files(Path(), ())


def through_files(tmp_path: Path, weights: Any, state: Any) -> tuple[Any, Any]:
    found = []
    for name, one in (("weights", states.of_weights(weights)), ("state", states.examined(state))):
        write_durably(tmp_path / name, one.save)
        found.append(states.read(tmp_path / name, NONE))
    return found[0], found[1]


def same(a: Any, b: Any) -> bool:
    """Of the same types and to the bit, NaN and the sign of zero too."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
            return False
        raw = [torch.empty(t.shape, dtype=t.dtype).copy_(t).reshape(-1).view(torch.uint8) for t in (a, b)]
        return torch.equal(*raw)
    if isinstance(a, (np.ndarray, np.generic)):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, dict):
        return same(list(a), list(b)) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a, math.copysign(1, a)) == (b, math.copysign(1, b))
    return bool(a == b)


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Pair(NamedTuple):
    left: Any
    right: Any


class Scaled(torch.Tensor):
    """A tensor that consists of two, as quantised ones do."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"kind": Colour.RED}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Scaled:
        assert context == {"kind": Colour.RED}
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(func)


DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
VALUES: dict[str, Any] = {
    "constants": [None, True, False, "", "ü\n\x00", "\ud800", b"", bytes(range(256))],
    "ints": [0, -1, 2**63 - 1, 2**63, -(2**64), 10**600],
    "floats": [0.1 + 0.2, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, 1e22],
    "complex": [complex(-0.0, math.nan), complex(1, math.inf)],
    "keys": {0: 1, "0": 2, None: 3, True: 4, -1.5: 5, (1, ("a",)): 6, b"b": 7, 2**70: 8, "tensor": 9},
    "a dict that looks like ours": {"tensor": "0"},
    "containers": ((), [], {}, [[]], ((1,), [2, (3,)]), {3, "a"}, frozenset({4}), torch.Size([2, 3])),
    "dicts": (OrderedDict(b=1, a=2), Counter("abracadabra"), defaultdict(list, a=[1]), defaultdict(dict)),
    "deques": [deque([1, (2,)], maxlen=3), deque()],
    "enums": [Colour.RED, Level.LOW],
    "named tuples": Pair([Colour.RED], Pair(1, None)),
    "types": [torch.bfloat16, torch.device("cuda", 3), torch.device("cpu")],
    "0-dim": [torch.tensor(value) for value in (3.5, 3, True, 1j)],
    "empty": [torch.empty(0), torch.empty(0, 3, dtype=torch.bfloat16), torch.empty(2, 0, dtype=torch.complex128)],
    "random states": {"torch": torch.get_rng_state(), "random": random.getstate()},
    "NumPy's states": (np.random.get_state(), np.random.get_state(legacy=False), np.random.PCG64(3).state),
    "arrays": [np.arange(6).reshape(2, 3).T, np.array([]), np.zeros((0, 3), "i2"), np.array(1.5), np.array([1 + 2j])],
    "scalars": [np.float64(0.1), np.int32(-3), np.bool_(True), np.float32("nan")],
    "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negated": [torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128).conj().imag, torch.tensor([1 + 2j]).conj().imag],
    "expanded": torch.arange(3.0).expand(4, 3),
    "cut out": torch.arange(24).reshape(4, 6)[1:3, ::2],
    "not a number": torch.tensor([math.nan, -math.nan, math.inf, -0.0]),
}


@pytest.mark.parametrize("name", VALUES)
def test_what_goes_in_comes_out(tmp_path: Path, name: str) -> None:
    _, state = through_files(tmp_path, {}, VALUES[name])
    assert same(state, VALUES[name])


def test_a_tensor_that_consists_of_others_is_one_again(tmp_path: Path) -> None:
    moment = Scaled(torch.tensor([1, 2], dtype=torch.int8), torch.tensor(0.5))
    other = Scaled(moment.codes, moment.scale)
    weights, state = through_files(tmp_path, {"0.weight": moment}, [moment, other, moment])
    assert [type(one) for one in (*weights.values(), *state)] == [Scaled] * 4
    assert state[0] is state[2]
    assert state[1] is not state[0]
    assert same([state[0].codes, state[0].scale], [moment.codes, moment.scale])
    assert state[0].codes is state[1].codes, "what two of them share is shared"


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_in_weights_and_states(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    is_bool = dtype == torch.bool
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(2 if is_bool else 256, (6, 4 * dtype.itemsize), dtype=torch.uint8, generator=generator)
    tensor = raw.view(dtype)
    state = {"plain": tensor, "turned": tensor.t()}
    loaded = through_files(tmp_path, state, state)
    assert same(dict(loaded[0]), state)
    assert same(loaded[1], state)


def test_a_tensor_keeps_the_order_of_its_dimensions_in_memory(tmp_path: Path) -> None:
    """Kernels may round otherwise where the strides of a moment and its gradient differ."""
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    wide = torch.randn(3, 5, dtype=torch.complex128).t()
    _, state = through_files(tmp_path, {}, [image, wide])
    assert same(state, [image, wide])
    assert [t.stride() for t in state] == [image.stride(), wide.stride()]


def test_a_tensor_that_is_there_twice_comes_back_as_one(tmp_path: Path) -> None:
    lr, other = torch.tensor(0.5), torch.tensor(0.5)
    _, (first, second, third) = through_files(tmp_path, {}, [lr, lr, other])
    assert first is second
    assert first is not third


def test_what_is_read_follows_neither_the_originals_nor_the_file(tmp_path: Path) -> None:
    tensor = torch.ones(4)
    write_durably(tmp_path / "state", states.examined({"w": tensor, "m": tensor.view(2, 2)}).save)
    tensor.fill_(7.0)
    state = states.read(tmp_path / "state", NONE)
    assert (state["w"].tolist(), state["m"].tolist()) == ([1.0] * 4, [[1.0, 1.0]] * 2)
    state["w"].fill_(2.0)
    assert state["m"].tolist() == [[2.0, 2.0]] * 2, "what shares its memory does so again"
    (tmp_path / "state").unlink()
    assert state["w"].tolist() == [2.0] * 4, "memory of its own"


def test_memory_that_is_seen_as_two_dtypes(tmp_path: Path) -> None:
    tensor = torch.tensor([1.5, -2.0])
    _, (first, second) = through_files(tmp_path, {}, [tensor, tensor.view(torch.int32)])
    assert same([first, second], [tensor, tensor.view(torch.int32)])


def test_what_users_attach_to_tensors_is_left_out(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.note = object()  # type: ignore[attr-defined]
    _, (found,) = through_files(tmp_path, {}, [parameter])
    assert (type(found), found.requires_grad, hasattr(found, "note")) == (torch.Tensor, False, False)


# Weights.


class Tied(nn.Module):
    """Tied, transposed, non-contiguous, odd dtypes, odd names, extra state, modules with versions."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.randn(6).view(2, 3).t())
        self.register_buffer("same_memory", self.table[:2])
        self.register_buffer("wide", torch.randn(2, dtype=torch.complex128))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("__metadata__", torch.randn(2))
        self.register_buffer("line\nbreak", torch.randn(2))
        self.extra: Any = {"seen": seed, "at": torch.randn(3)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_weights_of_a_model_with_everything(tmp_path: Path) -> None:
    model, other = Tied(1), Tied(2)
    weights, _ = through_files(tmp_path, model.state_dict(), None)
    assert weights["head.weight"] is weights["embedding.weight"]
    assert weights._metadata == model.state_dict()._metadata
    other.load_state_dict(weights)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert other.head.weight is other.embedding.weight


def test_anyone_can_read_the_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = nn.Parameter(model[2].weight.detach().bfloat16().t())
    through_files(tmp_path, model.state_dict(), None)
    read = torch.load(tmp_path / "weights", weights_only=True)
    assert same(dict(read), dict(model.state_dict()))
    nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).load_state_dict(read)


# What PyTorch's own objects hold.


def stepped(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], seed: int, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in parameters:
            grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
            parameter.grad = grad.to_sparse() if is_sparse else torch.empty_like(parameter).copy_(grad)
        optimizer.step(lambda: parameters[0].sum())


OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizers_go_on_as_if_nothing_had_happened(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    def made() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        torch.manual_seed(3)
        second = torch.randn(5, 4).to(dtype)
        parameters = [
            nn.Parameter(torch.randn(4, 3).to(dtype)),
            nn.Parameter(second if name == "LBFGS" else second.t()),
        ]
        options = {"amsgrad": True} if name in ("Adam", "AdamW") else {}
        return parameters, getattr(torch.optim, name)(parameters, lr=0.1, **options)

    parameters, optimizer = made()
    stepped(optimizer, parameters, seed=1)
    weights, state = through_files(tmp_path, dict(enumerate_names(parameters)), optimizer.state_dict())
    assert same(state, optimizer.state_dict())
    outcomes = []
    # load_state_dict itself may round what belongs to parameters in bfloat16: it is asked to in both cases.
    for source in (state, copy.deepcopy(optimizer.state_dict())):
        others, other = made()
        other.load_state_dict(source)
        with torch.no_grad():
            for parameter, value in zip(others, weights.values(), strict=True):
                parameter.copy_(value)
        stepped(other, others, seed=2)
        outcomes.append(([p.detach() for p in others], other.state_dict()))
    assert same(*outcomes)
    stepped(optimizer, parameters, seed=2)
    if dtype == torch.float32:
        assert same(outcomes[0], ([p.detach() for p in parameters], optimizer.state_dict()))


def enumerate_names(parameters: list[nn.Parameter]) -> list[tuple[str, torch.Tensor]]:
    return [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]


class Halving:
    """A schedule with a state of its own: LambdaLR keeps its attributes."""

    def __init__(self) -> None:
        self.calls = torch.tensor(0)

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.5**step


SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 0.5**step),
    "LambdaLR with an object": lambda o: schedulers.LambdaLR(o, Halving()),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": schedulers.ConstantLR,
    "LinearLR": schedulers.LinearLR,
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, np.float64(0.9)),
    "PolynomialLR": schedulers.PolynomialLR,
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="exp_range", gamma=0.9),
    "CyclicLR with a function": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3, scale_fn=lambda x: 0.5),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.2, total_steps=20),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=4),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o), schedulers.LambdaLR(o, lambda step: 0.8**step)], [3]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.9)], o
    ),
}


def test_no_scheduler_is_left_out() -> None:
    public = {name for name in schedulers.__all__ if name != "LRScheduler"}
    assert public <= set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on_as_if_nothing_had_happened(tmp_path: Path, name: str) -> None:
    def made() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[Any]:
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        return found

    optimizer, scheduler = made()
    assert len(set(rates(optimizer, scheduler, 5))) > 1, "a schedule that changes"
    before = copy.deepcopy({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()})
    _, state = through_files(tmp_path, {}, before)
    assert same(state, before)
    expected = rates(optimizer, scheduler, 6)
    optimizer, scheduler = made()
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    assert rates(optimizer, scheduler, 6) == expected


def test_scalers_and_averaged_models(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**80, growth_interval=7)
    scaler.scale(torch.ones(()))
    averaged = AveragedModel(nn.BatchNorm1d(3))
    state = {"scaler": scaler.state_dict(), "average": averaged.state_dict()}
    _, loaded = through_files(tmp_path, {}, state)
    assert same(loaded, state)
    assert loaded["average"]._metadata == averaged.state_dict()._metadata


# What is refused.


class Sub(torch.Tensor):
    pass


class Name(str):
    pass


class Outer:
    class Inner(enum.Enum):
        ONE = 1


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
PARAMETER = nn.Parameter(torch.zeros(2))

REFUSED: dict[str, tuple[Any, str, str]] = {
    "a function": ({"lr_scheduler": {"lr_lambdas": [len]}}, "lr_scheduler.lr_lambdas[0]", "builtin_function_or_method"),
    "a lambda": ({"f": (0, lambda: 1)}, "f[1]", "function"),
    "an enum that a function made": ({"a": {0: enum.Enum("Made", "ONE").ONE}}, "a[0]", "Made"),
    "a named tuple that a function made": ({"a b": {"c": namedtuple("Made", "x")(1)}}, "['a b'].c", "Made"),
    "a kind of str": ([Name("x")], "[0]", "Name"),
    "an object": (object(), "state", "builtins.object"),
    "a module": ({"m": nn.Linear(1, 1)}, "m", "Linear"),
    "a generator": ({"g": torch.Generator()}, "g", "torch._C.Generator"),
    "a defaultdict of a function": ({"d": defaultdict(lambda: 1)}, "d", "defaultdict"),
    "an optimizer's own state": ({"o": {PARAMETER: 1}}, "o", "key of type Parameter"),
    "sparse": ({"t": torch.eye(2).to_sparse()}, "t", "torch.sparse_coo"),
    "no data": ({"t": [torch.empty(2, device="meta")]}, "t[0]", "on meta"),
    "a kind of tensor": ({"t": torch.ones(2).as_subclass(Sub)}, "t", "Sub"),
    "an unbuilt parameter": ({"t": nn.UninitializedParameter()}, "t", "UninitializedParameter"),
    "an array of objects": ({"n": np.array([None])}, "n", "numpy.ndarray"),
    "an array of strings": ({"n": np.array(["a"])}, "n", "numpy.ndarray"),
    "a bytearray": ({"n": bytearray(2)}, "n", "bytearray"),
    "an endless number": ({"i": 1 << 2000}, "i", "builtins.int"),
    "an enum in a class": ({"a": Outer.Inner.ONE}, "a", "Inner"),
    "endless": (ENDLESS, "state", "without end"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_is_refused_by_its_place(case: str) -> None:
    state, key, kind = REFUSED[case]
    with pytest.raises(CheckpointStateError) as caught:
        states.examined(state)
    assert caught.value.key == key
    assert str(caught.value).startswith(f"{key} is ")
    assert kind in str(caught.value)
    assert any(cure in str(caught.value) for cure in ("Have its state_dict() return", "to_dense()"))


def test_weights_that_cannot_be_kept() -> None:
    with pytest.raises(CheckpointStateError) as caught:
        states.of_weights({"0.weight": torch.eye(2).to_sparse()})
    assert caught.value.key == "weights['0.weight']"
    with pytest.raises(CheckpointStateError) as caught:
        states.of_weights({"_extra_state": {"f": len}})
    assert caught.value.key == "weights._extra_state.f"


class Made:
    """Pickled, it is a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Later(enum.Enum):
    ONE = 1


@pytest.mark.parametrize(
    "made",
    [
        Made(os.system, "true"),
        Made(eval, "1"),
        Made(subprocess.Popen, ["true"]),
        Made(getattr, "a", "upper"),
        Made(nn.Linear, 1, 1),
        Made(Path, "a"),
        Made(NONE.chunks, "a"),
        [{"deep": deque([Made(os.getcwd)])}],
    ],
)
def test_files_that_name_what_is_no_class_of_values_are_refused(tmp_path: Path, made: Any) -> None:
    torch.save(made, tmp_path / "state")
    with pytest.raises(CheckpointUnsafeError, match="which is no class of values that is imported"):
        states.read(tmp_path / "state", NONE)


def test_a_class_that_is_not_imported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save([Later.ONE], tmp_path / "state")
    monkeypatch.delattr(f"{__name__}.Later")
    with pytest.raises(CheckpointUnsafeError, match=r"test_states\.Later, which"):
        states.read(tmp_path / "state", NONE)


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", pickle.dumps(Made(os.getcwd)), b"PK\x03\x04" + bytes(99)])
def test_files_that_make_no_sense(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match="makes no sense"):
        states.read(tmp_path / "state", NONE)


@pytest.mark.parametrize("made", [Made(torch.device, "a/b"), Made(Colour, 9), Made(Pair, 1), Made(np.dtype, "no")])
def test_values_that_make_no_sense(tmp_path: Path, made: Any) -> None:
    torch.save(made, tmp_path / "state")
    with pytest.raises(CheckpointCorruptError, match="makes no sense"):
        states.read(tmp_path / "state", NONE)
