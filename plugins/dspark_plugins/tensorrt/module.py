"""Chooses TensorRT's Python module: `tensorrt` where it is installed (data-centre GPUs), else `tensorrt_rtx`.

The wheel of `tensorrt_rtx` ships `libtensorrt_rtx.so.1` alone, but its ONNX parser opens `libtensorrt_rtx.so` when it
meets a plugin, and ends the process when that fails. So its libraries are loaded from a folder of ours (beside this
file, else in the user's cache, else a temporary one) in which links give them both names; the folder of the wheel stays
as it is. Whoever imports the module before us has loaded them under one name alone, which is refused.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["INSTALL", "TensorRTMissingError", "load_tensorrt", "tensorrt_name"]

_BESIDE: Path | None = Path(__file__).parent / "_links"

INSTALL = (
    "pip install tensorrt-rtx cuda-bindings (builds without a GPU), or NVIDIA's tensorrt on a data-centre GPU"
)


class TensorRTMissingError(ImportError):
    """Neither module is installed."""


def tensorrt_name() -> str | None:
    """Return the name of the module that `load_tensorrt` would take, None = there is none."""
    return next((name for name in ("tensorrt", "tensorrt_rtx") if _installed(name)), None)


def _installed(name: str) -> bool:
    """Return whether there is such a package; a mere folder of that name on the path is none."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


@cache
def load_tensorrt() -> Any:
    """Import TensorRT.

    Raises:
        TensorRTMissingError: there is none; says how to install it.
    """
    name = tensorrt_name()
    if name is None:
        raise TensorRTMissingError(f"TensorRT is not installed: {INSTALL}")
    if name == "tensorrt_rtx":
        if name in sys.modules:
            raise TensorRTMissingError(
                "tensorrt_rtx was imported before dspark_plugins.tensorrt, and its parser would end this process "
                "at the first plugin: import it through dspark_plugins.tensorrt.module.load_tensorrt"
            )
        _load_libraries()
    return importlib.import_module(name)


def _load_libraries() -> None:
    """Load the wheel's libraries by links of ours; without the wheel of libraries there is nothing to mend."""
    spec = find_spec("tensorrt_rtx_libs")
    if spec is None or not spec.submodule_search_locations:
        return
    shipped = Path(spec.submodule_search_locations[0])
    libraries = sorted(shipped.glob("lib*.so.*"))
    try:
        folder = _links_folder(shipped)
        _link_all(folder, libraries)
    except (OSError, RuntimeError):  # a home that cannot be written, or none, as in many containers
        folder = Path(tempfile.mkdtemp(prefix="dspark-tensorrt-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _link_all(folder, libraries)
    for library in libraries:
        # Under this path the loader takes our folder for the library's own, and looks for the other name there.
        ctypes.CDLL(str(folder / library.name))


def _links_folder(shipped: Path) -> Path:
    if _BESIDE is not None and os.access(_BESIDE if _BESIDE.exists() else _BESIDE.parent, os.W_OK):
        _BESIDE.mkdir(exist_ok=True)
        (_BESIDE / ".gitignore").write_text("*\n", encoding="utf-8")
        return _BESIDE
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache_home / "dspark" / "tensorrt" / str(shipped).strip("/").replace("/", "-")


def _link_all(folder: Path, libraries: Sequence[Path]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for library in libraries:
        for name in (library.name, library.name.partition(".so")[0] + ".so"):
            _link(folder / name, library)


def _link(path: Path, target: Path) -> None:
    """Make a link unless it is there; another process may do the same at the same time."""
    if path.is_symlink() and path.resolve() == target.resolve():
        return
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)  # of a process that was killed here and had this number
    fresh.symlink_to(target)
    fresh.replace(path)
