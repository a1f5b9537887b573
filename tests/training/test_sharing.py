"""How a run's windows are shared out, as one of its ranks sees it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from autoaccum.distributed.balance import Stint
from autoaccum.events import Shared
from autoaccum.training.rank_sync import Sharing


def sharing(**options: Any) -> Sharing:
    group: Any = SimpleNamespace(size=2, rank=1)
    return Sharing(group, **{"balance": "equal", "smallest": 1, **options})


def parts(first: int, second: int, seconds: tuple[float, float] = (1.0, 1.0)) -> list[Stint]:
    sizes = [(size,) if size else () for size in (first, second)]
    return [Stint(sizes[rank], seconds[rank], 0.5 * rank, 100 + rank, 1000, True) for rank in range(2)]


def test_what_is_told_is_of_all_windows_since_it_was_told_last() -> None:
    own = sharing()
    assert own.told(0) is None
    for window in (parts(4, 3), parts(3, 4), parts(1, 0)):
        own.saw(window)
    assert own.told(3) == Shared(
        step=3, micro_batches=((3,), (4,)), peak_bytes=(100, 101), limit_bytes=(1000, 1000), busy_seconds=(3.0, 3.0),
        waited_seconds=(0.0, 1.5),
    )  # fmt: skip
    assert own.told(3) is None
    own.saw(parts(1, 0))
    told = own.told(4)
    assert told is not None
    assert (told.micro_batches, told.busy_seconds) == (((1,), ()), (1.0, 1.0))


def test_that_shares_have_changed_is_said_once_and_not_of_another_batch() -> None:
    own = sharing(balance="speed")
    assert not own.have_changed(12)
    assert own.own_samples(12) == 6
    for _ in range(5):
        own.saw(parts(6, 6, (1.0, 2.0)))
    assert own.have_changed(12)
    assert not own.have_changed(12)
    assert own.own_samples(12) == 4
    assert not own.have_changed(24), "that the batch is another is told by itself"
