from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoaccum.step.split_calls import Layout
from autoaccum.training.validation import JoinedEvaluations


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).eval()


def contrast(outputs: torch.Tensor) -> torch.Tensor:
    return (outputs @ outputs.T).logsumexp(1).mean()


class TestJoined:
    def test_it_follows_training(self) -> None:
        whole = model()
        evaluations = JoinedEvaluations(whole, torch.device("cpu"))
        assert not evaluations.follow(None)
        assert evaluations.follow(Layout([whole]))
        assert not evaluations.follow(None)

    @torch.no_grad()
    def test_the_loss_is_that_of_all_samples_and_the_model_runs_by_pieces(self) -> None:
        whole, x, seen = model(), torch.randn(8, 3), []
        expected = contrast(whole(x))
        whole[0].register_forward_hook(lambda *given: seen.append(len(given[2])))
        evaluations = JoinedEvaluations(whole, torch.device("cpu"))
        evaluations.follow(Layout([whole]))
        evaluations.measure(8, lambda count: contrast(whole(x[:count])))
        seen.clear()
        assert evaluations.run(8, 3, lambda: contrast(whole(x))) == expected
        assert seen == [3, 3, 2]

    @torch.no_grad()
    def test_what_cannot_be_split_in_evaluations_is_opened(self) -> None:
        class Centred(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                hidden = self.inner(x)
                return hidden if self.training else hidden - hidden.mean(0)

        whole, x = Centred().eval(), torch.randn(8, 3)
        evaluations = JoinedEvaluations(whole, torch.device("cpu"))
        trained = Layout([whole])
        evaluations.follow(trained)
        evaluations.measure(8, lambda count: whole(x[:count]))
        torch.testing.assert_close(evaluations.run(8, 3, lambda: whole(x)), whole(x))
        assert not trained.is_opened(whole)

    @torch.no_grad()
    def test_where_nothing_could_be_measured_it_runs_all_the_same(self) -> None:
        whole, x = model(), torch.randn(8, 3)

        def fails(count: int) -> Any:
            raise ValueError(f"{count} samples are too few")

        evaluations = JoinedEvaluations(whole, torch.device("cpu"))
        evaluations.follow(Layout([whole]))
        before = torch.get_rng_state()
        evaluations.measure(8, fails)
        assert torch.equal(evaluations.run(8, 5, lambda: whole(x)), whole(x))
        assert torch.equal(torch.get_rng_state(), before)
