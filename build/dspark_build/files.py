"""Writing artefacts so that a reader never meets half a file and a full disk costs nothing already
written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from dspark.errors import CapacityError

__all__ = ["write_atomically", "write_text"]


def write_atomically(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write a file beside `path` and rename it over; on failure nothing is left and the old file stays.

    Raises:
        CapacityError: the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.part")
    try:
        with fresh.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException as error:
        fresh.unlink(missing_ok=True)
        if _is_full(error):
            raise CapacityError(
                f"disk full while writing {path}; what was finished before is kept: "
                "free space and run the same "
                "command again"
            ) from error
        raise


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    write_atomically(path, lambda file: _write_bytes(file, text.encode("utf-8")))


def _write_bytes(file: BinaryIO, data: bytes) -> None:
    file.write(data)


def _is_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    # torch.save reports a failed write as a RuntimeError whose cause it hides.
    return isinstance(error, RuntimeError) and "file write failed" in str(error)
