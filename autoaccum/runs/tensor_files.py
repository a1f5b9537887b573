"""Tensors in safetensors files, which any reader of the format understands, written to the disk or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

Tensors = dict[str, torch.Tensor]
"""Tensors of one file, by their names in it."""
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in the safetensors format."""
_CHUNK_BYTES = 1 << 22
"""Digest and write so many bytes at a time."""


def write(path: Path, tensors: Tensors, told: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Write a new safetensors file, to the disk; return its number of bytes and their SHA-256.

    ``told`` is what else its header says.

    ``safetensors.torch.save_file`` does not do: it wants all tensors on the host and contiguous at once, and hides the
    number of an OSError. One tensor at a time is in memory here.

    Raises:
        OSError: it cannot be written.
    """
    # Aligned, as long as wider elements come first and the header's length is a multiple of 8.
    # The name decides among equals, so that the same state makes the same bytes.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    head = json.dumps({"__metadata__": {"format": "pt", **(told or {})}, **header}).encode()
    head += b" " * (-len(head) % 8)
    return write_durably(path, _parts(head, [tensor for _, tensor in ordered]))


def write_durably(path: Path, parts: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a new file, to the disk; return its number of bytes and their SHA-256.

    Raises:
        OSError: it cannot be written.
    """
    digest, size = hashlib.sha256(), 0
    # "x" follows no link and writes over nothing.
    with open(path, "xb") as file:
        for part in parts:
            digest.update(part)
            size += file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def read(path: Path) -> Tensors:
    """Return the tensors of a safetensors file, mapped into memory.

    Raises:
        OSError: it cannot be read.
        SafetensorError: it is not such a file.
        MemoryError: there is no memory for it.
    """
    with safe_open(path, framework="pt") as file:
        try:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except ValueError as error:
            # torch.asarray takes the mapped storage, or else anything that has a shape: where memory runs out in the
            # first, it is the second that fails.
            if "UntypedStorage" not in str(error):
                raise
            raise MemoryError(f"no memory to read {path.name}") from error


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, its elements one after the other, with nothing left to be conjugated or negated."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A single element may count as contiguous with any stride, which a view as bytes would refuse.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _parts(head: bytes, tensors: list[torch.Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the file piece by piece: the header with its length before it, and each tensor in chunks."""
    yield len(head).to_bytes(8, "little") + head
    for tensor in tensors:
        data = memoryview(as_bytes(tensor.cpu()).numpy())  # type: ignore[arg-type]
        for begin in range(0, len(data), _CHUNK_BYTES):
            yield data[begin : begin + _CHUNK_BYTES]
