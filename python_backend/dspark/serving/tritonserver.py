"""Finds `tritonserver` and says how to start it: on PATH (NVIDIA's containers), else in the PyPI wheel.

The wheel of nvidia-pytriton carries the server and its Python backend, but not where the server looks for
them: a folder of symlinks under the clone's state folder puts that right.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from dspark.errors import ConfigError
from dspark.serving.paths import state_dir

__all__ = ["TritonInstall", "find_tritonserver"]

WHEEL = "nvidia-pytriton==0.7.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonInstall:
    """A server that can be started. `backend_dir` None = the server's own."""

    binary: Path
    backend_dir: Path | None

    def environment(self) -> dict[str, str]:
        """Return the environment that makes the model's process run in this Python and its packages."""
        environment = {
            "OPENBLAS_NUM_THREADS": "1",
            **os.environ,
        }  # why: dspark/__init__.py; numpy comes first there
        if sys.prefix != sys.base_prefix:  # a virtual environment: the first python on PATH decides
            environment["PATH"] = os.pathsep.join([str(Path(sys.prefix, "bin")), environment.get("PATH", "")])
        library_dir = sysconfig.get_config_var("LIBDIR")
        if (
            self.backend_dir is not None and library_dir
        ):  # else the stub mixes this Python with another libpython
            known = environment.get("LD_LIBRARY_PATH")
            environment["LD_LIBRARY_PATH"] = (
                f"{library_dir}{os.pathsep}{known}" if known else str(library_dir)
            )
        return environment


def find_tritonserver() -> TritonInstall:
    """Return the server on PATH, else the one in the wheel.

    Raises:
        ConfigError: saying what to install.
    """
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return TritonInstall(binary=Path(on_path), backend_dir=None)
    root = _wheel_root()
    if root is None:
        raise ConfigError(
            "tritonserver: found neither on PATH nor in this Python's packages; run `make setup` (or "
            f"`{sys.executable} -m pip install --no-deps {WHEEL}`), or use an NVIDIA Triton container"
        )
    return TritonInstall(binary=root / "bin" / "tritonserver", backend_dir=_link_backend(root))


def _wheel_root() -> Path | None:
    """Return the wheel's server folder, without importing the wheel."""
    spec = importlib.util.find_spec("pytriton")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        root = Path(folder) / "tritonserver"
        if (root / "bin" / "tritonserver").is_file():
            return root
    return None


def _link_backend(root: Path) -> Path:
    """Link the Python backend's three files into one folder; return the backend directory above it.

    Raises:
        ConfigError: where the wheel has no stub for this Python.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        known = sorted(folder.name for folder in (root / "python_backend_stubs").iterdir())
        raise ConfigError(
            f"python: got {version}, which this tritonserver has no stub for; allowed is {', '.join(known)}"
        )
    backend_dir = state_dir() / "backends"
    folder = backend_dir / "python"
    folder.mkdir(parents=True, exist_ok=True)
    python = root / "backends" / "python"
    for source in (python / "libtriton_python.so", python / "triton_python_backend_utils.py", stub):
        _link(source, folder / source.name)
    return backend_dir


def _link(source: Path, link: Path) -> None:
    """Make `link` point at `source`, in one step, so that two launchers may do it at once."""
    if link.is_symlink() and os.readlink(link) == str(source):
        return
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(source)
    os.replace(fresh, link)
