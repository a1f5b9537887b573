"""Which calls of BatchNorm the passes over a window see, and by which statistics they compute them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from autoaccum import errors
from autoaccum.planning.granules import Statistics
from autoaccum.window.batch_norm_calls import Call
from autoaccum.window.batch_norm_passes import Passes
from autoaccum.window.batch_norm_statistics import normalised_alone


def passes_of(model: nn.Module, most: int = 5) -> Passes:
    return Passes(Statistics("window", most=most), [model], nullcontext)


class TestCalls:
    def test_they_are_learnt_from_the_first_forward(self) -> None:
        model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval())
        passes = passes_of(model)
        with passes.forward(4):
            model(torch.randn(4, 2))
        passes.learn()
        assert passes.num_calls == 2
        assert passes.num_forwards == 1
        # Running statistics are moved at the window's end.
        assert torch.equal(model[0].running_mean, torch.zeros(2))

    def test_more_than_were_asked_for_are_refused(self) -> None:
        model = nn.BatchNorm1d(2)
        passes = passes_of(model, most=2)
        with passes.forward(4):
            model(model(model(torch.randn(4, 2))))
        with pytest.raises(errors.ArgumentError, match=r"at most 2 times, not 3.*'window:3'"):
            passes.learn()

    def test_one_sample_is_no_reason_to_fail(self) -> None:
        """PyTorch refuses statistics of one; those of its window may be there already, or are yet to come."""
        model = nn.BatchNorm1d(2)
        with passes_of(model).forward(1):
            torch.testing.assert_close(model(torch.tensor([[3.0, 4.0]])), torch.zeros(1, 2), rtol=0, atol=1e-3)

    def test_of_the_wanted_call_there_are_statistics_and_then_its_input(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2), nn.BatchNorm1d(2))
        passes, x = passes_of(model), torch.randn(4, 2)
        passes.wanted = 0
        with passes.forward(4):
            model(x)
        (part,) = passes.parts
        torch.testing.assert_close(part.mean, model[0](x).mean(0).detach())
        assert passes.input is None
        passes.known = [part]
        with passes.forward(4):
            model(x)
        assert passes.input is not None
        assert torch.equal(passes.input, model[0](x))
        assert passes.input.requires_grad

    def test_a_call_is_found_again_by_what_it_was_given(self) -> None:
        model = nn.BatchNorm1d(2)
        passes, inputs = passes_of(model), [torch.randn(4, 2, requires_grad=True) for _ in range(3)]
        for _ in range(2):  # the first forward tells that there are several
            with passes.forward(4):
                for x in inputs:
                    model(x)
            passes.learn()
        passes.known = [normalised_alone(x, None, None, 1e-5)[1] for x in inputs]
        key = passes.calls[0].key
        again = [Call(x, None, None) for x in inputs]
        assert [passes.found_again(key, call) for call in reversed(again)] == [2, 1, 0]
        with pytest.raises(errors.ArgumentError, match="use_reentrant=False"):
            passes.found_again(key + 1, again[0])
