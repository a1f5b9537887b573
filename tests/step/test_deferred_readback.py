"""The end of a window is read at once: what it launches is waited for by one copy."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from autoaccum.step.deferred_readback import Ending
from autoaccum.step.gradient import Gradients
from autoaccum.step.item_counts import Foresight
from autoaccum.step.readback import Numbers
from autoaccum.step.terms import Reduction, Term


class Late:
    """What has a number of its own."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.found = value, math.nan

    def want(self, numbers: Numbers) -> None:
        numbers.want([self.value])

    def take_read(self, numbers: Numbers) -> None:
        self.found = numbers.count(self.value)


def gradients(device: torch.device) -> Gradients:
    layer = nn.Linear(2, 1, bias=False).to(device)
    layer.weight.grad = torch.tensor([[3.0, 4.0]], device=device)
    return Gradients([layer], torch.optim.SGD(layer.parameters()))


@pytest.fixture
def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


@pytest.mark.gpu
def test_all_of_it_is_on_the_host(device: torch.device) -> None:
    ending, late = Ending(gradients(device)), Late(torch.tensor(7.0, device=device))
    ending.measure(clips=True)
    term = Term(means=torch.tensor(6.0, device=device), averages=True)
    losses = [torch.tensor(0.5, device=device), None]
    known = ending.read(losses, [Reduction(torch.tensor(6.0, device=device), (term,)), Reduction(0.0)], {}, [late])
    assert known is not None
    assert known.losses[0] is not None
    assert known.losses[0].is_cpu
    assert known.losses[1] is None
    assert (known.reductions[0].items, known.reductions[0].terms[0].divisor) == (6.0, 6.0)
    assert late.found == 7.0
    assert ending.is_finite()
    # Clipped once it was corrected by a half, from 2.5 to 1.
    assert ending.norm(-0.5).item() == ending.clip(1.0, -0.5).item() == 2.5


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [False, True])
def test_a_norm_is_read_with_all_else_or_left_where_it_is(device: torch.device, counts: bool) -> None:
    ending = Ending(gradients(device))
    ending.measure(clips=False)
    items = torch.tensor(6.0, device=device) if counts else 6.0
    known = ending.read([torch.tensor(0.5, device=device)], [Reduction(items)], {}, [])
    assert (known is not None) is counts
    assert ending.norm(-0.5).is_cpu is counts
    assert ending.norm(-0.5).item() == 2.5
    assert ending.is_finite()


@pytest.mark.gpu
def test_of_losses_that_say_all_nothing_is_read(device: torch.device) -> None:
    ending = Ending(gradients(device))
    assert ending.read([torch.tensor(0.5, device=device)], [Reduction(4.0)], {}, []) is None
    assert ending.overflow() is None
    assert ending.whole() is None


def test_what_the_last_window_counted_is_kept_once_it_has_committed() -> None:
    foresight = Foresight(is_used=True)
    assert foresight.begin(4) == 0.0
    foresight.see(30.0, 4, torch.float32)
    assert foresight.begin(4) == 0.0  # it was rolled back
    foresight.see(30.0, 4, torch.float32)
    foresight.commit()
    assert (foresight.begin(4), foresight.begin(2)) == (30.0, 15.0)
    again = Foresight(is_used=True)
    again.load_state_dict(foresight.state_dict())
    assert again.begin(4) == 30.0


def test_a_guess_for_16_bits_is_a_power_of_two() -> None:
    foresight = Foresight(is_used=True)
    foresight.begin(4)
    foresight.see(-30.0, 4, torch.float16)
    foresight.commit()
    assert foresight.begin(4) == -32.0


def test_where_it_is_not_used_nothing_is_known() -> None:
    foresight = Foresight(is_used=False)
    foresight.see(30.0, 4, torch.float32)
    foresight.commit()
    foresight.load_state_dict({"counted": (30.0, 4)})
    assert foresight.begin(4) == 0.0
    assert foresight.state_dict() == {}
