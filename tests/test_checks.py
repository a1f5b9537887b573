"""Each check accepts what it says, and its error names the argument, the value and what is accepted."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import (
    ExponentialLR,
    LRScheduler,
    ReduceLROnPlateau,
    StepLR,
)
from torch.optim.swa_utils import SWALR

from autoaccum._checks import (
    cadence,
    flag,
    function,
    non_negative_int,
    number_between,
    of_callbacks,
    of_event_callbacks,
    of_lr_scheduler,
    of_run_directory,
    one_of,
    path,
    positive_int,
    positive_number,
    recorded_plans,
    takes_trainer,
)
from autoaccum.errors import ArgumentError, ArgumentTypeError

GIB = 2**30


@pytest.mark.parametrize("value", [1, 2, 2**63 - 1])
def test_positive_int(value: int) -> None:
    assert positive_int("steps", value) == value


@pytest.mark.parametrize("value", [0, -1])
def test_positive_int_refuses_what_is_below_one(value: int) -> None:
    with pytest.raises(ArgumentError) as caught:
        positive_int("steps", value, "Leave it out.")
    assert not isinstance(caught.value, TypeError)
    assert str(caught.value) == f"steps={value}: expected an int of at least 1. Leave it out."
    assert (caught.value.argument, caught.value.value) == ("steps", value)


@pytest.mark.parametrize("value", [True, 1.0, "1", None])
def test_ints_refuse_other_types(value: object) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        positive_int("steps", value, "Leave it out.")
    assert str(caught.value) == f"steps={value!r}: expected an int of at least 1. Leave it out."
    with pytest.raises(ArgumentTypeError) as caught:
        non_negative_int("seed", value)
    assert str(caught.value) == f"seed={value!r}: expected an int of at least 0."


def test_non_negative_int() -> None:
    assert [non_negative_int("seed", value) for value in (0, 7)] == [0, 7]
    with pytest.raises(ArgumentError, match=r"^seed=-1: expected an int of at least 0\.$"):
        non_negative_int("seed", -1)


class TestNumbers:
    def test_the_low_end_is_in_and_the_high_end_is_out(self) -> None:
        assert [number_between("headroom", value, 0, 1) for value in (0, 0.5, 0.999)] == [0.0, 0.5, 0.999]
        assert type(number_between("headroom", 0, 0, 1)) is float
        for value in (1, 1.5, -0.001):
            with pytest.raises(ArgumentError) as caught:
                number_between("headroom", value, 0, 1, "Lower it.")
            assert str(caught.value) == f"headroom={value}: expected a number of at least 0 and below 1. Lower it."

    def test_positive(self) -> None:
        assert [positive_number("clip_norm", value) for value in (1, 1e-300, 1e300)] == [1.0, 1e-300, 1e300]
        for value in (0, 0.0, -1):
            with pytest.raises(ArgumentError, match=r"expected a number above 0\.$"):
                positive_number("clip_norm", value)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_finite(self, value: float) -> None:
        for check in (lambda: positive_number("lr", value), lambda: number_between("lr", value, 0)):
            with pytest.raises(ArgumentError, match=f"lr={value}: expected a number") as caught:
                check()
            assert not isinstance(caught.value, TypeError)

    @pytest.mark.parametrize("value", [True, "0.1", None, 1j])
    def test_other_types(self, value: object) -> None:
        with pytest.raises(ArgumentTypeError, match=r"expected a number of at least 0\. Say how many\."):
            number_between("lr", value, 0, cure="Say how many.")


def test_one_of() -> None:
    assert one_of("precision", "bf16", ("fp32", "bf16")) == "bf16"
    with pytest.raises(ArgumentError, match=r"^precision='fp8': expected one of 'fp32', 'bf16'\.$"):
        one_of("precision", "fp8", ("fp32", "bf16"))
    with pytest.raises(ArgumentError, match="precision=None"):
        one_of("precision", None, ("fp32", "bf16"))


class TestCadence:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (1, ("steps", 1)),
            (500, ("steps", 500)),
            ("30s", ("seconds", 30)),
            ("10m", ("seconds", 600)),
            (" 1.5 h ", ("seconds", 5400)),
            ("0.5s", ("seconds", 0.5)),
            ("epoch", ("epoch", 1)),
        ],
    )
    def test_steps_times_and_epochs(self, value: Any, expected: tuple[str, float]) -> None:
        assert cadence("checkpoint_every", value) == expected

    @pytest.mark.parametrize(
        "value", [0, -1, "", "0s", "0.0m", "-1s", "10", "10d", "ten minutes", "1h30m", "epochs", "s"]
    )
    def test_refuses_values(self, value: Any) -> None:
        with pytest.raises(
            ArgumentError, match=r"checkpoint_every=.*: expected a number of steps, a time such as '30s'"
        ):
            cadence("checkpoint_every", value)

    @pytest.mark.parametrize("value", [True, 1.0, None, ["epoch"], float("nan")])
    def test_refuses_types(self, value: Any) -> None:
        with pytest.raises(ArgumentTypeError, match=r"checkpoint_every=.*or 'epoch'"):
            cadence("checkpoint_every", value)


class TestRunDirectory:
    @pytest.mark.parametrize(
        "given",
        [
            (None, None, "auto"),
            (None, None, False),
            ("runs/a", "10m", True),
            (Path("runs/a"), None, False),
        ],
    )
    def test_accepts(self, given: tuple[Any, ...]) -> None:
        of_run_directory(*given)

    @pytest.mark.parametrize(
        ("given", "match"),
        [
            ((3, None, "auto"), "run_dir=3: expected a path"),
            ((b"runs", None, "auto"), "run_dir=b'runs': expected a path"),
            (("", None, "auto"), "run_dir='': expected a path. Pass '.'"),
            ((None, 5, "auto"), "checkpoint_every=5: expected run_dir beside it. Pass where checkpoints are to go"),
            (("runs", None, "never"), "resume='never': expected 'auto', True or False"),
            (("runs", None, None), "resume=None: expected 'auto', True or False"),
            (("runs", None, 0), "resume=0: expected 'auto', True or False"),
            (("runs", None, 1), "resume=1: expected 'auto', True or False"),
            ((None, None, True), "resume=True: expected run_dir beside it. Pass the directory of the run to go on"),
        ],
    )
    def test_refuses(self, given: tuple[Any, ...], match: str) -> None:
        with pytest.raises(ArgumentError, match=match):
            of_run_directory(*given)


class TestRecordedPlans:
    def test_none_where_the_micro_batch_is_a_number_or_to_be_found(self) -> None:
        assert recorded_plans("auto") == recorded_plans(64) == []

    def test_one_for_each_window_as_tuples(self) -> None:
        assert recorded_plans([(8, 8), [5, 3], (1,)]) == [(8, 8), (5, 3), (1,)]
        assert recorded_plans(((2,),)) == [(2,)]

    @pytest.mark.parametrize("value", ["8", "Auto", 8.0, True, None, {8: 8}])
    def test_neither(self, value: Any) -> None:
        with pytest.raises(ArgumentTypeError, match=r"micro_batch=.*: expected an int of at least 1\. Leave it out"):
            recorded_plans(value)

    @pytest.mark.parametrize("value", [[8, 8], [(8,), ()], ["88"], [(8,), None]])
    def test_lists_of_something_else(self, value: Any) -> None:
        with pytest.raises(ArgumentTypeError, match="micro_batch=.*: expected 'auto', an int of at least 1, or a list"):
            recorded_plans(value)

    @pytest.mark.parametrize("size", [0, -1, 2.0])
    def test_sizes_that_are_none(self, size: Any) -> None:
        with pytest.raises(ArgumentError, match=f"micro_batch={size}: expected an int of at least 1"):
            recorded_plans([(8, 8), (8, size)])


def test_ints_of_more_than_63_bits_are_refused() -> None:
    for value in (2**63, 10**400):
        for check in (lambda value: positive_int("steps", value), lambda value: non_negative_int("seed", value)):
            with pytest.raises(ArgumentError, match=r"expected an int below 2\*\*63"):
                check(value)
        with pytest.raises(ArgumentError, match="checkpoint_every=.*a number of steps"):
            cadence("checkpoint_every", value)
    with pytest.raises(ArgumentError, match="expected a number below 1.79769e"):
        number_between("clip_norm", 10**400, 0)


@pytest.mark.parametrize("value", [torch.zeros(2), np.zeros(2), Mock(), b"fp32", ["fp32"]])
def test_a_choice_is_a_text(value: Any) -> None:
    """Arrays have an == of their own, which is no answer."""
    with pytest.raises(ArgumentError, match="expected one of 'fp32', 'bf16'"):
        one_of("precision", value, ("fp32", "bf16"))
    with pytest.raises(ArgumentError, match="checkpoint_every"):
        cadence("checkpoint_every", value)
    with pytest.raises(ArgumentError, match="resume"):
        of_run_directory("runs", None, value)


class TestFlags:
    @pytest.mark.parametrize("value", [True, False])
    def test_bools(self, value: Any) -> None:
        assert flag("shuffle", value) is bool(value)

    @pytest.mark.parametrize("value", ["False", "", 0, 1, 1.0, None, np.int64(1), [], torch.tensor(True)])
    def test_what_only_counts_as_one(self, value: Any) -> None:
        with pytest.raises(ArgumentTypeError) as caught:
            flag("shuffle", value)
        assert str(caught.value).endswith("expected True or False. Write shuffle=True or shuffle=False.")


class Callable2:
    def __call__(self, outputs: Any, targets: Any) -> None: ...


class Evasive:
    """Its signature cannot be read."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __call__(self, *args: Any) -> None: ...


class Three(torch.nn.Module):
    def forward(self, one: Any, two: Any, three: Any) -> None: ...


def two(outputs: Any, targets: Any, *, weight: float = 1.0) -> None: ...


class TestFunctions:
    @pytest.mark.parametrize(
        "value",
        [two, lambda *args: None, lambda a, b=1, c=2: None, Callable2(), functools.partial(Three().forward, 1), Mock(),
         max, torch.nn.functional.mse_loss, torch.nn.MSELoss(), torch.optim.lr_scheduler.ExponentialLR],
    )  # fmt: skip
    def test_what_takes_two_arguments(self, value: Callable[..., Any]) -> None:
        function("loss_fn", value, ("outputs", "targets"), "loss")

    def test_what_cannot_be_read_may_be_one(self) -> None:
        function("loss_fn", Evasive(), ("outputs", "targets"), "loss")

    @pytest.mark.parametrize(
        "value",
        [lambda: None, lambda a: None, lambda a, b, c: None, lambda *, outputs, targets: None, Three(),
         functools.partial(two, 1), torch.nn.ReLU()],
    )  # fmt: skip
    def test_what_does_not(self, value: Callable[..., Any]) -> None:
        with pytest.raises(ArgumentTypeError) as caught:
            function("loss_fn", value, ("outputs", "targets"), "loss", "Mend it.")
        assert "expected a function (outputs, targets) -> loss. It cannot be called with 2 of them: " in str(
            caught.value
        )
        assert str(caught.value).endswith(" Mend it.")

    @pytest.mark.parametrize("value", [3, "two", None, [two]])
    def test_what_is_none(self, value: Any) -> None:
        with pytest.raises(ArgumentTypeError, match=r"expected a function \(outputs, targets\) -> loss\.$"):
            function("loss_fn", value, ("outputs", "targets"), "loss")


class TestCallbacks:
    @pytest.mark.parametrize("value", [[print], (print,), iter([print]), [], {print: 1}, [[].append], [Mock()]])
    def test_functions_of_a_record(self, value: Any) -> None:
        assert all(map(callable, of_callbacks(value)))

    @pytest.mark.parametrize(
        "value", [print, None, 3, "print", [None], [Callable2], [lambda: None], [print, lambda a, b, c: None]]
    )
    def test_others(self, value: Any) -> None:
        with pytest.raises(ArgumentTypeError, match=r"^callbacks="):
            of_callbacks(value)

    @pytest.mark.parametrize(
        ("value", "is_so"),
        [
            (two, True),
            (lambda record, trainer=None: None, True),
            (lambda record, other=None: None, False),
            (lambda *records: None, False),
            (lambda record, *, trainer=None: None, False),
            (print, False),
            ([].append, False),
            (Mock(), False),
        ],
    )
    def test_of_a_record_and_the_trainer(self, value: Any, is_so: bool) -> None:
        assert takes_trainer(value) is is_so
        if callable(value):
            assert of_callbacks([value]) == [value]

    def test_an_accumulator_has_none_to_call_them_with(self) -> None:
        assert of_event_callbacks(iter([print])) == [print]
        with pytest.raises(ArgumentTypeError, match=r"a function \(event\) -> None"):
            of_event_callbacks([two])

    def test_a_class_is_to_be_made(self) -> None:
        with pytest.raises(ArgumentTypeError, match=r"It is the class: make one, Callable2\(\.\.\.\)"):
            of_callbacks([Callable2])

    def test_a_callback_of_another_trainer_is_told_of_ours(self) -> None:
        class EarlyStoppingCallback:
            def on_evaluate(self) -> None: ...

        with pytest.raises(ArgumentTypeError, match=r"Ready ones are in autoaccum\.callbacks"):
            of_callbacks([EarlyStoppingCallback()])

    def test_what_cannot_be_read(self) -> None:
        def fails() -> Any:
            yield print
            raise ZeroDivisionError("half-way")

        with pytest.raises(ArgumentTypeError, match="ZeroDivisionError") as caught:
            of_callbacks(fails())
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("value", ["a\0b", Path("a\0b"), "\ud800", "a" * 5000])
def test_paths_that_no_file_system_has(value: Any) -> None:
    with pytest.raises(ArgumentError, match="run_dir=.*: expected a path that a file system can have"):
        path("run_dir", value)


class TestFuzz:
    """Of ``benchmarks/fuzz_arguments.py``: 150 calls of every public function with what nobody would mean."""

    @pytest.fixture
    def fuzz(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        benchmarks = Path(__file__).parent.parent / "benchmarks"
        monkeypatch.syspath_prepend(benchmarks)
        monkeypatch.setenv("PYTHONPATH", str(benchmarks.parent))
        return importlib.import_module("fuzz_arguments")

    def test_each_call_works_or_is_refused_in_words_of_ours(self, fuzz: Any) -> None:
        """Before training, with nothing changed and nothing left."""
        found = list(fuzz.run(seed=6, indices=list(range(80)), deadline=300.0))
        assert [result["index"] for result in found] == list(range(80))
        assert [result for result in found if result["outcome"] not in fuzz.FINE] == []
        assert sum(result["outcome"] == "refused" for result in found) > 40
        assert sum(result["outcome"] == "works" for result in found) > 0

    def test_what_is_wrong_is_found(self, fuzz: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Errors of no type of ours, models that were changed, files that were left, and words without end."""
        monkeypatch.chdir(tmp_path)
        model = torch.nn.Linear(1, 1)

        def raw() -> None:
            [][1]

        def refuse(text: str = "") -> None:
            raise ArgumentError("a", 1, "b", text)

        def change() -> None:
            with torch.no_grad():
                model.weight += 1
            refuse()

        def leave() -> None:
            (tmp_path / "left").write_text("")
            refuse()

        def outcome(function: Callable[[], None]) -> str:
            call = fuzz.Call(function, {}, [], model)
            return str(fuzz._outcome(call, {}, set())["outcome"])

        assert outcome(lambda: None) == "works"
        assert outcome(refuse) == "refused"
        assert outcome(lambda: refuse("x" * 10**4)) == "a text too long"
        assert outcome(raw) == "raw"
        assert outcome(change) == "the model was changed"
        assert outcome(leave) == "files were left"
        assert outcome(fuzz._raise) == "the user's own error"


class TestSchedulers:
    """What is called with the number of steps has to take that second."""

    @pytest.mark.parametrize(
        ("scheduler", "told"),
        [
            (ExponentialLR, r"Write lambda optimizer, num_steps: ExponentialLR\(optimizer, gamma=...\)\.$"),
            (StepLR, r"StepLR\(optimizer, step_size=...\)"),
            (SWALR, r"SWALR\(optimizer, swa_lr=...\)"),
            (functools.partial(StepLR, gamma=0.5), r"StepLR\(optimizer, step_size=...\)"),
            (ReduceLROnPlateau, r"autoaccum.callbacks.ReduceOnPlateau\(\)"),
        ],
    )
    def test_those_that_take_something_else(self, scheduler: Any, told: str) -> None:
        with pytest.raises(ArgumentTypeError, match=told):
            of_lr_scheduler(scheduler)

    def test_every_class_of_pytorch_is_told_by_its_own_parameters(self) -> None:
        """One that a later version adds is looked at here."""
        classes = {
            name
            for name, kind in vars(torch.optim.lr_scheduler).items()
            if isinstance(kind, type) and issubclass(kind, LRScheduler) and not name.startswith("_")
        }
        taken = set()
        for name in classes:
            with suppress(ArgumentTypeError):
                of_lr_scheduler(getattr(torch.optim.lr_scheduler, name))
                taken.add(name)
        assert taken == {"CosineAnnealingLR", "PolynomialLR"}

    def test_a_name_of_the_users_own_may_be_one(self) -> None:
        of_lr_scheduler(lambda optimizer, how_long: None)
        of_lr_scheduler(lambda optimizer, num_warmup_steps, last_epoch=-1: None)
        of_lr_scheduler(lambda *arguments: None)
