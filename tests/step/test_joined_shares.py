from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.step.joined import Gathered, LeftError, Refused, TogetherRanks
from autoaccum.step.split_calls import Layout, NotRowsError, SplitCalls, UnknownCallError


class Channel:
    """Adds what the other ranks have to what this one has."""

    def __init__(self) -> None:
        self.others: list[torch.Tensor] = []

    def begin_sum(self, buffer: torch.Tensor) -> Any:
        return lambda: [buffer.add_(other) for other in self.others]


class Ranks:
    """Two ranks, of which the other one tells what is put here."""

    rank, size = 0, 2

    def __init__(self, *others: Any) -> None:
        self.channel, self._others = Channel(), list(others)

    def exchange(self, told: Any) -> list[Any]:
        other = self._others.pop(0)
        return [told, told if other == "alike" else other]


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh())


class TestRefused:
    def test_an_error_is_the_same_one_on_another_rank(self) -> None:
        here, there = model(), model()
        errors = [
            NotRowsError(here[0], "it moves state"),
            NotRowsError(here[1], "it was changed", is_deep=True),
            UnknownCallError(here, "0. [(2, 'torch.float32')]"),
        ]
        for error in errors:
            found = Refused.of(error, Layout([here])).error(Layout([there]))
            assert type(found) is type(error)
            assert str(found) == str(error)
            assert found.is_agreed
            assert found.is_deep is error.is_deep
            assert not error.is_agreed
            assert list(there.modules()).index(found.module) == list(here.modules()).index(error.module)


class TestTogether:
    def test_whoever_left_is_heard_before_anything_else(self) -> None:
        layout = Layout([model()])
        refused = Refused.of(NotRowsError(layout.roots[0], "why"), layout)
        for other, error in ((None, LeftError), (refused, NotRowsError)):
            together = TogetherRanks(Ranks(other), layout, torch.device("cpu"), [2, 1])  # type: ignore[arg-type]
            with pytest.raises(error):
                together.hear("all is well")
        with pytest.raises(LeftError):
            TogetherRanks(Ranks(None), layout, torch.device("cpu"), [2, 1]).hear(refused)  # type: ignore[arg-type]

    def test_a_call_runs_its_own_rows_and_has_the_outputs_of_all(self) -> None:
        whole, x = model(), torch.randn(5, 3)
        layout = Layout([whole])
        ranks = Ranks("alike", "alike")
        together = TogetherRanks(ranks, layout, torch.device("cpu"), [3, 2])  # type: ignore[arg-type]
        expected = whole(x).detach()
        theirs = torch.zeros(5, 2)
        theirs[3:] = expected[3:]
        ranks.channel.others = [theirs.view(-1).view(torch.uint8)]
        seen: list[int] = []
        whole[1].register_forward_hook(lambda module, args, output: seen.append(len(output)))
        with SplitCalls(layout, (2, 1), torch.device("cpu"), ranks=together):
            found = whole(x)
        assert seen == [2, 1]
        torch.testing.assert_close(found, expected)

    def test_outputs_that_differ_between_ranks_have_the_module_opened_on_all(self) -> None:
        whole = model()
        together = TogetherRanks(
            Ranks(([((5, 7), torch.float32, (0, 1), None)], [True])), Layout([whole]), torch.device("cpu"), [3, 2]
        )  # type: ignore[arg-type]
        with (
            pytest.raises(NotRowsError, match="differ between ranks") as raised,
            SplitCalls(together._layout, (2, 1), torch.device("cpu"), ranks=together),
        ):
            whole(torch.randn(5, 3))
        assert raised.value.is_agreed

    def test_a_mean_over_ranks_counts_what_one_of_them_lacks_as_0(self) -> None:
        ranks = Ranks([0, 1], [1])
        together = TogetherRanks(ranks, Layout([model()]), torch.device("cpu"), [3, 2])  # type: ignore[arg-type]
        like = {0: torch.ones(2), 1: torch.ones(2)}
        given = torch.tensor([1.0, 2.0])
        ranks.channel.others = [torch.tensor([3.0, 4.0])]
        found = together.sum({0: given}, like)
        assert {at: mean.tolist() for at, mean in found.items()} == {0: [2.0, 3.0], 1: [1.5, 2.0]}
        assert given.tolist() == [1.0, 2.0], "which somebody else may hold"
        assert list(together.sum({}, like)) == [1]


def test_gathered_samples_are_one_batch() -> None:
    assert Gathered("all", 5).micro_batch(0, 5) == "all"
    with pytest.raises(AssertionError):
        Gathered("all", 5).micro_batch(0, 3)
