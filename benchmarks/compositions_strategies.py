"""Draws compositions: the source text of a loss, the model and data that it is for, and how its windows are cut."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import compositions_terms as terms
from compositions_terms import Shape
from hypothesis import strategies as st
from hypothesis.internal.conjecture.data import ConjectureData

NAMES = "yrcmkws"


@dataclass(frozen=True, kw_only=True)
class Composition:
    """One loss, and the run that it is trained in."""

    source: str
    """A function ``loss(model, batch)``."""
    names: str
    """What a batch holds beside the inputs, a letter for each."""
    is_coupled: bool
    """Whether something in it was chosen because samples meet, or because it is neither mean nor sum."""
    outputs: int
    times: int | None
    """None of a model without any."""
    features: int
    is_deep: bool
    windows: tuple[int, ...]
    max_micro_batch: int
    by_fit: bool
    first_alike: bool
    """Whether nothing is ignored in the first window, and all labels are the same."""
    equal_weights: bool
    """Whether all weights are the same in it, too."""


@dataclass
class _Body:
    """The lines of a loss as they are written, and what they are drawn with."""

    draw: Callable[[st.SearchStrategy], object]
    times: int | None
    lines: list[str]
    is_coupled: bool = False

    def one_of(self, choices: tuple[str, ...]) -> str:
        return self.draw(st.sampled_from(choices))  # type: ignore[return-value]

    def happens(self, percent: int) -> bool:
        # Hypothesis likes small numbers, and shrinks to them: what is seldom begins at the other end.
        return self.draw(st.integers(0, 99)) >= 100 - percent  # type: ignore[operator]

    def number(self) -> str:
        return self.one_of(terms.NUMBERS)

    def named(self, name: str, code: str) -> str:
        """Give a name to some code; return the name."""
        self.lines.append(f"{name} = {code}")
        return name


def _items(body: _Body) -> tuple[str, Shape]:
    """Return the code of a loss of items, and its shape."""
    if body.times is None:
        is_by_sample = body.happens(50)
        return (
            (body.one_of(terms.SAMPLES), terms.OF_SAMPLES)
            if is_by_sample
            else (body.one_of(terms.ELEMENTS), terms.OF_OUTPUTS)
        )
    kind = body.draw(st.integers(0, 3))
    if kind < 2:
        return body.one_of(terms.TOKENS), terms.OF_TOKENS
    if kind == 2:
        return body.one_of(terms.ALL_TOKENS), terms.OF_ALL_TOKENS
    return body.one_of(terms.ELEMENTS), terms.OF_ALL


def _term(body: _Body, index: int, coupled: bool) -> str:
    """Write a term, a scalar; return its name."""
    name = "ab"[index] if index < 2 else f"term{index}"
    if coupled and body.happens(35):
        return body.named(name, body.one_of(terms.COUPLED_OUTPUTS))
    if not coupled and body.happens(15):
        choices = terms.WHOLE + (terms.WHOLE_FLAT if body.times is None else terms.WHOLE_TOKENS)
        return body.named(name, body.one_of(choices))
    code, shape = _items(body)
    e = body.named("each" if not index else f"each{index + 1}", code)
    is_several = len(shape.letters) > 1
    mask = ""
    if coupled:
        reduction = body.one_of(terms.COUPLED)
    elif body.happens(45):
        mask = body.one_of(shape.masks)
        reduction = body.one_of(terms.MASKED + (terms.MASKED_OF_SEVERAL if is_several else ()))
    elif body.happens(25):
        mask = body.one_of(shape.weights)
        reduction = body.one_of(terms.WEIGHTED)
    else:
        reduction = body.one_of(terms.REDUCTIONS + (terms.REDUCTIONS_OF_SEVERAL if is_several else ()))
    if mask and not mask.isidentifier():
        mask = body.named("mask" if not index else f"mask{index + 1}", mask)
    number = body.number() if "{number}" in reduction else ""
    return body.named(name, reduction.format(e=e, m=mask, letters=shape.letters, number=number))


def _loss(body: _Body) -> None:
    """Write the lines of a loss."""
    share = body.draw(st.integers(0, 99))
    count = 1 if share < 50 else 2 if share < 90 else 3
    body.is_coupled = body.happens(16)
    where = body.draw(st.integers(0, count - 1)) if body.is_coupled else -1
    found = [_term(body, index, index == where) for index in range(count)]
    for index, name in enumerate(found):
        if body.happens(12):
            body.named(name, body.one_of(terms.LEARNT).format(a=name))
        elif body.happens(15):
            form = body.one_of(terms.OTHER_FORMS)
            body.named(name, form.format(a=name, number=body.number() if "{number}" in form else ""))
        if index:
            sign = "-" if body.happens(15) else "+"
            found[index] = f"{sign} {body.number()} * {name}" if body.happens(60) else f"{sign} {name}"
    if body.happens(20):
        found.append(f"+ {body.number()} * {body.one_of(terms.PENALTIES)}")
    body.lines.append(f"return {' '.join(found)}")


@st.composite
def compositions(draw: Callable[[st.SearchStrategy], object]) -> Composition:
    """Draw a composition."""
    times = draw(st.sampled_from((None, None, None, 2, 3, 4, 6)))
    body = _Body(draw, times, [])  # type: ignore[arg-type]
    _loss(body)
    text = "\n".join(body.lines)
    names = "".join(name for name in NAMES if re.search(rf"\b{name}\b", text))
    head = [f"x, {', '.join(names)} = batch" if names else "(x,) = batch", "o = model(x)"]
    source = "\n    ".join(["def loss(model, batch):", *head, *body.lines])
    size = draw(st.integers(5, 17))
    by_fit = body.happens(20)
    if by_fit:
        last = draw(st.integers(1, size)) if body.happens(60) else size  # type: ignore[arg-type]
        windows = (size,) * 5 + (last,)
    elif body.happens(50):
        windows = (size,) * 5 + (draw(st.integers(2, size)),)  # type: ignore[assignment, arg-type]
    else:
        windows = tuple(draw(st.integers(5, 17)) for _ in range(6))  # type: ignore[assignment]
    alike = body.happens(35)
    return Composition(
        source=source,
        names=names,
        is_coupled=body.is_coupled,
        outputs=draw(st.integers(1, 9)),  # type: ignore[arg-type]
        times=times,  # type: ignore[arg-type]
        features=draw(st.integers(1, 4)),  # type: ignore[arg-type]
        is_deep=body.happens(25),
        windows=windows,  # type: ignore[arg-type]
        max_micro_batch=draw(st.sampled_from((4, 3, 2, 1, 5, 6, 8))),  # type: ignore[arg-type]
        by_fit=by_fit,
        first_alike=alike,
        equal_weights=alike and body.happens(50),
    )


def case(number: int) -> Composition:
    """Return the composition of a case: each is drawn by itself, and so can be drawn again without those before it."""
    # As ``given`` draws, but for its mutations: it would try ten neighbours of what it likes, and that is no sample.
    data = ConjectureData(random=random.Random(number))
    return data.draw(compositions())
