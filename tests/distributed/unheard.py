"""A channel by which nobody is heard."""

from __future__ import annotations

from typing import Any, cast

from autoaccum.distributed.channel import Channel
from autoaccum.errors import RankError


class _Unheard:
    rank = 0

    def wait(self, work: Any) -> None:
        """Wait for nothing."""

    def gone(self, reason: str) -> RankError:
        return RankError(None, reason)


def unheard() -> Channel:
    """Return a channel of a rank that waits for nobody, and knows of nobody who is lost."""
    return cast(Channel, _Unheard())
