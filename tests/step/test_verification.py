"""Windows that are cut are examined before they are stepped on: measured when there is reason to, and else compared."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.errors import AutoaccumWarning, LossSideEffectError, NonFiniteLossError, NotExactError
from autoaccum.events import Event, Notice, Verified
from autoaccum.planning.attempts import Piece
from autoaccum.step.gradient import Gradient
from autoaccum.step.terms import CountItems
from autoaccum.step.transaction import Transaction
from autoaccum.step.verdict import measure
from autoaccum.step.verification import KEPT, NOT_FINITE, ONLY_PENALTIES, Examination, Examiner
from tests.devices import DEVICE
from tests.models import classes, mlp, noisy, same
from tests.step.measuring import DOUBLE, Log, job_of, pairs, plain, squared_mean, summed, window_of

pytestmark = [pytest.mark.measured, pytest.mark.device]
ON_HOST = pytest.mark.skipif(
    DEVICE != "cpu", reason="what is laid aside lies on the host, and leaves a device its memory"
)


class Examined:
    """An examiner beside a transaction, and the loop that a run is."""

    def __init__(
        self,
        loss_of: Any = plain,
        model: nn.Module | None = None,
        num_items: CountItems | None = None,
        *,
        verify: bool = True,
        strict: bool = False,
    ) -> None:
        self.job = job_of(loss_of, model, num_items)
        self.transaction = Transaction(self.job)
        self.examiner = Examiner(self.job, self.transaction, measure, verify=verify, strict=strict)
        self.number = 0
        self.most = 6
        self.way: object = None
        self.announced: list[Notice] = []
        self.dtype = next(self.job.model.parameters()).dtype  # type: ignore[union-attr]

    def attempt(self, *sizes: int, batch: Any = None) -> Gradient:
        """Run the next window, up to the end of its backward."""
        total = sum(sizes)
        self.window = window_of(total, classes(total, self.dtype) if batch is None else batch)
        self.transaction.begin(self.window)
        if self.number + 1 >= self.transaction.signs.next_look:
            self.examiner.begin_attempt(self.number + 1, self.announced.append, self.way)
        start = 0
        for size in sizes:
            self.transaction.add(Piece(start, size))
            start += size
        gradient = self.transaction.finish()
        assert isinstance(gradient, Gradient)
        return gradient

    def examine(self, *sizes: int, batch: Any = None) -> Examination | None:
        """Run the next window and examine it, if it is to be; None where it is not."""
        gradient = self.attempt(*sizes, batch=batch)
        self.examiner.check_first(gradient)
        self.number += 1
        if len(sizes) == 1 or not self.transaction.signs.want_a_look(self.number):
            return None
        return self.examiner.examine(self.window, gradient, self.number, self.most)

    def events(self, *sizes: int, batch: Any = None) -> list[Event]:
        found = self.examine(*sizes, batch=batch)
        return [] if found is None else list(found.events)

    def causes(self, *sizes: int) -> list[str]:
        return [event.cause for event in self.events(*sizes) if isinstance(event, Notice)]

    def kinds(self, *sizes: int, batch: Any = None) -> list[str]:
        """Of events that come of a window: the hypothesis that was verified, "failed", or "said"."""
        found = []
        for event in self.events(*sizes, batch=batch):
            if isinstance(event, Verified):
                found.append(event.hypothesis if event.passed else "failed")
            else:
                found.append("said")
        return found


class TestMeasuring:
    def test_the_first_window_that_is_cut_is_measured(self) -> None:
        made = Examined()
        assert made.examine(8) is None, "a whole window has nothing to show"
        (event,) = made.events(3, 3, 2)
        assert isinstance(event, Verified)
        assert (event.step, event.hypothesis, event.samples, event.tolerance) == (2, "items", 6, 1e-6)
        assert event.cuts == ((1, 2, 3), (3, 2, 1), (2, 2, 2))
        assert event.passed
        assert made.transaction.hypothesis == "items"
        assert made.examiner.state_dict()["verified"]["counts_samples"] is True

    def test_the_next_one_is_not_unless_it_shows_another_thing(self) -> None:
        made = Examined()
        assert made.kinds(3, 3, 2) == ["items"]
        for _ in range(3):
            assert made.kinds(3, 3, 2) == []
        assert made.kinds(4, 4) == [], "of another size alone"

    def test_what_there_was_no_memory_for_is_measured_once_windows_are_run_another_way(self) -> None:
        made = Examined()
        made.most, made.way = 1, ("off", 3)
        assert [made.kinds(3, 3, 2) for _ in range(6)] == [[], [], [], ["said"], [], []]
        made.way = ("checkpoint", 3)
        assert [made.kinds(3, 3, 2) for _ in range(2)] == [["said"], []], "once more, and in vain"
        made.most = 6
        assert made.kinds(3, 3, 2) == []
        made.way = ("checkpoint", 2)
        assert [made.kinds(3, 3, 2) for _ in range(2)] == [["items"], []]

    @ON_HOST
    def test_where_what_is_laid_aside_had_to_go_the_next_windows_lay_nothing_aside(self) -> None:
        made = Examined()
        made.most, made.way = 1, ("off", 3)
        let_go = []
        for way in (made.way, made.way, made.way, ("off", 2), ("off", 2), ("off", 3)):
            made.way = way
            made.attempt(3, 3, 2)
            let_go.append(made.examiner.let_go())
            made.examine(3, 3, 2)
        assert let_go == [True, False, False, True, False, True]

    @ON_HOST
    def test_where_nothing_was_laid_aside_nothing_is_left_out(self) -> None:
        made = Examined()
        made.way = ("off", 3)
        for _ in range(3):
            made.examine(3, 3, 2)
        made.attempt(3, 3, 2)
        assert not made.examiner.let_go(), "the fourth window is not measured: memory runs out for another reason"
        for _ in range(6):
            made.examine(3, 3, 2)
        made.attempt(3, 3, 2)
        assert made.examiner.let_go(), "the tenth is"

    @pytest.mark.parametrize(("loss", "hypothesis"), [(plain, "items"), (summed, "sum")])
    def test_the_gradient_stays_as_it_is(self, loss: Any, hypothesis: str) -> None:
        made, plainly = Examined(loss), Examined(loss, verify=False)
        assert made.kinds(3, 3, 2) == [hypothesis]
        assert plainly.kinds(3, 3, 2) == []
        first, second = (
            [p.grad for p in one.job.model.parameters()]  # type: ignore[union-attr]
            for one in (made, plainly)
        )
        assert same(first, second)  # type: ignore[arg-type]

    def test_a_window_that_was_weighed_otherwise_is_run_again(self) -> None:
        current = {"loss": plain}
        made = Examined(lambda model, batch: current["loss"](model, batch))
        right = made.examine(5, 3)
        assert right is not None
        assert (right.again, made.transaction.hypothesis) == (False, "items")
        current["loss"] = summed
        found = made.examine(5, 3)
        assert found is not None
        assert (found.again, made.transaction.hypothesis) == (True, "sum")
        found = made.examine(5, 3)
        assert found is None or not found.again

    def test_a_wrong_count_of_the_users_is_said_and_not_replaced(self) -> None:
        verified, notice = Examined(num_items=lambda batch: 1).events(5, 3)
        assert isinstance(verified, Verified)
        assert (verified.passed, verified.hypothesis) == (False, "num_items")
        assert isinstance(notice, Notice)
        assert notice.cause.startswith("The loss is neither a mean over what num_items counts")
        assert Examined(num_items=lambda batch: 2 * len(batch[1])).kinds(5, 3) == ["num_items"]

    def test_losses_alone_are_compared_now_and_then(self) -> None:
        calls = Log()

        def loss(model: Any, batch: Any) -> torch.Tensor:
            calls.append(len(batch[0]))
            return plain(model, batch)

        made = Examined(loss)
        counts = []
        for _ in range(11):
            calls.clear()
            made.examine(3, 3, 2)
            counts.append(len(calls) - 3)
        # The first two in full: the whole, and three cuts of three. Then, as in others, some samples whole and in as
        # many cuts, and two micro-batches joined and apart, but for the second window.
        assert counts == [23, 20, 13, 0, 0, 0, 0, 0, 0, 13, 0]


class TestMeasuringAgain:
    def test_where_the_graph_is_another_one(self) -> None:
        """A term that begins later is exact, or said, before the first step on it."""
        terms = {"late": 0.0}

        def loss(model: Any, batch: Any) -> torch.Tensor:
            return plain(model, batch) + (terms["late"] * pairs(model, batch) if terms["late"] else 0)

        made = Examined(loss)
        assert made.kinds(3, 3, 2) == ["items"]
        assert made.kinds(3, 3, 2) == []
        terms["late"] = 1.0
        assert made.kinds(3, 3, 2) == ["failed", "said"]
        assert made.kinds(3, 3, 2) == [], "said once, and looked no further"

    def test_where_the_mode_of_a_module_is_another_one(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).to(DOUBLE)
        model[1].eval()
        made = Examined(model=model)
        assert made.kinds(3, 3, 2) == ["items"]
        model[1].train()
        assert made.kinds(3, 3, 2) == ["failed", "said"]

    def test_a_graph_that_changes_all_the_time_is_not_measured_all_the_time(self) -> None:
        calls = Log()

        def loss(model: Any, batch: Any) -> torch.Tensor:
            calls.append(None)
            found = plain(model, batch)
            for _ in range(len(calls) % 7):
                found = found * 1.0
            return found

        made = Examined(loss)
        measured = [made.kinds(3, 3, 2) != [] for _ in range(24)]
        assert sum(measured) <= 9
        assert sum(measured[:5]) > 2


class TestFailing:
    @pytest.mark.parametrize("loss", [squared_mean, pairs])
    def test_it_is_said_once_with_what_was_measured(self, loss: Any) -> None:
        made = Examined(loss)
        verified, notice = made.events(5, 3)
        assert isinstance(verified, Verified)
        assert not verified.passed
        assert isinstance(notice, Notice)
        assert "off the whole window's, measured on 6 samples" in notice.cause
        if loss is pairs:
            assert "or samples meet in the model" in notice.cause
        assert made.kinds(5, 3) == []

    @pytest.mark.parametrize("loss", [squared_mean, pairs])
    def test_in_a_strict_run_it_is_an_error(self, loss: Any) -> None:
        made = Examined(loss, strict=True)
        with pytest.raises(NotExactError, match="off the whole window's") as caught:
            made.examine(5, 3)
        assert caught.value.error is not None
        assert caught.value.error > 1e-3
        assert Examined(strict=True).kinds(5, 3) == ["items"]

    def test_what_could_not_be_measured_is_said_and_tried_again(self) -> None:
        left = [0, 1]

        def loss(model: Any, batch: Any) -> torch.Tensor:
            if left and len(batch[0]) in (1, 6):
                raise ValueError("mine")
            return plain(model, batch)

        made = Examined(loss)
        (cause,) = made.causes(4, 4)
        assert "could not be measured" in cause
        assert "ValueError: mine" in cause
        with pytest.raises(NotExactError):
            Examined(loss, strict=True).examine(4, 4)
        left.clear()
        assert made.kinds(4, 4) == ["items"]

    def test_of_a_gradient_of_zero_nothing_is_said_while_it_may_come(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 3), nn.ReLU()).to(DOUBLE)
        with torch.no_grad():
            model[0].bias.fill_(-100)
        made, never = Examined(model=model), Examined(model=copy.deepcopy(model))
        assert [made.kinds(4, 4) for _ in range(3)] == [[], [], []]
        with torch.no_grad():
            model[0].bias.fill_(0)
        assert made.kinds(4, 4) == ["items"]
        assert [never.kinds(4, 4) for _ in range(5)] == [[], [], [], ["said"], []]

    def test_hooks_after_the_backward_are_said_before_anything_is_run(self) -> None:
        model = mlp(DOUBLE)
        stepped = Log()
        model[0].weight.register_post_accumulate_grad_hook(stepped.append)
        made = Examined(model=model, strict=True)
        with pytest.raises(NotExactError, match="register_post_accumulate_grad_hook"):
            made.attempt(4, 4)
        assert stepped == []
        made = Examined(model=model)
        made.attempt(4, 4)
        assert len(made.announced) == 1

    def test_parameters_of_sixteen_bits_are_said_of_the_first_window_only(self) -> None:
        def loss(model: Any, batch: Any) -> torch.Tensor:
            return cross_entropy(model(batch[0].bfloat16()), batch[1])

        made = Examined(loss, mlp(torch.bfloat16))
        causes = made.causes(4, 4)
        assert causes[0] == "The model's parameters are bfloat16"
        assert not any("neither a mean" in cause for cause in causes)
        assert "The model's parameters are bfloat16" not in made.causes(4, 4)


class TestReading:
    """What is said where nothing is measured: what can be read."""

    def test_nothing_is_measured(self) -> None:
        made = Examined(verify=False)
        assert [made.kinds(3, 3, 2) for _ in range(3)] == [[], [], []]
        assert made.transaction.hypothesis is None

    def test_layers_that_couple_samples_and_what_cannot_be_told(self) -> None:
        found = Examined(model=noisy().to(DOUBLE), verify=False).causes(4, 4)
        assert found == ["The model holds 1 BatchNorm layer in training mode"]
        (cause,) = Examined(lambda model, batch: plain(model, batch).sqrt(), verify=False).causes(5, 3)
        assert cause.endswith("its graph leads to Sqrt, which says nothing of it")

    def test_an_attempt_that_was_rolled_back_is_forgotten(self) -> None:
        current = {"loss": lambda model, batch: plain(model, batch).sqrt()}
        made = Examined(lambda model, batch: current["loss"](model, batch))
        made.attempt(4, 4)
        made.transaction.roll_back()
        current["loss"] = pairs
        (cause,) = made.causes(5, 3)
        assert "Sqrt" not in cause
        current["loss"] = lambda model, batch: plain(model, batch).sqrt()
        (cause,) = Examined(current["loss"]).causes(5, 3)
        assert "Sqrt" in cause


def losses(*factors: float) -> Any:
    """The plain loss times one factor after the other."""
    left = Log(factors)
    return lambda model, batch: plain(model, batch) * left.pop(0)


def comparing(model: Any, batch: Any) -> torch.Tensor:
    """A loss of pairs of one class, of which a sample by itself has none."""
    outputs = model(batch[0])
    is_pair = (batch[1][:, None] == batch[1]) & ~torch.eye(len(outputs), dtype=torch.bool, device=outputs.device)
    return (torch.cdist(outputs, outputs).square() * is_pair).sum() / is_pair.sum().clamp(min=1)


class TestNothingCounts:
    @staticmethod
    def causes(step: Any, targets: torch.Tensor, **options: Any) -> list[str]:
        model = mlp(DOUBLE).to(DEVICE)
        data = classes(24, DOUBLE)[0], targets
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AutoaccumWarning)
            result = autoaccum.fit(
                model, data, effective_batch=12, device=DEVICE, training_step=step, progress=False, cache=False,
                shuffle=False, **options,
            )  # fmt: skip
        return [event.cause[:30] for event in result.events if isinstance(event, Notice)]

    @pytest.mark.weighted
    def test_where_samples_together_have_a_loss_it_is_said(self) -> None:
        targets = classes(24)[1]
        found = self.causes(comparing, targets, micro_batch=1)
        assert found == ["The loss is neither a mean ove"]
        with pytest.raises(NotExactError, match="off the whole window's"):
            self.causes(comparing, targets, micro_batch=1, strict=True)

    def test_where_they_have_none_either_it_is_not(self) -> None:
        def counting(model: Any, batch: Any) -> torch.Tensor:
            return cross_entropy(model(batch[0]), batch[1])

        targets = classes(24)[1]
        targets[:12] = -100
        assert self.causes(counting, targets, micro_batch=3, strict=True) == ["Nothing in window 1 counts: ev"]


class TestFirstLoss:
    @pytest.mark.parametrize(("is_kept", "spoilt"), [(False, [50, 60, 70, 80]), (True, [50])])
    def test_of_inputs_that_are_no_numbers_the_loss_is_not_blamed(self, is_kept: bool, spoilt: list[int]) -> None:
        torch.manual_seed(1)
        inputs, targets = torch.randn(600, 12), torch.randint(0, 5, (600,))
        inputs[spoilt] = math.nan

        def kept_from_0(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            losses = cross_entropy(outputs, targets, reduction="none") * (targets > 0)
            return losses.sum() / max(1, int((targets > 0).sum()))

        weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0]).to(DEVICE), label_smoothing=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("error", AutoaccumWarning)
            with pytest.raises(NonFiniteLossError):
                autoaccum.fit(
                    nn.Linear(12, 5), (inputs, targets), effective_batch=100, micro_batch=[(1, 2, 3, 30, 32, 32)] * 6,
                    loss_fn=kept_from_0 if is_kept else weighted, shuffle=False, device=DEVICE, progress=False,
                    cache=False,
                )  # fmt: skip

    def test_it_is_finite(self) -> None:
        made = Examined(losses(math.inf), verify=False)
        with pytest.raises(NonFiniteLossError, match="inf"):
            made.examine(8)
        made = Examined(losses(1.0, math.nan), verify=False)
        made.examine(8)
        made.examine(8)  # a later one is for others to say

    def test_of_a_window_that_counts_something(self) -> None:
        counts = [0, 8]
        made = Examined(losses(math.nan, math.nan), num_items=lambda batch: counts.pop(0), verify=False)
        made.examine(8)
        with pytest.raises(NonFiniteLossError):
            made.examine(8)

    def test_a_window_in_which_nothing_counts_says_nothing(self) -> None:
        def ignores_all(model: Any, batch: Any) -> torch.Tensor:
            return cross_entropy(model(batch[0]), torch.full_like(batch[1], -100))

        assert Examined(num_items=lambda batch: 0).kinds(5, 3) == []
        assert Examined(ignores_all, verify=False).kinds(5, 3) == []


def spoilt(model: Any, batch: Any) -> torch.Tensor:
    """A mean over samples, which is no number where none is of two classes of three."""
    return plain(model, batch) * (1.0 if (batch[1] > 0).any() else math.nan)


def of_twos(model: Any, batch: Any) -> torch.Tensor:
    """A mean over as many items as a label says, of which only those of a label of 2 are not 0."""
    return (model(batch[0]).square().sum(1) * (batch[1] == 2)).sum() / batch[1].sum()


class TestJoined:
    """A window that may be joined, because no weights of its micro-batches are certain."""

    @staticmethod
    def made(loss: Any, **options: Any) -> Examined:
        made = Examined(loss, **options)
        made.examiner.joins = True
        return made

    SOME = classes(8, DOUBLE)[0], torch.tensor([1, 2, 1, 2, 0, 0, 0, 0])
    """The second four of eight have nothing to count."""
    ALL = SOME[0], torch.tensor([1, 2, 1, 2, 1, 2, 1, 2])

    def put_off(self, made: Examined, batch: Any) -> str | None:
        """Return why a window is put off; None where it is not."""
        found = made.examine(4, 4, batch=batch)
        assert found is None or found.is_put_off is (made.examiner.uncertain is not None)
        return made.examiner.uncertain

    @pytest.mark.parametrize("verify", [True, False])
    def test_one_that_is_not_finite_is_put_off_once(self, verify: bool) -> None:
        made = self.made(spoilt, verify=verify)
        assert self.put_off(made, self.SOME) == NOT_FINITE
        assert made.examiner.is_trying
        assert not made.examiner.is_checked, "its loss is not known yet"
        assert made.examiner.say_withheld() == []
        assert (made.examiner.joins, made.examiner.is_trying, made.examiner.uncertain) == (True, False, None)
        with pytest.raises(NonFiniteLossError):
            made.examine(4, 4, batch=self.SOME)

    def test_one_that_is_not_finite_is_refused_where_nothing_is_joined(self) -> None:
        with pytest.raises(NonFiniteLossError):
            Examined(spoilt).examine(4, 4, batch=self.SOME)

    def test_after_another_reason_nothing_is_joined_any_more(self) -> None:
        made = self.made(pairs)
        made.examine(4, 4)
        assert [error is not None and error > 1e-3 for _, error in made.examiner.withheld] == [True]
        (notice,) = made.examiner.say_withheld()
        assert "off the whole window's" in notice.cause
        assert not made.examiner.joins

    def test_what_graphs_show_is_not_measured(self) -> None:
        made = self.made(lambda model, batch: summed(model, batch) + sum(p.sum() for p in model.parameters()))
        assert self.put_off(made, self.ALL) == ONLY_PENALTIES
        assert made.transaction.hypothesis is None

    def test_a_loss_of_0_beside_a_count_is_one_that_may_be_kept_from_0(self) -> None:
        made, twos = self.made(of_twos), torch.tensor([2, 2, 2, 2, 2, 2, 2, 2])
        assert made.kinds(4, 4, batch=(self.SOME[0], twos)) == ["items"]
        assert made.examiner.uncertain is None
        made.examine(4, 4, batch=(self.SOME[0], torch.tensor([2, 2, 2, 2, 1, 1, 1, 1])))
        assert made.examiner.uncertain == KEPT


class TestSideEffects:
    @staticmethod
    def steps_itself(model: Any, batch: Any) -> torch.Tensor:
        loss = plain(model, batch)
        loss.backward(retain_graph=True)
        return loss

    @pytest.mark.parametrize("sizes", [(8,), (4, 4)])
    def test_a_loss_that_changes_gradients_is_refused(self, sizes: Sequence[int]) -> None:
        with pytest.raises(LossSideEffectError):
            Examined(self.steps_itself).attempt(*sizes)


class TestState:
    def test_all_of_it_is_kept(self) -> None:
        made = Examined()
        made.examine(8)
        made.examine(3, 3, 2)
        again = Examined(losses(math.nan))
        again.examiner.load_state_dict(made.examiner.state_dict())
        assert again.examiner.state_dict() == made.examiner.state_dict()
        assert again.transaction.hypothesis == "items"
        again.number = 2
        again.examine(8)  # whose loss is not the first

    def test_one_that_measured_nothing_goes_on_to_measure(self) -> None:
        """A run that was not verified, and a checkpoint from before anything was."""
        state = Examined(verify=False).examiner.state_dict()
        for kept in (state, {name: value for name, value in state.items() if name != "verified"}):
            made = Examined()
            made.examiner.load_state_dict(kept)
            assert made.kinds(3, 3, 2) == ["items"]


class TestRuns:
    """The same through ``fit`` and ``Accumulator``."""

    @staticmethod
    def fit(model: nn.Module, loss: Any, **options: Any) -> autoaccum.FitResult:
        return autoaccum.fit(
            model, classes(12, DOUBLE), effective_batch=6, micro_batch=2, steps=2, lr=0.1, training_step=loss,
            device=DEVICE, progress=False, cache=False, **options,
        )  # fmt: skip

    @pytest.mark.weighted
    def test_a_strict_run_takes_no_step_on_what_is_not_exact(self) -> None:
        model, reference = mlp(DOUBLE), mlp(DOUBLE)
        with pytest.raises(NotExactError):
            self.fit(model, pairs, strict=True)
        assert same([*model.parameters()], [*reference.parameters()])
        accumulator = autoaccum.Accumulator(
            model, torch.optim.SGD(model.parameters(), 0.1), training_step=pairs, micro_batch=2, strict=True
        )
        with pytest.raises(NotExactError):
            accumulator.step(classes(6, DOUBLE))
        assert same([*model.parameters()], [*reference.parameters()])
        assert self.fit(model, plain, strict=True).num_steps == 2

    @pytest.mark.weighted
    @pytest.mark.filterwarnings("ignore::autoaccum.errors.AutoaccumWarning")
    @pytest.mark.parametrize("loss", [plain, pairs])
    def test_without_verify_nothing_is_measured(self, loss: Any) -> None:
        assert not any(isinstance(event, Verified) for event in self.fit(mlp(DOUBLE), loss, verify=False).events)
        assert any(isinstance(event, Verified) for event in self.fit(mlp(DOUBLE), loss).events)


def hardest(model: Any, batch: Any) -> torch.Tensor:
    """A mean over all where there are few, and over the seven that are hardest where there are more."""
    losses = cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses.topk(min(7, len(losses))).values.mean()


def test_what_begins_with_larger_batches_is_found_by_joining_two_of_them() -> None:
    made = Examined(hardest)
    made.most = 14
    found = made.events(7, 7)
    assert [type(event) for event in found] == [Verified, Notice], "six samples alone show nothing of it"
    assert "14 samples joined" in str(found[1])
    strict = Examined(hardest, strict=True)
    strict.most = 14
    with pytest.raises(NotExactError, match="14 samples joined"):
        strict.examine(7, 7)


def test_nothing_is_said_where_larger_batches_are_like_smaller_ones() -> None:
    made = Examined()
    assert made.kinds(3, 3) == ["items"]
    assert made.kinds(3, 3) == []
    before = made.examiner._largest_joined
    assert made.kinds(4, 4) == []
    assert (before, made.examiner._largest_joined) == (3, 3), "there is no room for eight"
