"""What machine this is, in words, for the fingerprint of a cost curve."""

from __future__ import annotations

import platform
from pathlib import Path

__all__ = ["machine_name"]


def machine_name(*, device: str = "cpu") -> str:
    """Return the processor's model and how many of them this machine has; the device's name where it is not `cpu`.

    Virtual machines often hide the model behind a family's name, so its numbers are told as well.
    """
    if device != "cpu":
        return device
    told = {"model name": platform.processor() or platform.machine()}
    count = 0
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            told[name.strip().lower()] = value.strip()
            count += name.strip() == "processor"
    except OSError:
        pass
    numbers = "/".join(told[name] for name in ("cpu family", "model", "stepping") if name in told)
    return told["model name"] + (f" ({numbers})" if numbers else "") + (f" x{count}" if count else "")
