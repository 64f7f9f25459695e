"""Runs what only a GPU can prove: `tests/gpu/run.sh`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gpu.results import Results
from gpu.section_process import bounded

__all__ = ["NO_GPU", "arguments", "main"]

NO_GPU = 77
_GRACE = 20.0  # seconds beyond a section's own, for what is under way; then it is ended
_AT_LAST = 30.0  # seconds of a run for the last section's grace, and the summary
_LEAST = 5.0  # seconds; a section with less is left out
_NAMES = ("kernels", "driver", "timings", "executor", "serving", "scheduled", "engine")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options; a bad one ends the process with status 2."""
    parser = argparse.ArgumentParser(
        prog="tests/gpu/run.sh", description="Checks this project on an NVIDIA GPU."
    )
    parser.add_argument(
        "--json", type=Path, default=Path("out/gpu.json"), help="everything (default %(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="at most (default %(default)s)")
    parser.add_argument(
        "--only", default=",".join(_NAMES), help="sections, with commas (default %(default)s)"
    )
    options = parser.parse_args(argv)
    options.only = [word.strip() for word in options.only.split(",") if word.strip()]
    unknown = [word for word in options.only if word not in _NAMES]
    if unknown or not options.only:
        parser.error(f"--only: got {', '.join(unknown) or 'nothing'}, allowed are {', '.join(_NAMES)}")
    if options.minutes <= 0:
        parser.error(f"--minutes: got {options.minutes}, allowed is more than 0")
    return options


def _why_not() -> str | None:
    """Return why nothing can be checked here, None where it can."""
    try:
        import torch
        import triton
    except ImportError as error:
        return f"{error.name} is not installed"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA GPU"
    del triton
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections, each in a process and within a time of its own; print the summary, write the JSON."""
    options = arguments(argv)
    reason = _why_not()
    if reason is not None:
        print(f"no GPU here: {reason}; nothing was checked")
        return NO_GPU
    options.json.parent.mkdir(parents=True, exist_ok=True)  # before the minutes, not after them
    end = time.monotonic() + 60 * options.minutes - _AT_LAST
    results = Results(machine=_machine())
    for name in options.only:
        rest = end - time.monotonic()
        if rest < _LEAST:
            results.left_out.append(f"{name}: no time left")
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        seconds = rest if name == options.only[-1] else rest / 2  # leave something to those behind
        bounded(results, name, seconds=seconds, grace_s=_GRACE, module="gpu.sections")
    results.left_out += [f"{name}: not asked for (--only)" for name in _NAMES if name not in options.only]
    print(results.text())
    options.json.write_text(results.json() + "\n", encoding="utf-8")
    print(f"written to {options.json}")
    return 0 if results.checks + results.timings and not results.failed else 1


def _machine() -> dict[str, str | float]:
    import torch
    import triton

    about = torch.cuda.get_device_properties(0)
    return {
        "GPU": f"{about.name}, {about.multi_processor_count} multiprocessors, {about.total_memory / 1e9:.0f} GB",
        "capability": f"{about.major}.{about.minor}",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "CUDA": str(torch.version.cuda),
    }


if __name__ == "__main__":
    raise SystemExit(main())
