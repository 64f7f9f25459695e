"""Runs Triton's perf_analyzer and reads its export. Knows nothing of what is measured (`load`).

The wheel of tritonclient carries the program; two libraries that it misses lie in the wheel of the server
and are linked into a folder of our own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["LoadFailedError", "PerfAnalyzer", "Trace"]

_LIBRARIES: Final = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
_ATTEMPTS: Final = 2  # it falls now and then (2.51), and leaves an empty export behind


class LoadFailedError(Exception):
    """One load could not be measured; its reason is for the report."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One request: when it was sent, when each response came [n] seconds, tokens of each response [n]."""

    sent_s: float
    response_s: tuple[float, ...]
    num_tokens: tuple[int, ...]


class PerfAnalyzer:
    """The program, ready to run.

    Raises:
        LoadFailedError: it is not there; says what to install.
    """

    def __init__(self) -> None:
        beside = Path(sys.executable).with_name("perf_analyzer")
        found = shutil.which("perf_analyzer") or (str(beside) if beside.is_file() else None)
        if found is None:
            raise LoadFailedError(
                "perf_analyzer was found neither on PATH nor beside this Python; "
                "pip install 'tritonclient[grpc]==2.51.0' brings it"
            )
        self._program = found

    def run(
        self,
        url: str,
        model: str,
        inputs: Sequence[Mapping[str, object]],
        load: Sequence[str],
        *,
        timeout_s: float,
    ) -> list[Trace]:
        """Send a load over gRPC streams and return what came back.

        Arguments:
            inputs: fields of each prompt, used in turn.
            load: the options that shape the load.

        Raises:
            LoadFailedError: the program failed; with its own words.
        """
        for attempt in range(_ATTEMPTS):
            done, export = self._once(url, model, inputs, load, timeout_s=timeout_s)
            traces = _traces(export)
            if done.returncode == 0 and traces:
                return traces
            if done.returncode > 0 or attempt + 1 == _ATTEMPTS:
                break  # it says why; otherwise it fell by itself, which is no fault of the load's
        raise LoadFailedError(_reason(done.stdout + done.stderr, done.returncode))

    def _once(
        self,
        url: str,
        model: str,
        inputs: Sequence[Mapping[str, object]],
        load: Sequence[str],
        *,
        timeout_s: float,
    ) -> tuple[subprocess.CompletedProcess[str], Mapping[str, Any]]:
        """Run the program once; return how it ended, and its export (empty where there is none)."""
        with tempfile.TemporaryDirectory(prefix="dspark-load-") as name:
            folder = Path(name)
            data, export = folder / "inputs.json", folder / "export.json"
            data.write_text(json.dumps({"data": [_entry(fields) for fields in inputs]}))
            command = [
                self._program, "-m", model, "-u", url, "-i", "grpc", "--async", "--streaming",
                "--input-data", str(data), "--profile-export-file", str(export), *load,
            ]  # fmt: skip
            try:
                done = subprocess.run(
                    command,
                    env=_environment(folder),
                    capture_output=True,
                    text=True,
                    timeout=timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise LoadFailedError(f"perf_analyzer was not done after {timeout_s:g} s") from None
            try:
                return done, json.loads(export.read_text())
            except (OSError, ValueError):
                return done, {}


def _entry(fields: Mapping[str, object]) -> dict[str, list[object]]:
    return {name: value if isinstance(value, list) else [value] for name, value in fields.items()}


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment in which the program finds its libraries."""
    environment = dict(os.environ)
    spec = importlib.util.find_spec("pytriton")
    for origin in (spec.submodule_search_locations or ()) if spec is not None else ():
        libraries = Path(origin).parent / "nvidia_pytriton.libs"
        links = folder / "lib"
        links.mkdir(exist_ok=True)
        for name, pattern in _LIBRARIES.items():
            for library in sorted(libraries.glob(pattern))[:1]:
                (links / name).symlink_to(library)
        known = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = f"{links}{os.pathsep}{known}" if known else str(links)
    return environment


def _traces(export: Mapping[str, Any]) -> list[Trace]:
    traces = []
    for experiment in export.get("experiments", ()):
        for request in experiment["requests"]:
            counts = [int(output.get("num_output_tokens", 0)) for output in request["response_outputs"]]
            pairs = [
                (at / 1e9, count)
                for at, count in zip(request["response_timestamps"], counts, strict=True)
                if 0 < count < 1 << 20  # a final response without outputs is exported as noise
            ]
            if pairs:
                times, tokens = zip(*pairs, strict=True)
                traces.append(Trace(request["timestamp"] / 1e9, times, tokens))
    return traces


def _reason(output: str, status: int) -> str:
    """Return what the program says of its failure: the server's own error where there is one."""
    match = re.search(r"\[[A-Z_]+\] [^\n]*", output)
    if match is not None:
        return match[0].strip()
    lines = [
        line.strip() for line in output.splitlines() if re.match(r"\s*(error|failed)\b", line, re.IGNORECASE)
    ]
    return lines[0] if lines else f"perf_analyzer ended with status {status}"
