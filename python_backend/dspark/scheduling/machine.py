"""What machine this is, in words, for the fingerprint of a cost curve."""

from __future__ import annotations

import platform
from pathlib import Path

__all__ = ["machine_name"]


def machine_name(*, device: str = "cpu") -> str:
    """Return the processor's model and how many of them this machine has; the device's name where it is not `cpu`."""
    if device != "cpu":
        return device
    model, count = platform.processor() or platform.machine(), 0
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model name"):
                model = value.strip()
            count += name.strip() == "processor"
    except OSError:
        pass
    return f"{model} x{count}" if count else model
