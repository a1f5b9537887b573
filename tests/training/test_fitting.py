"""``fit`` is ``Trainer`` called: the same arguments, and a TypeError that speaks of it."""

from __future__ import annotations

import inspect

import pytest

import autoaccum


def test_it_takes_what_the_trainer_takes_and_says_what_each_is() -> None:
    taken = inspect.signature(autoaccum.fit).parameters
    assert taken == inspect.signature(autoaccum.Trainer).parameters
    for name in taken:
        assert f"\n    {name}: " in (inspect.getdoc(autoaccum.fit) or ""), name


def test_a_wrong_argument_is_one_of_fit() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'batch_size'"):
        autoaccum.fit(None, None, effective_batch=4, batch_size=2)  # type: ignore[call-arg, arg-type]
