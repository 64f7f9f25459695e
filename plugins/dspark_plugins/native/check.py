"""Runs the native code under sanitizers: `python -m dspark_plugins.native.check [NAME ...]`.

Names are `address` (with leaks and undefined behaviour) and `thread`; both when none is given. Some 20 seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from dspark_plugins.native.build import SOURCES, BuildError, compile_units, find_compiler, units

__all__ = ["check"]

_DRIVER = SOURCES.parents[2] / "tests" / "native" / "driver.cpp"
_KINDS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}


def check(name: str) -> int:
    """Build and run the driver under one sanitizer; return its exit status.

    Raises:
        BuildError: an unknown name, no driver, or a compiler that fails.
    """
    if name not in _KINDS:
        raise BuildError(f"sanitizer is {name!r}, allowed are {', '.join(_KINDS)}")
    if not _DRIVER.is_file():
        raise BuildError(f"no {_DRIVER}: this runs from a clone of the repository")
    compiler, flags = find_compiler(), ("-O1", *_KINDS[name])
    with tempfile.TemporaryDirectory() as folder:
        objects = compile_units(compiler, units(), Path(folder), extra=flags)
        program = Path(folder) / "driver"
        command = [compiler, "-std=c++17", *flags, f"-I{SOURCES}", str(_DRIVER), *map(str, objects)]
        done = subprocess.run(
            [*command, "-pthread", "-o", str(program)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise BuildError(f"the compiler failed on {_DRIVER.name}: {done.stderr[-2000:]}")
        options = {"ASAN_OPTIONS": "detect_leaks=1", "TSAN_OPTIONS": "halt_on_error=1"}
        return subprocess.run([program], env=os.environ | options, check=False).returncode


def main(names: list[str]) -> int:
    status = 0
    for name in names or list(_KINDS):
        print(f"{name}: ", end="", flush=True)
        result = check(name)
        if result:
            print(f"{name}: exit status {result}", file=sys.stderr)
        status = status or result
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BuildError as failure:
        sys.exit(f"native check: {failure}")
