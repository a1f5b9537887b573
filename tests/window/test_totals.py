"""What terms count is found in the leaves of a batch, and counted beforehand in the windows that follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from autoaccum.data import batches
from autoaccum.window.totals import Totals, counted_beforehand
from tests import standin
from tests.devices import DEVICE, there


class Samples:
    """A window of samples that are there."""

    lengths = None

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.num_samples = batches.num_samples(batch)

    def micro_batch(self, start: int, size: int) -> Any:
        return batches.take(self.batch, start, start + size)

    def samples(self, positions: Sequence[int]) -> Any:
        return batches.take(self.batch, positions[0], positions[-1] + 1)


def window(seed: int, count: int = 12) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (count, 6), generator=generator)
    labels[torch.rand(count, 6, generator=generator) < 0.5] = 255
    classes = torch.randint(0, 4, (count,), generator=generator)
    mask = (torch.rand(count, 3, generator=generator) < 0.5).float()
    return Samples(
        there({"labels": labels, "classes": classes, "mask": mask, "lengths": [int(c) + 1 for c in classes]})
    )


WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.25], device=DEVICE)

COUNTS: dict[str, Callable[[Any], float]] = {
    "samples": lambda batch: 6.0 * len(batch["classes"]),
    "not ignored": lambda batch: float((batch["labels"] != 255).sum()),
    "shifted": lambda batch: float((batch["labels"][:, 1:] != 255).sum()),
    "rows with any": lambda batch: float((batch["labels"] != 255).any(1).sum()),
    "mask": lambda batch: 2.0 * float(batch["mask"].sum()),
    "lengths": lambda batch: float(sum(batch["lengths"])),
    "of one class": lambda batch: float((batch["classes"] != 2).sum()),
    "positive": lambda batch: float((batch["classes"] > 0).sum()),
    "weights of classes": lambda batch: float(WEIGHTS[batch["classes"]].sum()),
}


@pytest.mark.device
@pytest.mark.parametrize("name", COUNTS)
def test_what_counts_as_a_term_does_is_found_and_foretold(name: str) -> None:
    count, totals, sizes = COUNTS[name], Totals(), [3, 3, 2, 2, 1, 1]
    for seed in range(3):
        learnt = window(seed)
        starts = np.cumsum([0, *sizes])
        counted = [count(learnt.micro_batch(start, size)) for start, size in zip(starts, sizes, strict=False)]
        if seed == 0:
            assert totals.foretell(learnt, [name]) == {}
        totals.learn(learnt, sizes, {name: counted})
    for seed in range(10, 20):
        other = window(seed, count=20)
        assert totals.foretell(other, [name])[name] == pytest.approx(count(other.batch), rel=1e-13)
    assert not totals.has_given_up(name)
    again = Totals()
    again.load_state_dict(totals.state_dict())
    assert again.foretell(other, [name]) == totals.foretell(other, [name])


@pytest.mark.device
def test_what_nothing_in_a_batch_counts_is_given_up() -> None:
    totals, generator = Totals(), torch.Generator().manual_seed(0)
    for seed in range(30):
        numbers = torch.randint(1, 100, (6,), generator=generator).tolist()
        totals.learn(window(seed), [2] * 6, {"term": [float(number) for number in numbers]})
    assert totals.has_given_up("term")
    assert totals.foretell(window(99), ["term"]) == {}


def test_what_was_right_by_chance_gives_way_to_what_is_right_always() -> None:
    totals = Totals()
    same = Samples({"a": torch.tensor([1, 0, 1, 1]), "b": torch.tensor([1, 0, 1, 1])})
    totals.learn(same, [2, 2], {"term": [1.0, 2.0]})
    other = Samples({"a": torch.tensor([1, 1, 1, 0]), "b": torch.tensor([0, 0, 1, 0])})
    totals.learn(other, [2, 2], {"term": [2.0, 1.0]})
    assert totals.foretell(other, ["term"]) == {"term": 3.0}


class TestCountsInDoubt:
    """What a batch tells of micro-batches whose counts may be kept from 0."""

    def totals(self) -> Totals:
        totals, seen = Totals(), Samples({"w": torch.tensor([0.5, 2.0, 1.5, 0.25])})
        totals.learn(seen, [2, 2], {"term": [5.0, 3.5]})  # twice the weights
        return totals

    def test_it_tells_where_all_else_counts_so(self) -> None:
        now = Samples({"w": torch.tensor([3.0, 0.3, 0.1, 0.0])})
        told = self.totals().counts_in_doubt(
            now, [1, 1, 1, 1], {"term": [6.0, 2.0, 2.0, 2.0]}, [(1, "term"), (3, "term")]
        )
        assert told == {}, "the third one is not in doubt, and counts another number"
        in_doubt = [(1, "term"), (2, "term"), (3, "term")]
        told = self.totals().counts_in_doubt(now, [1, 1, 1, 1], {"term": [6.0, 2.0, 2.0, 2.0]}, in_doubt)
        assert told == {
            (1, "term"): pytest.approx(0.6, rel=1e-6), (2, "term"): pytest.approx(0.2, rel=1e-6), (3, "term"): 0.0
        }  # fmt: skip

    @pytest.mark.parametrize("counts", [[6.0, 0.5], [5.0, 2.0], [0.0, 2.0]])
    def test_it_does_not_where_that_explains_nothing(self, counts: list[float]) -> None:
        # More than its count; another number where nothing is in doubt; nothing that is certain.
        now = Samples({"w": torch.tensor([3.0, 0.3])})
        assert self.totals().counts_in_doubt(now, [1, 1], {"term": counts}, [(1, "term")]) == {}

    def test_of_a_term_that_was_never_found_nothing_is_told(self) -> None:
        now = Samples({"w": torch.tensor([3.0, 0.3])})
        assert Totals().counts_in_doubt(now, [1, 1], {"term": [6.0, 2.0]}, [(1, "term")]) == {}

    def test_what_would_have_told_otherwise_before_does_not_tell(self) -> None:
        totals, seen = Totals(), Samples({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1.0, 2.0])})
        totals.learn(seen, [1, 1], {"term": [1.0, 2.0]})
        now = Samples({"a": torch.tensor([2.0, 0.0]), "b": torch.tensor([2.0, 1.0])})
        assert totals.counts_in_doubt(now, [1, 1], {"term": [2.0, 1.0]}, [(1, "term")]) == {}


def test_boxes_in_lists_are_counted_together() -> None:
    boxes = [torch.zeros(count, 4) for count in (2, 0, 3, 1)]
    batch = {"images": torch.zeros(4, 3), "targets": [{"boxes": box} for box in boxes]}

    class Listed(Samples):
        def __init__(self) -> None:
            self.batch, self.num_samples = batch, 4

        def samples(self, positions: Sequence[int]) -> Any:
            stop = positions[-1] + 1
            return {"images": batch["images"][positions[0] : stop], "targets": batch["targets"][positions[0] : stop]}

    totals = Totals()
    totals.learn(Listed(), [1, 1, 2], {"boxes": [2.0, 0.0, 4.0]})
    assert totals.foretell(Listed(), ["boxes"]) == {"boxes": 6.0}


@pytest.mark.device
def test_the_users_own_counts_are_added_up_piece_by_piece() -> None:
    seen: list[int] = []

    def count(batch: Any) -> dict[str, float]:
        seen.append(len(batch["classes"]))
        return {"a": float(len(batch["classes"])), "b": 1.0}

    assert counted_beforehand(window(0, count=100), count) == {"a": 100.0, "b": 2.0}
    assert seen == [64, 36]


@pytest.mark.gpu
@standin.only_there
def test_a_device_is_waited_for_once_whatever_is_counted_there() -> None:
    names, sizes, totals = ["not ignored", "shifted", "mask"], [3, 3, 2, 2, 1, 1], Totals()
    for seed in range(2):
        learnt = window(seed)
        starts = np.cumsum([0, *sizes])
        pieces = [learnt.micro_batch(start, size) for start, size in zip(starts, sizes, strict=False)]
        totals.learn(learnt, sizes, {name: [COUNTS[name](piece) for piece in pieces] for name in names})
    large = window(2, count=200)
    with standin.recorded() as log:
        found = totals.foretell(large, names)
    assert [entry.kind for entry in log].count("sync") == 1
    assert found == pytest.approx({name: COUNTS[name](large.batch) for name in names})
