"""Says why samples cannot be made into a batch where nobody has passed a collate_fn, and which one to pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from autoaccum.data import batches, foreign
from autoaccum.data.joins import are_same
from autoaccum.errors import DataError

_LENGTHS = (
    "Pad them: collate_fn=lambda samples: torch.nn.utils.rnn.pad_sequence(samples, batch_first=True), for samples that "
    "are tensors; for pairs of a tensor and a number, lambda samples: (torch.nn.utils.rnn.pad_sequence("
    "[one for one, _ in samples], batch_first=True), torch.tensor([number for _, number in samples])); of a tokenizer, "
    "transformers.DataCollatorWithPadding(tokenizer)."
)


def plain_collate(samples: list[Any]) -> Any:
    """Return what default_collate makes of samples.

    Raises:
        DataError: it makes nothing of them.
    """
    # It is asked first, and samples are looked at only where it has failed: it is called for each micro-batch.
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError, KeyError, AttributeError) as error:
        problem = _problem(samples)
        if problem is None:
            raise
        raise DataError(f"data: {problem}") from error


def collate_without_lists(samples: list[Any]) -> Any:
    """Return the same of samples that nobody has made tensors of, such as those of Hugging Face's datasets.

    Raises:
        DataError: it makes nothing of them, or of lists of numbers what nobody means.
    """
    # What it makes of lists of numbers is one tensor for each place of them, over all samples: no model takes that.
    if (found := _numbers_in(samples[0])) is not None:
        raise DataError(
            f"data: {found} a list of numbers, of which default_collate makes no tensor with a row for each sample. "
            f"Let the dataset yield tensors (of Hugging Face: dataset.set_format('torch')), or pass a collate_fn."
        )
    return plain_collate(samples)


def collate_of(collate: Any, data: object) -> Any:
    """Return what collates samples of some data: a user's own function, or one that says what is wrong with them."""
    # Whoever wrote a function knows best what is wrong with samples, and what he wants of lists.
    if collate is not default_collate:
        return Counted(collate)
    return collate_without_lists if type(data) is list or foreign.is_hf(data) else plain_collate


class Counted:
    """A user's collate_fn, whose rows are counted against the samples that went in."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate
        self._looks = 8  # how often it is called once more where rows are others than samples

    def __call__(self, samples: list[Any]) -> Any:
        """Return what it makes of samples.

        Raises:
            DataError: samples are lost by the place that they have, as where it returns the first one alone.
        """
        given = list(samples)
        batch = self._collate(samples)
        # One that leaves out what is None says what it wants. What makes several rows of a sample, or one of many,
        # loses none as long as each sample changes what comes out.
        if self._looks and len(given) > 1 and set(_rows(batch)) != {sum(one is not None for one in given)}:
            self._looks -= 1
            for left_out, moved in ((given[:-1], [given[-1], *given[:-1]]), (given[1:], [*given[1:], given[0]])):
                if self._is_same(left_out, batch) and not self._is_same(moved, batch):
                    raise DataError(
                        f"data: collate_fn loses samples: of {len(given)} it returns the same as of {len(left_out)}. "
                        f"autoaccum gives it all samples of a micro-batch. If each entry of the dataset is a batch, "
                        f"pass DataLoader(dataset, batch_size=None), with a sampler to shuffle; else let collate_fn "
                        f"join all samples that it is given."
                    )
        return batch

    def _is_same(self, samples: list[Any], batch: Any) -> bool:
        try:
            return are_same(self._collate(list(samples)), batch)
        except Exception:  # of fewer it may make no batch, and then it has heeded them
            return False


def _rows(batch: Any) -> list[int]:
    """Return how many rows each part of a batch has; nothing where that cannot be counted."""
    try:
        return list(batches.sizes_of(batch).values())
    except DataError:
        return []


def _numbers_in(sample: Any) -> str | None:
    """Return which part of a sample is a list of numbers."""
    if not isinstance(sample, Mapping):  # a list within a tuple may be boxes that somebody wants apart
        return None
    for name, part in sample.items():
        if isinstance(part, list) and part and all(isinstance(entry, int | float) for entry in part):
            return f"{name!r} of a sample is"
    return None


def _problem(samples: Sequence[Any]) -> str | None:
    """Return what is wrong with samples that could not be collated; None where it is not known."""
    # All of the micro-batch, for one sample in a million may be None.
    parts = [dict(_parts(sample, "")) for sample in samples]
    if nones := [name for part in parts for name, value in part.items() if value is None]:
        which = f"{nones[0]} of a sample" if nones[0] else "a sample"
        return f"{which} is None. Let the dataset leave it out, or put a number in its place, or pass a collate_fn."
    forms = list(dict.fromkeys(map(_form, samples)))
    if len(forms) > 1:
        return (
            f"samples differ in what they hold: one is {forms[0]}, another {forms[1]}. Let the dataset yield the same "
            f"of each, or pass a collate_fn."
        )
    if any(set(part) != set(parts[0]) for part in parts):
        return f"samples differ in what they hold. {_LENGTHS}"
    for name, part in parts[0].items():
        which = f"{name} of a sample" if name else "a sample"
        others: list[Any] = [other.get(name) for other in parts]
        if foreign.is_table(part):
            return f"{which} is a {type(part).__name__}. Let the dataset yield part.to_numpy(), or a tensor."
        if isinstance(part, torch.Tensor | np.ndarray):
            shapes = {tuple(np.shape(other)) for other in others}
            if len(shapes) > 1:
                two = " and ".join(map(str, sorted(shapes)[:2]))
                return f"{which} has the shape {two}: samples of other lengths are no batch. {_LENGTHS}"
        elif not isinstance(part, int | float | complex | str | bytes | np.generic):
            kind = type(part)
            return (
                f"{which} is a {kind.__module__}.{kind.__qualname__}. Let the dataset yield a tensor of it (of an "
                f"image: torchvision.transforms.ToTensor()), or pass a collate_fn."
            )
    return None


def _form(sample: Any) -> str:
    """Return in a few words what a sample is, whatever its parts are."""
    if isinstance(sample, Mapping):
        return f"a {type(sample).__name__} of {', '.join(map(repr, sample))}"
    if isinstance(sample, tuple):
        return f"a {type(sample).__name__} of {len(sample)}"
    return f"a {type(sample).__name__}"


def unlike(samples: Sequence[Any]) -> int | None:
    """Return the place of the first sample that holds None, or is unlike most of them; None where none is.

    >>> unlike([(torch.ones(2), 1), (torch.ones(2), None), (torch.ones(2), 0)])
    1
    """
    parts = [_parts(sample, "") for sample in samples]
    if nones := [place for place, part in enumerate(parts) if any(one is None for _, one in part)]:
        return nones[0]
    forms = [tuple((name, type(one), tuple(getattr(one, "shape", ()))) for name, one in part) for part in parts]
    usual, count = Counter(forms).most_common(1)[0]
    others = [place for place, form in enumerate(forms) if form != usual]
    return others[0] if others and 2 * count > len(forms) else None


def _parts(sample: Any, within: str) -> list[tuple[str, Any]]:
    """Return the parts of a sample by where they are."""
    if isinstance(sample, Mapping):
        return [found for name, part in sample.items() for found in _parts(part, f"{within}[{name!r}]")]
    if isinstance(sample, tuple | list):
        return [found for index, part in enumerate(sample) for found in _parts(part, f"{within}[{index}]")]
    return [(within, sample)]
