"""The three ways to say the loss, how each calls the model, and what each refuses."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from autoaccum.errors import (
    ConflictingArgumentsError,
    DataError,
    LossError,
    LossWithoutGradError,
    NonScalarLossError,
)
from autoaccum.step.loss_functions import call, loss_function
from autoaccum.step.terms import Computed, total


class Recorder(nn.Module):
    """Remembers how it was called; returns what it was told to."""

    def __init__(self, returns: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))
        self.returns = returns
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        return self.weight * 2 if self.returns is None else self.returns


class Pair(NamedTuple):
    inputs: Any
    targets: Any


class TestCall:
    @pytest.mark.parametrize(
        ("inputs", "args", "kwargs"),
        [
            ({"a": 1, "b": 2}, (), {"a": 1, "b": 2}),
            (UserDict(a=1), (), {"a": 1}),
            ((1, 2), (1, 2), {}),
            ([1, 2], (1, 2), {}),
            ((1, {"a": 2}), (1, {"a": 2}), {}),
            (Pair(1, 2), (1, 2), {}),
            ("text", ("text",), {}),
            (None, (None,), {}),
        ],
    )
    def test_conventions(self, inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        model = Recorder()
        call(model, inputs)
        assert (model.args, model.kwargs) == (args, kwargs)

    def test_a_tensor_is_one_argument(self) -> None:
        model, inputs = Recorder(), torch.zeros(2, 3)
        call(model, inputs)
        assert len(model.args) == 1
        assert model.args[0] is inputs


class TestForms:
    def test_loss_fn_gets_outputs_and_targets(self) -> None:
        model = Recorder()
        loss_of = loss_function(lambda outputs, targets: outputs * 10 + targets, None)
        for batch in ((5, 1.0), [5, 1.0], Pair(5, 1.0)):
            assert loss_of(model, batch).item() == 61.0
            assert model.args == (5,)
        loss_of(model, ({"ids": 5}, 1.0))
        assert model.kwargs == {"ids": 5}
        assert loss_function(lambda outputs, targets: outputs * targets["scale"], None)(
            model, (5, {"scale": 2.0})
        ).item() == pytest.approx(12.0)

    def test_training_step_gets_model_and_batch_as_they_are(self) -> None:
        model = Recorder()
        seen: list[Any] = []

        def step(*args: Any) -> torch.Tensor:
            seen.extend(args)
            return model.weight * 4

        batch = {"anything": object()}
        assert loss_function(None, step)(model, batch).item() == 12.0
        assert seen[0] is model
        assert seen[1] is batch

    def test_not_both(self) -> None:
        with pytest.raises(ConflictingArgumentsError, match="at most one of training_step and loss_fn"):
            loss_function(lambda outputs, targets: outputs, lambda model, batch: model(batch))

    def test_the_models_own_loss(self) -> None:
        loss = nn.Parameter(torch.tensor(7.0)) * 1
        for outputs in (
            loss,
            {"loss": loss, "logits": torch.zeros(3)},
            UserDict(loss=loss),
            SimpleNamespace(loss=loss, logits=torch.zeros(3)),
        ):
            model = Recorder(outputs)
            assert loss_function(None, None)(model, {"ids": 1, "labels": 2}) is loss
            assert model.kwargs == {"ids": 1, "labels": 2}


class TestRefuses:
    @pytest.mark.parametrize("accuracy", [torch.tensor(0.5), 0.5])
    def test_a_loss_and_an_accuracy_in_a_tuple(self, accuracy: Any) -> None:
        """What Python makes of ``return loss, accuracy``, where a list would be of losses that are added."""
        loss = torch.ones((), requires_grad=True) * 2
        for returned in ((loss, accuracy), (accuracy, loss)):
            with pytest.raises(
                NonScalarLossError,
                match=r"return loss, \{\"accuracy\": ...\}\. .* in a list, which may hold constants\.$",
            ):
                loss_function(None, lambda model, batch, returned=returned: returned)(Recorder(), (1, 2))
        found = loss_function(None, lambda model, batch: [loss, accuracy])(Recorder(), (1, 2))
        assert isinstance(found, Computed)
        assert found.loss.item() == 2.5
        for nothing in (0.0, torch.zeros(())):  # of a term that these samples do not have
            found = loss_function(None, lambda model, batch, nothing=nothing: (loss, nothing))(Recorder(), (1, 2))
            assert isinstance(found, Computed)
            assert found.loss.item() == 2
        both = loss_function(None, lambda model, batch: (loss, loss))(Recorder(), (1, 2))
        assert isinstance(both, Computed)
        assert both.loss.item() == 4

    @pytest.mark.parametrize(
        ("batch", "found"),
        [
            (torch.zeros(4, 2), r"a tensor of shape \(4, 2\)"),
            ((torch.zeros(2), torch.zeros(2), torch.zeros(2)), "a tuple of 3"),
            ([torch.zeros(2)], "a list of 1"),
            ({"x": torch.zeros(2)}, "a value of type dict"),
        ],
    )
    def test_batches_that_are_no_pairs(self, batch: Any, found: str) -> None:
        with pytest.raises(DataError, match=f"batches are .inputs, targets., but this one is {found}.*training_step="):
            loss_function(mse_loss, None)(Recorder(), batch)

    def test_a_batch_with_labels_may_be_that_of_a_model_that_computes_its_loss(self) -> None:
        with pytest.raises(DataError, match=r"any batch\. Leave loss_fn out where the model returns its loss"):
            loss_function(mse_loss, None)(Recorder(), {"input_ids": torch.zeros(2), "labels": torch.zeros(2)})

    def test_entries_that_the_model_does_not_take(self) -> None:
        """A loss_fn takes no dict apart, so that it is no way out of this."""
        model = nn.Linear(2, 1)
        batch = {"input": torch.zeros(4, 2), "index": torch.arange(4), "text": ["a"] * 4}
        told = r"neither loss_fn nor .*'index'\)\. Leave 'index' and 'text' out of the data, or pass training_step="
        with pytest.raises(DataError, match=told):
            loss_function(None, None)(model, batch)
        with pytest.raises(
            DataError, match=r"missing 1 required .*\)\. Pass training_step=\(model, batch\) -> loss\.$"
        ):
            loss_function(None, None)(nn.Bilinear(2, 2, 1), {"input1": torch.zeros(4, 2)})
        with pytest.raises(DataError, match=r"\. Pass loss_fn=\(outputs, targets\) -> loss, or a training_step\.$"):
            loss_function(None, None)(model, (torch.zeros(4, 2), torch.zeros(4), torch.zeros(4)))

        class Open(nn.Linear):
            def forward(self, input: torch.Tensor, **rest: Any) -> torch.Tensor:
                return super().forward(input)

        with pytest.raises(DataError, match=r"\)\. Pass training_step="):
            loss_function(None, None)(Open(2, 1), {"x": torch.zeros(4, 2)})

    @pytest.mark.parametrize(
        ("inputs", "found"),
        [
            (
                [torch.zeros(4)] * 3,
                r"a list of 3, and .* but 4 were given\)\. A list .* make one tensor of it, or pass",
            ),
            (
                {"input": torch.zeros(4, 2), "mask": None},
                r"a value of type dict, and .* 'mask'\)\. Leave 'mask' out of the data, or pass",
            ),
            ({}, r"a value of type dict, and cannot take them \(.* missing 1 .*\)\. Pass"),
        ],
    )
    @pytest.mark.parametrize("is_compiled", [False, True])
    def test_inputs_that_the_model_does_not_take(self, inputs: Any, found: str, is_compiled: bool) -> None:
        linear = nn.Linear(2, 1)
        model = torch.compile(linear, backend="eager") if is_compiled else linear
        with pytest.raises(
            DataError, match=rf"the inputs of a batch, {found} training_step=\(model, batch\) -> loss\.$"
        ):
            loss_function(mse_loss, None)(model, (inputs, torch.zeros(4, 1)))

    def test_a_model_that_takes_more_than_a_tensor(self) -> None:
        told = r"shape \(4, 2\), and .* missing 1 .*\)\. If forward takes several, let the inputs be a tuple of them, or pass"
        with pytest.raises(DataError, match=told):
            loss_function(mse_loss, None)(nn.Bilinear(2, 2, 1), (torch.zeros(4, 2), torch.zeros(4, 1)))

    def test_a_type_error_of_the_model_itself_is_its_own(self) -> None:
        class Failing(nn.Linear):
            def forward(self, input: torch.Tensor) -> torch.Tensor:
                raise TypeError("of its own")

        class Merged(nn.Linear):
            def forward(self, both: torch.Tensor) -> torch.Tensor:
                raise TypeError("of its own")

        merged = Merged(2, 1)
        merged.register_forward_pre_hook(lambda _, args, given: ((given["a"],), {}), with_kwargs=True)
        batch = torch.zeros(4, 2)
        for model, inputs in ((Failing(2, 1), batch), (Failing(2, 1), (batch,)), (merged, {"a": batch, "b": batch})):
            with pytest.raises(TypeError, match="of its own"):
                loss_function(mse_loss, None)(model, (inputs, torch.zeros(4, 1)))
        builtin = nn.Linear(2, 1)
        builtin.forward = torch.relu  # type: ignore[method-assign, assignment]
        with pytest.raises(TypeError, match="relu"):
            loss_function(mse_loss, None)(builtin, ((batch, batch), torch.zeros(4, 1)))

    @pytest.mark.parametrize(
        ("loss", "found"),
        [
            (torch.zeros(4, requires_grad=True), r"a tensor of shape \(4,\)"),
            (torch.zeros(1, requires_grad=True), r"a tensor of shape \(1,\)"),
            (1.5, "a value of type float"),
            (None, "nothing"),
            ((torch.zeros(()), torch.zeros(3)), r"a tuple of 2 whose '1' is a tensor of shape \(3,\)"),
            ([], "no loss, in an empty list"),
        ],
    )
    def test_losses_that_are_no_scalar_tensor(self, loss: Any, found: str) -> None:
        for source, loss_of in (
            ("loss_fn", loss_function(lambda outputs, targets: loss, None)),
            ("training_step", loss_function(None, lambda model, batch: loss)),
        ):
            with pytest.raises(NonScalarLossError, match=f"^{source} returned {found}: expected one scalar tensor"):
                loss_of(Recorder(), (1, 2))
        if loss is not None:
            for outputs in ({"loss": loss}, SimpleNamespace(loss=loss)):
                with pytest.raises(NonScalarLossError, match=f"^the model returned {found}: expected one scalar"):
                    loss_function(None, None)(Recorder(outputs), (1, 2))

    def test_a_loss_that_is_one_of_several_or_all_of_them(self) -> None:
        losses = {"loss": torch.ones((), requires_grad=True), "penalty": torch.ones((), requires_grad=True)}
        with pytest.raises(
            NonScalarLossError, match="^training_step returned a dict of 'loss', 'penalty'.*none of them named 'loss'"
        ):
            loss_function(None, lambda model, batch: losses)(Recorder(), (1, 2))

    @pytest.mark.parametrize(
        ("outputs", "found"),
        [
            (torch.zeros(2, 3), r"a tensor of shape \(2, 3\)"),
            ({"logits": torch.zeros(2)}, "a value of type dict"),
            ({"loss": None}, "a value of type dict"),
            (SimpleNamespace(loss=None), "a value of type SimpleNamespace"),
            ((torch.zeros(()), torch.zeros(2)), "a tuple of 2"),
        ],
    )
    def test_models_without_a_loss(self, outputs: Any, found: str) -> None:
        with pytest.raises(NonScalarLossError, match=rf"the model returned {found} without a \.loss or \['loss'\]"):
            loss_function(None, None)(Recorder(outputs), (1, 2))

    def test_losses_without_a_gradient(self) -> None:
        constant = torch.tensor(2.0)
        for source, loss_of in (
            ("loss_fn", loss_function(lambda outputs, targets: outputs.detach(), None)),
            ("training_step", loss_function(None, lambda model, batch: constant)),
        ):
            with pytest.raises(LossWithoutGradError, match=f"^{source} returned a loss without a gradient"):
                loss_of(Recorder(), (1, 2))
            with torch.no_grad():
                loss_of(Recorder(), (1, 2))  # in validation none is wanted
        with pytest.raises(LossWithoutGradError, match="^the model returned a loss without a gradient"):
            loss_function(None, None)(Recorder(constant), (1, 2))

    def test_what_the_users_code_raises_comes_through(self) -> None:
        def broken(outputs: Any, targets: Any) -> torch.Tensor:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            loss_function(broken, None)(Recorder(), (1, 2))

    def test_one_except_clause_catches_them_all(self) -> None:
        assert issubclass(NonScalarLossError, LossError)
        assert issubclass(LossWithoutGradError, LossError)


class TestSeveralLosses:
    def test_are_added_and_kept_apart(self) -> None:
        first, second = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
        for given, names in (
            ({"a": first, "b": second}, ["a", "b"]),
            ([first, second], ["0", "1"]),
            ((first, second), ["0", "1"]),
        ):
            for loss_of in (
                loss_function(lambda outputs, targets, given=given: given, None),
                loss_function(None, lambda model, batch, given=given: given),
            ):
                found = loss_of(Recorder(), (1, 2))
                assert isinstance(found, Computed)
                assert list(found.terms) == names
                assert list(found.terms.values()) == [first, second]
                assert total(found).item() == 5
                assert not found.outputs

    def test_of_a_model_that_returns_a_dict_of_them(self) -> None:
        losses = {"classes": torch.tensor(2.0, requires_grad=True), "boxes": torch.tensor(3.0, requires_grad=True)}
        found = loss_function(None, None)(Recorder(losses), (1, 2))
        assert isinstance(found, Computed)
        assert dict(found.terms) == losses

    def test_of_a_model_that_returns_outputs_beside_its_loss(self) -> None:
        loss, outputs = torch.tensor(2.0, requires_grad=True), {"accuracy": torch.tensor(0.5)}
        found = loss_function(None, None)(Recorder((loss, outputs)), (1, 2))
        assert found == Computed(loss, {}, outputs)

    def test_with_outputs_beside_them(self) -> None:
        loss, outputs = torch.tensor(2.0, requires_grad=True), {"accuracy": torch.tensor(0.5)}
        found = loss_function(None, lambda model, batch: (loss, outputs))(Recorder(), (1, 2))
        assert found == Computed(loss, {}, outputs)
        several = loss_function(None, lambda model, batch: ({"a": loss, "b": loss}, outputs))(Recorder(), (1, 2))
        assert total(several).item() == 4
        assert several.outputs is outputs
