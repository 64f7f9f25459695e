"""Compiles the native pass with the machine's own C++ compiler: `python -m dspark_plugins.native.build`.

The library's name carries a hash of sources, flags and compiler, so a change rebuilds and an old file never
loads. It lands beside the sources, or in the user's cache folder where those are read-only. A wheel carries one that
its builder compiled; where it is of these sources nothing is compiled and no compiler is needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "BuildError",
    "Variant",
    "build_library",
    "build_wheel_library",
    "compile_units",
    "find_compiler",
    "library_path",
    "units",
]

SOURCES = Path(__file__).parent
_COMMON = (
    *("-std=c++17", "-O3", "-g1", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"),
    *(
        "-Wall",
        "-Wextra",
        "-Wno-psabi",
        "-Wno-ignored-attributes",
        "-Wno-uninitialized",
        "-Wno-maybe-uninitialized",
    ),
)
_AVX512 = (
    *(
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mavx512vnni",
        "-mavx512bf16",
        "-mavx2",
        "-mfma",
    ),
    "-mprefer-vector-width=512",
)


class BuildError(Exception):
    """The library cannot be built here; the message says why."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One translation unit: a source file and the flags that only it gets."""

    source: str
    name: str
    flags: tuple[str, ...] = ()


def units() -> tuple[Variant, ...]:
    """Return what is compiled: the kernels once per instruction set, everything else for the baseline."""
    kernels = (
        Variant("kernels.cpp", "kernels_avx512", ("-DDSPARK_ISA_AVX512", *_AVX512)),
        Variant("kernels.cpp", "kernels_avxvnni", ("-DDSPARK_ISA_AVXVNNI", "-mavx2", "-mfma")),
        Variant("kernels.cpp", "kernels_avx2", ("-DDSPARK_ISA_AVX2", "-mavx2", "-mfma")),
        Variant("kernels.cpp", "kernels_portable"),
    )
    plain = sorted(path.name for path in SOURCES.glob("*.cpp") if path.name != "kernels.cpp")
    return kernels + tuple(Variant(name, name.removesuffix(".cpp")) for name in plain)


def find_compiler() -> str:
    """Return the C++ compiler: $CXX, else g++, c++ or clang++ from PATH.

    Raises:
        BuildError: none is there, or this is no x86-64 Linux.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise BuildError(f"native code is for x86_64 Linux, this is {platform.machine()} {sys.platform}")
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "c++", "clang++"):
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"no C++ compiler: looked for {wanted or 'g++, c++, clang++'} on PATH (or set CXX)")


def _digest_of_sources() -> hashlib._Hash:
    digest = hashlib.sha256()
    for path in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.hpp"), *SOURCES.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(repr((_COMMON, units())).encode())
    return digest


def wheel_library_path() -> Path:
    """Return where a wheel puts its library; the name says of which sources it is."""
    return SOURCES / "_wheel" / f"libdspark_native-{_digest_of_sources().hexdigest()[:16]}.so"


def build_wheel_library(folder: Path) -> Path:
    """Compile the library that a wheel carries into `folder`; it chooses its instruction set when it runs.

    Raises:
        BuildError: no compiler, or it failed.
    """
    path = folder / wheel_library_path().name
    folder.mkdir(parents=True, exist_ok=True)
    _build(find_compiler(), path)
    return path


def library_path(compiler: str) -> Path:
    """Return where the library of these sources, flags and compiler lives, whether or not it is there yet."""
    digest = _digest_of_sources()
    digest.update(_version(compiler).encode())
    name = f"libdspark_native-{digest.hexdigest()[:16]}.so"
    beside = SOURCES / "_build"
    if (beside / name).is_file() or os.access(beside if beside.exists() else SOURCES, os.W_OK):
        return beside / name
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "dspark" / "native" / name


def build_library() -> Path:
    """Return the wheel's library, or one compiled here if it is not there yet (some seconds, once per change).

    Raises:
        BuildError: no compiler, or it failed; carries its output.
    """
    shipped = wheel_library_path()
    if shipped.is_file():
        return shipped
    compiler = find_compiler()
    path = library_path(compiler)
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / "lock"):
            if not path.is_file():
                _build(compiler, path)
    except OSError as error:
        raise BuildError(f"cannot write {path}: {error}") from error
    return path


def compile_units(
    compiler: str, variants: Sequence[Variant], folder: Path, *, extra: Sequence[str] = ()
) -> list[Path]:
    """Compile every unit into `folder`, all at once, and return the object files.

    Raises:
        BuildError: one of them failed; carries the compiler's output.
    """
    running = []
    for variant in variants:
        target = folder / f"{variant.name}.o"
        command = [
            compiler,
            *_COMMON,
            *variant.flags,
            *extra,
            "-c",
            str(SOURCES / variant.source),
            "-o",
            str(target),
        ]
        running.append(
            (
                target,
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    encoding="utf-8",  # a compiler's quotes; a served model's own encoding may be ASCII
                    errors="replace",
                ),
            )
        )
    failures = []
    for target, process in running:
        output, _ = process.communicate()
        if process.returncode:
            failures.append(f"{target.stem}: {output[-2000:]}")
    if failures:
        raise BuildError("the compiler failed: " + "\n".join(failures))
    return [target for target, _ in running]


def _build(compiler: str, path: Path) -> None:
    ignore = path.parent / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n", encoding="utf-8")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = compile_units(compiler, units(), Path(folder), extra=("-fno-rtti",))
        fresh = Path(folder) / path.name
        command = [compiler, "-shared", "-pthread", *map(str, objects), "-o", str(fresh)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"the linker failed: {done.stderr[-2000:]}")
        os.replace(fresh, path)
    for old in path.parent.glob("libdspark_native-*.so"):
        if old != path:
            with contextlib.suppress(OSError):
                old.unlink()


def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        print(build_library())
    except BuildError as failure:
        print(f"native code not built, the torch executor serves instead: {failure}", file=sys.stderr)
