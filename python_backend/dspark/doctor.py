"""`dspark doctor`: what is installed here, what will run, and what is missing for the rest."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil

__all__ = ["run_doctor"]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _native() -> str:
    from dspark_plugins.native import native_available, native_unavailable_reason

    return "runs here" if native_available() else f"cannot run here: {native_unavailable_reason()}"


def _cuda() -> str:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no CUDA device"


def run_doctor(_args: argparse.Namespace) -> int:
    """Print one line per fact; always returns 0."""
    from dspark.executors.dtype import auto_dtype
    from dspark.serving.tritonserver import find_tritonserver

    try:
        server = str(find_tritonserver().binary)
    except Exception as error:
        server = f"not found: {error}"
    rows = [
        ("machine", f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"),
        ("C++ compiler", shutil.which("c++") or shutil.which("g++") or "none (the torch executor serves)"),
        ("native executor", _native()),
        ("default dtype", auto_dtype()),
        ("CUDA", _cuda()),
        ("tritonserver", server),
        *(
            (name, _version(name))
            for name in ("numpy", "torch", "tokenizers", "gguf", "tritonclient", "tensorrt")
        ),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0
