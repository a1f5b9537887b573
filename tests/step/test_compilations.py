"""What PyTorch compiles while micro-batches run: counted, told, not taken for what a size takes, and spared."""

from __future__ import annotations

import itertools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.callback import CallbackTrigger
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.errors import ArgumentError, AutoaccumWarning
from autoaccum.events import Compiled, Event, Joined, Notice
from autoaccum.memory.devices import memory_of
from autoaccum.planning.attempts import Piece, Reading
from autoaccum.step.meter import Compilations, Meter, compiled_parts, keeps_graphs, mark

# What computed tensors are asked for as they are compiled; PyTorch means to keep this quiet.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Part(nn.Module):
    """A part of a model, of a class of its own: the compiler leaves PyTorch's alone that are compiled in place."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.tanh())


class Model(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Part(3, 8), Part(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def mlp(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return Model().to(dtype)


def classes(num_samples: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(num_samples, 3, generator=generator, dtype=dtype)
    return features, torch.randint(4, (num_samples,), generator=generator)


def count(batch: Any) -> int:
    return len(batch[1])


def trigger(kind: str) -> None:
    """Do what the compiler does around its work, and no work."""
    with torch._dynamo.callback_handler.install_callbacks(CallbackTrigger[kind], "0/0"):
        pass


class Ways:
    """The ways to compile, each of a model and its loss, all by a backend that is quick."""

    def wrapped(self) -> dict[str, Any]:
        return {"model": torch.compile(mlp(), backend="aot_eager"), "loss_fn": cross_entropy}

    def in_place(self) -> dict[str, Any]:
        model = mlp()
        model.compile(backend="aot_eager")
        return {"model": model, "loss_fn": cross_entropy}

    def submodule(self) -> dict[str, Any]:
        model = mlp()
        model.second = torch.compile(model.second, backend="aot_eager")
        return {"model": model, "loss_fn": cross_entropy}

    def submodule_in_place(self) -> dict[str, Any]:
        model = mlp()
        model.second.compile(backend="aot_eager")
        return {"model": model, "loss_fn": cross_entropy}

    def loss(self) -> dict[str, Any]:
        # Of a compiled loss nobody reads what it is a mean over.
        loss_fn = torch.compile(cross_entropy, backend="aot_eager")
        return {"model": mlp(), "loss_fn": loss_fn, "num_items": count}

    def whole_step(self) -> dict[str, Any]:
        @torch.compile(backend="aot_eager")  # type: ignore[untyped-decorator]
        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            return cross_entropy(model(batch[0]), batch[1])

        return {"model": mlp(), "training_step": step, "num_items": count}

    def hidden(self) -> dict[str, Any]:
        # In a place that nobody looks into.
        kept = iter([torch.compile(mlp(), backend="aot_eager")])
        model, holder = mlp(), type("Holder", (), {"__slots__": ("compiled",)})()
        holder.compiled = next(kept)
        return {"model": model, "training_step": lambda _, batch: cross_entropy(holder.compiled(batch[0]), batch[1])}


def fit(**arguments: Any) -> Any:
    return autoaccum.fit(**{"effective_batch": 128, "cache": False, "progress": False, "device": "cpu", **arguments})


def compiled(events: Any) -> list[Compiled]:
    return [event for event in events if isinstance(event, Compiled)]


class TestOneCompilation:
    """Of how many sizes a run is made, the compiler is asked once where the batch is what it is called with."""

    @pytest.mark.parametrize("way", ["wrapped", "in_place", "whole_step"])
    def test_does_for_all_sizes(self, way: str) -> None:
        result = fit(data=classes(3 * 128 + 57), epochs=2, **getattr(Ways(), way)())
        sizes = {size for report in result.history for size in report.micro_batches}
        assert len(sizes) > 2
        assert [(event.step, event.micro_batch, event.compilations) for event in compiled(result.events)] == [
            (1, 16, 1)
        ]

    @pytest.mark.parametrize("way", ["submodule", "submodule_in_place", "loss"])
    def test_of_parts_two_do(self, way: str) -> None:
        """What comes to them was computed, and only by a second size is it seen that its length varies."""
        result = fit(data=classes(3 * 128 + 57), epochs=2, **getattr(Ways(), way)())
        assert [(event.step, event.micro_batch, event.compilations) for event in compiled(result.events)] == [
            (1, 16, 1),
            (1, 64, 1),
        ]

    def test_single_samples_take_one_more(self) -> None:
        result = fit(data=classes(257), epochs=2, **Ways().wrapped())
        assert [(event.step, event.micro_batch) for event in compiled(result.events)] == [(1, 16), (3, 1)]

    def test_sizes_of_the_users_own_are_left_to_the_compiler(self) -> None:
        """One size is compiled as a constant, whose code is faster."""
        model = torch.compile(mlp(), backend=(backend := Recorder()))
        result = fit(model=model, loss_fn=cross_entropy, data=classes(256), micro_batch=32)
        assert len(compiled(result.events)) == 1
        assert backend.symbols == [0]
        torch.compiler.reset()
        model = torch.compile(mlp(), backend=(backend := Recorder()))
        fit(model=model, loss_fn=cross_entropy, data=classes(256))
        assert backend.symbols == [1]

    def test_the_gradient_is_that_of_the_big_batch(self) -> None:
        data = classes(128 + 57, torch.float64)

        def losses(model: Any, micro_batch: Any) -> tuple[list[float], list[torch.Tensor]]:
            arguments = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "micro_batch": micro_batch}
            result = fit(model=model, data=data, loss_fn=cross_entropy, epochs=2, shuffle=False, **arguments)
            return [report.loss for report in result.history], [p.detach().clone() for p in model.parameters()]

        of_whole, whole = losses(mlp(torch.float64), 128)
        of_cut, cut = losses(torch.compile(mlp(torch.float64), backend="aot_eager"), "auto")
        assert of_cut == pytest.approx(of_whole, abs=1e-12)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(whole, cut, strict=True))

    def test_a_replay_has_the_same_bits(self) -> None:
        def trained(fails_at: int | None, micro_batch: Any) -> tuple[Any, list[torch.Tensor]]:
            torch.compiler.reset()
            model, forwards = torch.compile(mlp(), backend="aot_eager"), itertools.count(1)

            def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
                if next(forwards) == fails_at:
                    raise torch.OutOfMemoryError
                return cross_entropy(outputs, targets)

            result = fit(model=model, data=classes(256), loss_fn=loss_fn, micro_batch=micro_batch, verify=False)
            assert compiled(result.events)
            return result.history, list(model.parameters())

        history, replayed = trained(6, 32)
        assert [report.replays for report in history] == [0, 1]
        _, planned = trained(None, [report.micro_batches for report in history])
        assert all(torch.equal(a, b) for a, b in zip(replayed, planned, strict=True))


class Recorder:
    """A backend that notes how many sizes of each graph are symbols, and compiles nothing."""

    def __init__(self) -> None:
        self.symbols: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.symbols.append(sum(isinstance(value, torch.SymInt) for value in inputs))
        return graph.forward


class TestHowItIsFound:
    def test_wherever_it_is(self) -> None:
        for way in ("wrapped", "in_place", "submodule", "submodule_in_place", "loss", "whole_step"):
            arguments = getattr(Ways(), way)()
            functions = [arguments.get("loss_fn"), arguments.get("training_step")]
            assert len(compiled_parts(arguments["model"], [arguments["model"]], functions)) >= 1, way
        assert compiled_parts(mlp(), [mlp()], [cross_entropy]) == []

    @pytest.mark.filterwarnings("ignore::autoaccum.AutoaccumWarning")
    def test_by_what_happens_where_nobody_looks(self) -> None:
        arguments = Ways().hidden()
        assert compiled_parts(arguments["model"], [arguments["model"]], [arguments["training_step"]]) == []
        result = fit(data=classes(256), verify=False, **arguments)
        first = result.history[0].micro_batches
        assert compiled(result.events)
        assert first[0] == 1, "nothing is known before the first micro-batch"
        assert first[1] == 16, "then few sizes are tried, and large ones"

    def test_an_accumulator_tells_it_too(self) -> None:
        model = torch.compile(mlp(), backend="aot_eager")
        accumulator = autoaccum.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=cross_entropy)
        for size in (128, 128, 57):
            accumulator.step(classes(size))
        assert [(event.step, event.micro_batch) for event in compiled(accumulator.events)] == [(1, 16)]

    def test_validations_are_none_of_it(self) -> None:
        result = fit(data=classes(256), validation_data=classes(40), epochs=2, **Ways().wrapped())
        assert [event.step for event in compiled(result.events)] == [1]


class Watched:
    """Windows of pieces in which the compiler does what it is told."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.expected = 0
        self.told: list[Event] = []
        self.watch = Compilations(device, self._expect)
        self.meter = Meter(memory_of(CPU), CPU, is_enforced=False, needs_room=lambda held, piece, window: False)

    def _expect(self) -> None:
        self.expected += 1

    def window(self, *pieces: tuple[int, str | None], is_trial: bool = False) -> list[Reading | None]:
        self.meter.begin_window(is_searching=False)
        readings = []
        for size, kind in pieces:
            piece = Piece(0, size, 1, is_trial)
            with self.meter.measuring(piece) if is_trial else nullcontext() as reading:
                if kind is not None:
                    trigger(kind)
            if (compiled := self.meter.compiled()) is not None:
                self.watch.note(piece, reading, compiled)
            readings.append(reading)
        if self.watch.of_window:
            self.watch.tell(1, self.told.append, self.told.append)
        return readings


class TestWatching:
    def test_a_reading_is_that_of_the_compiler(self) -> None:
        run = Watched()
        assert [reading.is_cold for reading in run.window((4, None), (8, "DYNAMO"), (8, None), is_trial=True)] == [
            False,
            True,
            False,
        ]
        assert run.expected == 1

    def test_backwards_are_no_compilations_of_their_own(self) -> None:
        run = Watched()
        run.window((4, "LAZY_BACKWARD"), (8, "DYNAMO"), (8, "DYNAMO"))
        assert [(event.micro_batch, event.compilations) for event in compiled(run.told)] == [(4, 0), (8, 2)]

    def test_what_is_heard_is_told_once(self) -> None:
        run = Watched()
        run.meter.begin_window(is_searching=False)
        trigger("DYNAMO")
        assert run.meter.compiled() == (1, 0.0, 0)
        assert run.meter.compiled() is None

    def test_what_comes_between_windows_is_none_of_them(self) -> None:
        run = Watched()
        run.window((4, None))
        trigger("DYNAMO")
        run.window((4, None))
        assert run.told == []

    def test_it_listens_again_after_a_reset(self) -> None:
        run = Watched()
        run.window((4, "DYNAMO"))
        torch.compiler.reset()
        run.window((4, "DYNAMO"))
        assert len(run.told) == 2

    def test_where_there_is_no_end_to_it_that_is_said(self) -> None:
        run = Watched()
        run.window((1, "DYNAMO"), (2, "DYNAMO"), (3, "DYNAMO"), (4, "DYNAMO"))
        assert not any(isinstance(event, Notice) for event in run.told)
        run.window((5, "DYNAMO"))
        (notice,) = [event for event in run.told if isinstance(event, Notice)]
        assert "compiled anew in 5 micro-batches, of 1, 2, 3, 4, 5 samples" in notice.cause
        assert f"after {torch._dynamo.config.recompile_limit} of one function" in notice.consequence

    def test_graphs_that_are_recorded_are_refused(self) -> None:
        run = Watched(CUDA)
        with pytest.raises(ArgumentError, match="without CUDA graphs"):
            run.window((4, "CUDAGRAPH_RECORDING"))

    def test_so_are_those_that_are_going_to_be(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A first run records nothing yet; but its gradients lie in the memory of the graphs already."""
        kept: list[Any] = [None]
        trees = types.SimpleNamespace(get_manager=lambda index, create_if_none_exists: kept[index])
        monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
        run = Watched(CUDA)
        run.window((4, "DYNAMO"))
        kept[0] = object()
        Watched(CUDA).window((4, "DYNAMO"))  # there before the run: somebody else's
        with pytest.raises(ArgumentError, match="without CUDA graphs"):
            run.window((4, "DYNAMO"))
        assert keeps_graphs(CUDA)
        assert not keeps_graphs(CPU)


def test_a_function_that_is_compiled_for_each_size_is_told_of_before_it_runs_uncompiled() -> None:
    """With dynamic=False PyTorch compiles for each size anew, and gives up after some."""
    model = torch.compile(mlp(), backend="eager", dynamic=False)
    accumulator = autoaccum.Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=cross_entropy, micro_batch=16
    )
    sizes = list(range(2, 14))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoaccumWarning)  # the same as the notice
        for size in sizes:
            accumulator.step(classes(size))
    limit = torch._dynamo.config.recompile_limit
    assert [event.micro_batch for event in compiled(accumulator.events)] == sizes[:limit]
    (notice,) = [event for event in accumulator.events if isinstance(event, Notice)]
    assert "compiled anew in 5 micro-batches, of 2, 3, 4, 5, 6 samples" in notice.cause


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_marks_are_on_the_samples() -> None:
    batch = {
        "rows": torch.zeros(6, 3),
        "time first": torch.zeros(4, 6),
        "both": torch.zeros(6, 6),
        "other": torch.zeros(5),
    }
    mark(batch, 6)
    found = {name: getattr(tensor, "_dynamo_weak_dynamic_indices", None) for name, tensor in batch.items()}
    assert found == {"rows": {0}, "time first": {1}, "both": {0}, "other": None}
    single = torch.zeros(1, 3)
    mark(single, 1)
    assert not hasattr(single, "_dynamo_weak_dynamic_indices")
    mark(torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)]), 2)  # which has no shape to be asked for


def stop_after(step: int) -> Callable[[Any], None]:
    def callback(record: Any) -> None:
        if isinstance(record, autoaccum.StepReport) and record.step == step:
            raise autoaccum.StopTraining

    return callback


@pytest.mark.measured
class TestItemsThatCompiledCodeHides:
    """A loss that was compiled, over as many items as a micro-batch happens to have: what it divides by is not seen."""

    def masked(self, num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        features, targets = classes(num_samples, torch.float64)
        targets[: num_samples // 2] %= 2  # half of these are 0, which is left out
        return features, targets

    @staticmethod
    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs, targets, ignore_index=0)

    def step(self, model: Any, batch: Any) -> torch.Tensor:
        return self.loss_fn(model(batch[0]), batch[1])

    def arguments(self, way: str) -> tuple[Any, dict[str, Any]]:
        model = mlp(torch.float64)
        if way == "the loss":
            return model, {"loss_fn": torch.compile(self.loss_fn, backend="aot_eager")}
        if way == "the step":
            return model, {"training_step": torch.compile(self.step, backend="aot_eager")}
        compiled = torch.compile(lambda batch: self.step(model, batch), backend="aot_eager")
        return model, {"training_step": lambda model, batch: compiled(batch)}  # a closure that nobody looks into

    def run(self, model: Any, data: Any, **arguments: Any) -> tuple[Any, list[torch.Tensor]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        result = fit(
            model=model, data=data, effective_batch=17, shuffle=False, optimizer=optimizer, epochs=2,
            validation_data=data, **arguments,
        )  # fmt: skip
        return result, [p.detach().clone() for p in model.parameters()]

    @pytest.mark.parametrize("way", ["the loss", "the step", "a function that nobody sees"])
    def test_it_is_joined_and_a_step_that_is_compiled_as_a_whole_runs_uncompiled(self, way: str) -> None:
        model, loss = self.arguments(way)
        data = self.masked(34)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            result, parameters = self.run(model, data, micro_batch=4, strict=True, **loss)
        expected, wanted = self.run(mlp(torch.float64), data, micro_batch=17, loss_fn=self.loss_fn)
        assert [r.loss for r in result.history] == pytest.approx([r.loss for r in expected.history], abs=1e-12)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(parameters, wanted, strict=True))
        assert [event.step for event in result.events if isinstance(event, Joined)] == [1]
        told = [str(each.message) for each in warned if issubclass(each.category, AutoaccumWarning)]
        assert [cause.startswith("The step is compiled as a whole") for cause in told] == [True] * (way != "the loss")

    def test_a_joined_run_that_is_resumed_goes_on_uncompiled(self, tmp_path: Path) -> None:
        model, loss = self.arguments("the step")
        data = self.masked(34)
        with pytest.warns(AutoaccumWarning, match="compiled as a whole"):
            self.run(
                model, data, micro_batch=4, run_dir=tmp_path, checkpoint_every=1, callbacks=[stop_after(1)], **loss
            )
        torch.compiler.reset()
        model, loss = self.arguments("the step")
        result, parameters = self.run(model, data, micro_batch=4, run_dir=tmp_path, **loss)
        assert {event.step for event in compiled(result.events)} == {1}
        _, wanted = self.run(mlp(torch.float64), data, micro_batch=17, loss_fn=self.loss_fn)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(parameters, wanted, strict=True))

    @pytest.mark.weighted
    def test_where_it_is_weighted_it_runs_uncompiled_and_that_is_said_once(self) -> None:
        model, loss = self.arguments("the loss")
        data = self.masked(34)
        with pytest.warns(AutoaccumWarning, match="does not show in compiled code") as warned:
            _, parameters = self.run(model, data, micro_batch=4, strict=True, **loss)
        assert len(warned) == 1
        _, wanted = self.run(mlp(torch.float64), data, micro_batch=17, loss_fn=self.loss_fn)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(parameters, wanted, strict=True))

    @pytest.mark.parametrize("given", ["num_items", "nothing, for it counts samples"])
    def test_where_no_item_is_to_be_read_it_runs_compiled(self, given: str) -> None:
        model, data = mlp(torch.float64), self.masked(34)
        arguments: dict[str, Any] = {"loss_fn": torch.compile(cross_entropy, backend="aot_eager")}
        if given == "num_items":
            counting = {"num_items": lambda batch: int((batch[1] != 0).sum())}
            arguments = {"loss_fn": torch.compile(self.loss_fn, backend="aot_eager"), **counting}
        result, parameters = self.run(model, data, micro_batch=4, strict=True, **arguments)
        assert len(compiled(result.events)) > 0
        reference = self.loss_fn if given == "num_items" else cross_entropy
        _, wanted = self.run(mlp(torch.float64), data, micro_batch=17, loss_fn=reference)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(parameters, wanted, strict=True))
