"""Calibrations on disk: the offline fit (`calibration.json`), and what was learnt while serving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dspark.calibration.online import OnlineCalibrator
from dspark.errors import ConfigError

__all__ = ["OFFLINE_FORMAT_VERSION", "load_calibrator", "save_calibrator"]

OFFLINE_FORMAT_VERSION = 1


def load_calibrator(
    offline: Path | None, learnt: Path | None = None, *, block_size: int, drafter_hash: str, target_hash: str
) -> OnlineCalibrator:
    """Return the calibrator to serve with: what was learnt earlier, else the offline fit, else raw logits.

    Arguments:
        offline: the file of `dspark-build calibrate`; None = temperatures of 1.
        learnt: the file of `save_calibrator`; used when it exists.
        block_size: G.
        drafter_hash, target_hash: of the pair that is served; another pair's file is refused.

    Raises:
        ConfigError: a file that cannot be used, naming the field and both values.
    """
    if learnt is not None and learnt.is_file():
        try:
            return OnlineCalibrator.restore(_read(learnt), block_size=block_size, made_for=drafter_hash)
        except ConfigError as error:
            raise ConfigError(f"{learnt}: {error}") from error
    if offline is None or not offline.is_file():
        return OnlineCalibrator(block_size=block_size)
    content = _read(offline)
    for name, expected in (
        ("format_version", OFFLINE_FORMAT_VERSION),
        ("block_size", block_size),
        ("target_hash", target_hash),
        ("drafter_hash", drafter_hash),
    ):
        if content.get(name) != expected:
            raise ConfigError(
                f"{offline}: {name} is {content.get(name)!r} in the file and {expected!r} here:"
                " fit again with `dspark-build calibrate`"
            )
    try:
        drawn = content["sts_temperatures"]
        return OnlineCalibrator(
            block_size=block_size,
            temperatures=content.get("sampled_sts_temperatures", drawn),
            greedy_temperatures=content.get("greedy_sts_temperatures", drawn),
            shifts=content.get("sampled_sts_shifts"),
            greedy_shifts=content.get("greedy_sts_shifts"),
        )
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise ConfigError(f"{offline}: sts_temperatures: {error}") from error


def save_calibrator(path: Path, calibrator: OnlineCalibrator, *, drafter_hash: str) -> None:
    """Write what was learnt; the file is complete or not there at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(calibrator.state(made_for=drafter_hash)), encoding="utf-8")
    partial.replace(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a calibration file ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: got {type(content).__name__}, allowed is an object")
    return content
