"""Whose statistics BatchNorm normalises by: what may be asked for, and what calls within the contexts compute."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum import errors
from autoaccum.planning.granules import MICRO, Statistics
from autoaccum.window.batch_norm import (
    Forwards,
    count_batch_norms,
    refuse_unseen,
    smallest_micro_batch,
    statistics_of,
)
from tests.models import classes, noisy


class TestWhatIsAskedFor:
    @pytest.mark.parametrize("text", ["micro", "frozen", "ghost:2", "ghost:32", "ghost:4096"])
    def test_texts(self, text: str) -> None:
        assert str(statistics_of(text)) == text

    def test_groups(self) -> None:
        assert statistics_of("ghost:32") == Statistics("ghost", 32)
        assert statistics_of("ghost:32").of_few() == Statistics("ghost", 4)
        assert statistics_of("ghost:3").of_few() == Statistics("ghost", 3)
        assert statistics_of("frozen") == statistics_of("frozen").of_few() == Statistics("frozen", 1)

    @pytest.mark.parametrize(
        "value", ["ghost", "ghost:1", "ghost:0", "ghost:-2", "ghost:x", "ghost:2.0", "Ghost:8", 32, None]
    )
    def test_anything_else_is_refused(self, value: Any) -> None:
        with pytest.raises(errors.ArgumentError, match="batch_norm=.*'ghost:32'"):
            statistics_of(value)

    @pytest.mark.parametrize("options", [{"micro_batch": 31}, {"max_micro_batch": 16}, {"micro_batch": [[33, 32]]}])
    def test_a_micro_batch_that_holds_no_whole_groups_is_refused(self, options: Any) -> None:
        with pytest.raises(errors.ArgumentError, match="whole groups of batch_norm='ghost:32'"):
            autoaccum.fit(
                noisy(),
                classes(64),
                effective_batch=64,
                loss_fn=functional.cross_entropy,
                batch_norm="ghost:32",
                **options,
            )
        assert statistics_of("frozen", **options).kind == "frozen"

    def test_recorded_plans_may_end_with_the_rest_of_a_window(self) -> None:
        assert statistics_of("ghost:32", micro_batch=[(64, 32, 6), (32, 33), (20,), (1,)]).group == 32
        with pytest.raises(errors.ArgumentError, match="multiples of 32"):
            statistics_of("ghost:32", micro_batch=[(32, 1)])

    def test_what_has_statistics_of_its_own_is_refused(self) -> None:
        with pytest.raises(errors.ConflictingArgumentsError, match="state"):
            statistics_of("ghost:32", state="window")
        assert statistics_of("frozen", state="window").kind == "frozen"

    @pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
    def test_code_that_nobody_sees_is_refused(self) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        scripted = nn.Sequential(nn.Linear(3, 4), torch.jit.script(nn.BatchNorm1d(4)))
        compiled = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        compiled[1].compile(backend="eager")
        called = torch.compile(model, backend="eager")
        with pytest.raises(errors.ArgumentError, match="neither compiled nor scripted"):
            refuse_unseen(statistics_of("ghost:4"), called, [model])
        for refused in (scripted, compiled):
            with pytest.raises(errors.ArgumentError, match="neither compiled nor scripted"):
                refuse_unseen(statistics_of("ghost:4"), refused, [refused])
            refuse_unseen(MICRO, refused, [refused])

    def test_groups_of_a_sharded_model_are_refused(self) -> None:
        with pytest.raises(errors.ArgumentError, match="do not call fully_shard"):
            refuse_unseen(statistics_of("ghost:4"), None, [], is_sharded=True)
        refuse_unseen(statistics_of("frozen"), None, [], is_sharded=True)

    def test_statistics_of_the_window_are_those_of_joined_micro_batches(self) -> None:
        for asked in ("window", "window:20"):
            with pytest.raises(errors.ArgumentError, match="Leave it out: joined micro-batches"):
                statistics_of(asked)


def computed(layer: nn.Module, x: torch.Tensor, text: str, num_samples: int) -> torch.Tensor:
    with Forwards(statistics_of(text), [layer], nullcontext).forward(num_samples):
        return layer(x)  # type: ignore[no-any-return]


class TestGroups:
    @pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
    @pytest.mark.parametrize("momentum", [0.1, None])
    def test_layers_of_all_dims_are_called_once_a_group(self, kind: Any, momentum: float | None) -> None:
        dims = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}[kind]
        x = torch.randn(13, 3, *[2] * dims, dtype=torch.float64)
        layer, plain = (kind(3, momentum=momentum).double() for _ in range(2))
        for _ in range(2):
            found = computed(layer, x, "ghost:4", 13)
            expected = torch.cat([plain(rows) for rows in x.split([4, 4, 5])])  # one sample joins the group before
            assert torch.equal(found, expected)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(layer.state_dict()[name], value, rtol=1e-14, atol=1e-16)
        assert layer.num_batches_tracked == 6

    def test_a_lazy_layer_is_built_by_its_first_forward(self) -> None:
        layer = nn.LazyBatchNorm1d()
        x = torch.randn(8, 3)
        layer(x)
        assert torch.equal(
            computed(layer, x, "ghost:4", 8), torch.cat([nn.BatchNorm1d(3)(rows) for rows in x.split(4)])
        )

    def test_rows_of_a_sample_are_together(self) -> None:
        layer, x = nn.BatchNorm1d(3), torch.randn(24, 3)
        assert torch.equal(
            computed(layer, x, "ghost:4", 8), torch.cat([nn.BatchNorm1d(3)(rows) for rows in x.split(12)])
        )

    @pytest.mark.parametrize("rows", [7, 9, 12, 20])
    def test_rows_that_belong_to_no_sample_are_refused(self, rows: int) -> None:
        with pytest.raises(errors.ArgumentError, match=f"{rows} rows of 8 samples in a BatchNorm layer"):
            computed(nn.BatchNorm1d(3), torch.randn(rows, 3), "ghost:4", 8)

    def test_evaluation_is_untouched(self) -> None:
        layer, x = nn.BatchNorm1d(3).eval(), torch.randn(7, 3)
        assert torch.equal(computed(layer, x, "ghost:4", 8), layer(x))

    def test_a_backward_moves_nothing_and_leaves_no_hooks(self) -> None:
        layer, x = nn.BatchNorm1d(3, momentum=None), torch.randn(8, 3)
        forwards = Forwards(statistics_of("ghost:4"), [layer], nullcontext)
        with forwards.forward(8):
            first = layer(x)
        before = {name: value.clone() for name, value in layer.state_dict().items()}
        again = []
        forwards.backward(lambda: again.append(layer(x)), 8)()
        assert torch.equal(again[0], first)
        assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
        with pytest.raises(KeyError):
            forwards.backward(lambda: {}["a"], 8)()
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks


class TestFrozen:
    def test_a_layer_that_has_seen_nothing_yet(self) -> None:
        for momentum in (0.1, None):
            layer, x = nn.BatchNorm1d(3, momentum=momentum), torch.randn(8, 3)
            assert torch.equal(computed(layer, x, "frozen", 8), nn.BatchNorm1d(3).eval()(x))
            assert layer.num_batches_tracked == 0

    def test_single_samples(self) -> None:
        assert computed(nn.BatchNorm1d(3), torch.randn(1, 3), "frozen", 1).shape == (1, 3)


# Which layers normalise a sample by those beside it.


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4),
        nn.BatchNorm3d(4),
        nn.SyncBatchNorm(4),
        nn.LazyBatchNorm1d(),
        nn.BatchNorm1d(4, affine=False, track_running_stats=False),
    ],
)
def test_every_batch_norm(layer: nn.Module) -> None:
    assert count_batch_norms([layer]) == 1
    assert smallest_micro_batch([layer]) == 2


@pytest.mark.parametrize(
    "layer",
    [
        nn.GroupNorm(2, 4),
        nn.LayerNorm(4),
        nn.InstanceNorm1d(4, track_running_stats=True),
        nn.Dropout(),
        nn.Linear(4, 4),
    ],
)
def test_no_other_layer(layer: nn.Module) -> None:
    """Their outputs for a sample are the same whatever stands beside it."""
    assert count_batch_norms([layer]) == 0
    assert smallest_micro_batch([layer]) == 1


def test_only_in_training_mode() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    assert count_batch_norms([model]) == 2
    model[0].eval()
    assert count_batch_norms([model]) == 1
    model.eval()
    assert (count_batch_norms([model]), smallest_micro_batch([model])) == (0, 1)


def test_over_all_modules_and_shared_ones_once() -> None:
    shared = nn.BatchNorm1d(4)
    assert count_batch_norms([nn.Sequential(shared, nn.ReLU(), shared)]) == 1
    assert count_batch_norms([nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4))]) == 2
    assert (count_batch_norms([]), smallest_micro_batch([])) == (0, 1)


def test_what_is_counted_does_couple() -> None:
    """See the reason for it all: one sample more, and another sample's output changes."""
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    for layer in (nn.BatchNorm1d(4), nn.LayerNorm(4), nn.BatchNorm1d(4).eval()):
        coupled = not torch.allclose(layer(inputs)[:3], layer(inputs[:3]))
        assert coupled is (count_batch_norms([layer]) > 0)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        nn.BatchNorm1d(4)(inputs[:1])


def test_a_batch_norm_without_running_statistics_couples_in_eval_mode() -> None:
    layer = nn.BatchNorm1d(4, track_running_stats=False).eval()
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(layer(inputs)[:3], layer(inputs[:3]))
    assert count_batch_norms([layer]) == 1
