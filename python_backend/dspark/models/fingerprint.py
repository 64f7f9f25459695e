"""A digest over a checkpoint's files, so that artefacts can say which target they were made for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

__all__ = ["fingerprint"]

_WHOLE_BYTES = 256 << 20  # files up to this size are hashed whole
_BLOCK_BYTES = 1 << 20
_NUM_BLOCKS = 64


def fingerprint(files: Sequence[Path]) -> str:
    """Return a hex digest over sizes and contents of `files`, in the order given; names and times do not
    matter.

    A file of more than 256 MiB is hashed by its size and 64 blocks of 1 MiB spread evenly from its first byte
    (where the headers are) to its last, so that checkpoints of many GB take a fraction of a second. A change
    that misses all of these blocks goes unnoticed.
    """
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{size};".encode())
        with path.open("rb") as file:
            if size <= _WHOLE_BYTES:
                while chunk := file.read(_BLOCK_BYTES):
                    digest.update(chunk)
                continue
            for i in range(_NUM_BLOCKS):
                file.seek(i * (size - _BLOCK_BYTES) // (_NUM_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
