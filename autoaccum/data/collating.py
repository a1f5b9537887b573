"""Says why samples cannot be made into a batch where nobody has passed a collate_fn, and which one to pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import default_collate

from autoaccum.data import batches, foreign
from autoaccum.errors import DataError
from autoaccum.memory.oom import is_out_of_memory

_CURE = (
    "Let the dataset yield tensors or numbers, of one shape and by the same names in each sample, and leave out what "
    "is None (of an image: torchvision.transforms.ToTensor()). Or pass a collate_fn. It pads samples that are tensors "
    "by collate_fn=lambda samples: torch.nn.utils.rnn.pad_sequence(samples, batch_first=True), and pairs of a tensor "
    "and a number by lambda samples: (torch.nn.utils.rnn.pad_sequence([one for one, _ in samples], batch_first=True), "
    "torch.tensor([number for _, number in samples])); of a tokenizer, it is "
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
        if is_out_of_memory(error):
            raise
        raise DataError(
            f"data: default_collate makes no batch of {len(samples)} samples ({error!r}). {_CURE}"
        ) from error


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
            return batches.are_same(self._collate(list(samples)), batch)
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
