"""One build at a time in a folder, and nothing left lying about by one that was killed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dspark.errors import CapacityError, ConfigError

__all__ = ["locked_folder", "remove_abandoned"]

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def locked_folder(folder: Path, *, shown: Path | None = None) -> Iterator[None]:
    """Hold a folder, made where it is missing, until the block ends or the process does, however it ends.

    A folder that was made here and is still empty when the block fails is removed again.

    Arguments:
        shown: the folder as the user named it in --out, None = this one.

    Raises:
        ConfigError: another process holds it, or it cannot be written.
        CapacityError: the disk is full.
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"--out: {str(shown or folder)!r} cannot be used: {error}") from error
    try:
        _take(handle, shown or folder)
        yield
    except BaseException as error:
        if made:
            with suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError) and error.errno in _FULL:
            raise CapacityError(
                f"disk full while building in {shown or folder}; free space and run the same command again"
            ) from error
        raise
    finally:
        os.close(handle)


def _take(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"--out: another build is at work in {str(folder)!r}; wait for it, or name another folder"
        ) from error
    except OSError:  # a file system without locks
        return


def remove_abandoned(folder: Path, *patterns: str) -> None:
    """Remove what matches in a folder, but not what a living process holds (`locked_folder`)."""
    for path in (found for pattern in patterns for found in folder.glob(pattern)):
        if not path.is_dir():
            path.unlink(missing_ok=True)
            continue
        with suppress(ConfigError, OSError), locked_folder(path):
            shutil.rmtree(path)
