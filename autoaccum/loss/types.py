"""Says which part of a batch a model or a loss could not take, where PyTorch says no more than that types differ."""

from __future__ import annotations

import re
from traceback import walk_tb
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoaccum.errors import DataError
from autoaccum.memory.oom import is_raised_by_hand

_IS_OF_DTYPES = re.compile(
    r"same dtype|scalar type|expected target dtype|types? .*should be the same|Found dtype|not implemented for '",
    re.IGNORECASE,
)
"""What PyTorch says of tensors of types that do not go together."""
_IS_OF_NO_TENSOR = re.compile(r"must be Tensor, not (\w|\.)+|object has no attribute|positional argument|unhashable")
_IS_OF_A_LIST = re.compile("not (list|tuple)")
_IS_OF_NOTHING = re.compile(
    r"non-zero|zero-size|of 0 elements|size 0|than 0|\[(\d+, )*0[,\]]|\(\d+x0 and|and \d+x0\)|channel: \(0"
)
"""What it says of tensors without elements."""
_RAISED = (RuntimeError, IndexError, ValueError)
_IS_OF_COLUMNS = re.compile(r"multi-target not supported|target with class probabilities, got (Long|Int)")
_IS_OF_NUMBERS = re.compile(
    r"can't be cast to the desired output type|bool tensors? is not supported|two bool tensors|Integral inputs not|"
    r"Found dtype (Long|Int|Short|Char|Byte|Bool) but expected"
)
"""What a loss that computes with its targets says of those that are whole numbers, or true and false."""
_OF_LABELS = re.compile(r"target|Long|nll_loss", re.IGNORECASE)


def mistaken(error: Exception, model: Any, batch: Any) -> DataError | None:
    """Return the error that names the part of a batch that cannot be computed with; None where it is none of its types.

    Args:
        error: what computing the loss has raised.
        model: the module, or what is called in its place.
        batch: the micro-batch.
    """
    # By its words alone: PyTorch raises the same two classes for nearly everything, memory that ran out among them.
    text = str(error)
    leaves = {pytree.keystr(path): leaf for path, leaf in _leaves(batch)}
    if "expected np.ndarray (got Tensor)" in text:
        return DataError(
            "data: the arrays of a batch are tensors by now, as default_collate makes them: leave torch.from_numpy() "
            "out, or write torch.as_tensor()."
        )
    if isinstance(error, TypeError | AttributeError) and _IS_OF_NO_TENSOR.search(text):
        return _of_no_tensor(leaves, text)
    if not isinstance(error, _RAISED):
        return None
    tensors = {where: leaf for where, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    # An entry may be empty by right, a frame without boxes: only what PyTorch says of nothing is laid to it.
    is_of_nothing = _IS_OF_NOTHING.search(text) and type(error) in _RAISED and not is_raised_by_hand(error)
    for where, leaf in tensors.items() if is_of_nothing else ():
        if not leaf.is_nested and 0 in leaf.shape[1:]:
            return DataError(
                f"data: the tensor {where or 'itself'} of a batch is empty, of shape {tuple(leaf.shape)}, and the "
                f"model, or the loss, cannot take it ({text}). Leave samples of length 0 out, or fill them with "
                f"something."
            )
    if _IS_OF_COLUMNS.search(text):
        return _of_columns(tensors, text)
    if _IS_OF_NUMBERS.search(text) and (found := _of_numbers(tensors, model, error)) is not None:
        return found
    if not isinstance(error, RuntimeError) or not _IS_OF_DTYPES.search(text):
        return None
    # Which tensor was at fault the words do not say, but whose type is neither the model's nor that of labels is found.
    if _OF_LABELS.search(text):
        return _of_labels(tensors, text)
    held = _dtypes_of(model)
    for where, leaf in tensors.items():
        # Labels are int64 in any case, and so are the numbers of tokens; and a mask may be where the words name none.
        is_mask = leaf.dtype is torch.bool and "bool" not in text.lower()
        if held and leaf.dtype not in {*held, torch.int64} and not is_mask:
            wanted = next(iter(held))
            # A run multiplies in 16 bits, and keeps weights of 32, which updates are too small for in 16.
            precision = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(wanted)
            other = f"; or leave the model in float32, and pass precision='{precision}'" if precision else ""
            return _wrong(where, leaf.dtype, f"while the model is of {_name(wanted)}", wanted, text, other)
    return None


def _of_columns(tensors: dict[str, torch.Tensor], text: str) -> DataError | None:
    """Return the error for numbers of classes that lie in columns, or are rows of zeros and a one."""
    for where, leaf in reversed(tensors.items()):  # labels come last
        if leaf.ndim != 2 or leaf.is_floating_point() or leaf.is_complex():
            continue
        cure = "Take the column out: targets.squeeze(1)" if leaf.shape[1] == 1 else "Pass targets.argmax(1)"
        if leaf.shape[1] > 1 and "probabilities" in text:
            cure = f"{cure}, or targets.float() as probabilities"
        return DataError(
            f"data: {where or 'the batch'} has the shape (samples, {leaf.shape[1]}) of whole numbers, while those of "
            f"classes are one for each sample ({text}). {cure}."
        )
    return None


def _of_numbers(tensors: dict[str, torch.Tensor], model: Any, error: Exception) -> DataError | None:
    """Return the error for targets that a loss of PyTorch's cannot compute with as it does with outputs."""
    where, targets = list(tensors.items())[-1] if tensors else ("", None)
    # A model, or a loss of the user's own, says the same of tensors that it has made itself.
    *_, (frame, _) = walk_tb(error.__traceback__)
    is_of_loss = frame.f_code.co_filename == torch.nn.functional.__file__
    # Targets that a training_step has made itself are none of the batch's.
    if targets is None or not is_of_loss or not any(_is_same(value, targets) for value in frame.f_locals.values()):
        return None
    if targets.is_floating_point() or targets.is_complex():
        return None
    wanted = next(iter(_dtypes_of(model)), torch.float32)
    return _wrong(where, targets.dtype, f"while the loss computes with {_name(wanted)}", wanted, str(error))


def _is_same(value: object, tensor: torch.Tensor) -> bool:
    """Return whether a value is a tensor, or a view of all of it."""
    return isinstance(value, torch.Tensor) and value.dtype is tensor.dtype and value.data_ptr() == tensor.data_ptr()


def _of_labels(tensors: dict[str, torch.Tensor], text: str) -> DataError | None:
    """Return the error for numbers of classes that are of another type; labels come last in a batch."""
    if "indices" in text:  # of an embedding, which come before labels
        others = [(where, leaf.dtype) for where, leaf in tensors.items() if leaf.dtype is not torch.int64]
        return _wrong(*others[0], "while indices are int64", torch.int64, text) if others else None
    where, labels = list(tensors.items())[-1] if tensors else ("", None)
    if labels is None:
        return None
    # uint8 will do for cross_entropy, and is what images and labels are stored as.
    if labels.dtype in (torch.int64, torch.uint8):
        return DataError(
            f"data: the loss has found other numbers than those of classes ({text}), which {where or 'the batch'} may "
            f"hold. Batches are (inputs, targets), and a loss_fn is called with (outputs, targets): see whether either "
            f"are swapped, or the loss makes others of them."
        )
    swapped = [other for other, leaf in tensors.items() if leaf.dtype is torch.int64]
    if labels.ndim > 1 and swapped:
        return DataError(
            f"data: inputs and targets may be swapped: the last tensor of a batch, {where}, is of "
            f"{_name(labels.dtype)}, and {swapped[0]} of int64, as numbers of classes are ({text}). Batches are "
            f"(inputs, targets). If these are, convert the targets: {_cure(torch.int64)}."
        )
    return _wrong(where, labels.dtype, "while numbers of classes are int64", torch.int64, text)


def _of_no_tensor(leaves: dict[str, Any], text: str) -> DataError | None:
    """Return the error for texts, or lists, that reached a model as they are."""
    for where, leaf in leaves.items():
        # A list is no leaf to PyTorch, so that it is its first entry that is met.
        whole = where.rsplit("[", 1)[0] or "a batch"
        if isinstance(leaf, str):
            return DataError(
                f"data: {whole} holds texts, which have reached the model, or the loss, as they are, and it cannot "
                f"take them ({text}). Tokenize them before training, or pass a collate_fn that makes tensors of them, "
                f"with tokenizer(texts, padding=True, return_tensors='pt')."
            )
        if isinstance(leaf, int | float) and not isinstance(leaf, bool) and _IS_OF_A_LIST.search(text):
            return DataError(
                f"data: {whole} is a list of numbers, and not a tensor ({text}). Make one of it: torch.tensor(numbers)."
            )
    return None


def _leaves(batch: Any) -> list[Any]:
    try:
        return list(pytree.tree_flatten_with_path(batch)[0])
    except ValueError:  # a type that was registered without a function for paths
        return []


def _dtypes_of(model: Any) -> set[torch.dtype]:
    """Return the types that a model's weights are of."""
    # None of what is only called like a module, as in tests of a loss alone.
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return {p.dtype for p in parameters if p.is_floating_point()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _wrong(where: str, dtype: torch.dtype, beside: str, wanted: torch.dtype, text: str, other: str = "") -> DataError:
    """Return the error for a tensor that is to be of another type."""
    return DataError(
        f"data: the tensor {where or 'itself'} of a batch is of {_name(dtype)}, {beside} ({text}). Convert it: "
        f"{_cure(wanted)}{other}."
    )


def _cure(wanted: torch.dtype) -> str:
    """Return how to convert a tensor, or an array."""
    cure = f"tensor.to(torch.{_name(wanted)})"
    # NumPy has no bfloat16.
    return cure if wanted is torch.bfloat16 else f"{cure}, or array.astype(np.{_name(wanted)})"
