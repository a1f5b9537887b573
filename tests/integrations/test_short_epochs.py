"""Steps of other loops that ask for more samples than an epoch has."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from autoaccum.errors import AutoaccumWarning
from autoaccum.integrations.evaluation_sizes import ShortEpochs


def test_they_are_told_once_and_kept_for_who_asks_later() -> None:
    made = ShortEpochs()
    with pytest.warns(AutoaccumWarning, match="effective_batch=9 is more than the data's 8 samples") as caught:
        made.look(9, range(8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.look(9, range(8))
    assert [str(event) for event in made.events] == [str(caught[0].message)]


class Unsized:
    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.parametrize(
    "sources",
    [[range(9)], [iter(range(8))], [None], [Unsized()], [range(8), range(9)]],
    ids=["enough", "a stream", "nothing", "a length that nobody knows", "drawn more than once"],
)
def test_nothing_is_told_of_enough_or_of_a_stream(sources: list[Any]) -> None:
    made = ShortEpochs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.look(9, *sources)
    assert made.events == []
