"""`dspark-build calibrate`: sequential temperature scaling on prompts that training never saw."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from dspark.calibration.sts import ScaledFit, StsFit, fit_scaled, fit_sts, survival_labels
from dspark.drafters.identity import drafter_identity
from dspark.errors import CheckpointError, ConfigError
from dspark.models.loading import load_target

from dspark_build.answers import AnswerShard, shard_path
from dspark_build.block_records import Asked, BlockRecords, decode
from dspark_build.files import write_text
from dspark_build.manifest import load_manifest
from dspark_build.progress import say
from dspark_build.prompt_files import parse_temperatures, read_prompts, tokenize_prompts
from dspark_build.training_data import HELD_OUT_EVERY

__all__ = ["add_calibrate_arguments", "fit_records", "load_offline_fit", "run_calibrate"]

Array = npt.NDArray[np.float64]

FORMAT_VERSION = 1
MIN_BLOCKS = 200
_GREEDY_SOURCE = "0"  # blocks are told apart by their temperature


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="folder, .gguf file or hub name")
    parser.add_argument("--drafter", required=True, type=Path, help="drafter folder with a confidence head")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help="data folder whose held-out prompts are decoded")
    source.add_argument("--prompts", type=Path, nargs="+", help='JSONL files with "turns"')
    parser.add_argument("--limit", type=int, default=200, help="prompts (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=192, help="of an answer (default %(default)s)")
    parser.add_argument(
        "--temperatures", default="0,0.7,1.0", help="each prompt is decoded at each (%(default)s)"
    )
    parser.add_argument("--out", type=Path, help="default: calibration.json in the drafter folder")
    parser.add_argument(
        "--batch", type=int, default=32, help="prompts decoded together (default %(default)s)"
    )
    parser.add_argument("--executor", choices=("auto", "native", "torch"), default="auto")
    parser.add_argument("--threads", type=int, default=0, help="0 = one per core")
    parser.add_argument("--seed", type=int, default=0)


def run_calibrate(args: argparse.Namespace) -> int:
    """Decode at full block, fit, write calibration.json.

    Raises:
        ConfigError: no confidence head, or too few blocks to fit.
    """
    checkpoint = load_target(args.target)
    temperatures = parse_temperatures("--temperatures", args.temperatures)
    if args.data is not None:
        prompts = _held_out_prompts(args.data, checkpoint.config.model_hash)[: args.limit]
    else:
        prompts = tokenize_prompts(checkpoint, read_prompts(args.prompts, limit=args.limit))
    asked = [
        Asked(prompt_ids=ids, source=f"{t:g}", temperature=t, seed=args.seed * 1_000_003 + i)
        for i, ids in enumerate(prompts)
        for t in temperatures
    ]
    run = decode(
        asked,
        target=args.target,
        drafter=str(args.drafter),
        max_tokens=args.max_tokens,
        batch=args.batch,
        threads=args.threads,
        executor=args.executor,
        tell=say,
    )
    fit = fit_records(run.records)
    apart = _fit_apart(run.records)
    out = args.out or args.drafter / "calibration.json"
    content = {
        "format_version": FORMAT_VERSION,
        "target_hash": checkpoint.config.model_hash,
        "drafter_hash": drafter_identity(str(args.drafter)),
        "block_size": run.records.block_size,
        "sts_temperatures": fit.temperatures.tolist(),
        "ece_before": fit.ece_before.tolist(),
        "ece_after": fit.ece_after.tolist(),
        "num_samples": fit.num_samples.tolist(),
        **_fields(apart),
        "sampling_temperatures": list(temperatures),
        "num_prompts": len(prompts),
    }
    write_text(out, json.dumps(content, indent=2) + "\n")
    for k, (t, before, after) in enumerate(
        zip(fit.temperatures, fit.ece_before, fit.ece_after, strict=True), 1
    ):
        say(f"position {k}: temperature {t:.3f}, ECE of the survival {before:.2%} -> {after:.2%}")
    for name, one in apart.items():
        for k, (t, shift) in enumerate(zip(one.temperatures, one.shifts, strict=True), 1):
            say(f"{name} requests, position {k}: temperature {t:.3f}, shift {shift:+.3f}")
    say(f"calibrate: {len(run.records)} blocks, accepted length {run.records.accepted_len:.2f}; wrote {out}")
    return 0


def fit_records(records: BlockRecords) -> StsFit:
    """Fit temperatures to decoded blocks.

    Raises:
        ConfigError: no confidences, or fewer than `MIN_BLOCKS` blocks.
    """
    if len(records) < MIN_BLOCKS:
        raise ConfigError(
            f"calibrate: {len(records)} full blocks, needed are {MIN_BLOCKS}: give more or longer prompts"
        )
    if records.confidence_logits is None:
        raise ConfigError("calibrate: the drafter has no confidence head, there is nothing to calibrate")
    labels, known = survival_labels(records.accepted, records.verify_len, records.block_size)
    return fit_sts(records.confidence_logits, labels, known)


def _fields(apart: dict[str, ScaledFit]) -> dict[str, list[float]]:
    fields = {f"{name}_sts_temperatures": one.temperatures.tolist() for name, one in apart.items()}
    return fields | {f"{name}_sts_shifts": one.shifts.tolist() for name, one in apart.items()}


def _fit_apart(records: BlockRecords) -> dict[str, ScaledFit]:
    """Fit greedy and sampled blocks each by themselves, where there are enough of both."""
    greedy = records.source == _GREEDY_SOURCE
    parts = {"greedy": records.at(greedy), "sampled": records.at(~greedy)}
    if min(len(part) for part in parts.values()) < MIN_BLOCKS:
        return {}
    return {
        name: fit_scaled(part.confidence_logits, part.accepted, part.verify_len)
        for name, part in parts.items()
        if part.confidence_logits is not None
    }


def load_offline_fit(path: Path, *, block_size: int, greedy: bool) -> ScaledFit:
    """Read temperatures and shifts [G] of a calibration file; `temperatures` is read like `sts_temperatures`.

    Arguments:
        greedy: those of greedy requests, else those of sampled ones; of both where the file has them together only.

    Raises:
        CheckpointError: no such file, no temperatures, or not as many as the block has positions.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    values, shifts = None, [0.0] * block_size
    if isinstance(raw, dict):
        kind = "greedy" if greedy else "sampled"
        together = raw.get("sts_temperatures", raw.get("temperatures"))
        values = raw.get(f"{kind}_sts_temperatures", together)
        shifts = raw.get(f"{kind}_sts_shifts", shifts)
    if (
        not isinstance(values, list)
        or len(values) != block_size
        or not all(isinstance(v, int | float) and v > 0 for v in values)
    ):
        raise CheckpointError(
            f"{path}: sts_temperatures must be {block_size} positive numbers, got {values!r}"
        )
    if (
        not isinstance(shifts, list)
        or len(shifts) != block_size
        or not all(isinstance(v, int | float) for v in shifts)
    ):
        raise CheckpointError(f"{path}: sts_shifts must be {block_size} numbers, got {shifts!r}")
    return ScaledFit(temperatures=np.asarray(values, np.float64), shifts=np.asarray(shifts, np.float64))


def _held_out_prompts(folder: Path, target_hash: str) -> list[tuple[int, ...]]:
    manifest = load_manifest(folder)
    if manifest.target_hash != target_hash:
        raise CheckpointError(
            f"{folder}: was made for target {manifest.target_hash}, this target is {target_hash}"
        )
    found: dict[int, tuple[int, ...]] = {}
    for index in range(manifest.num_shards):
        if not shard_path(folder, index).exists():
            continue
        shard = AnswerShard.load(shard_path(folder, index))
        for i in np.flatnonzero(shard.prompt_id % HELD_OUT_EVERY == 0):
            found[int(shard.prompt_id[i])] = tuple(shard.sequence(i)[: shard.prompt_len[i]].tolist())
    if not found:
        raise ConfigError(f"data: {folder} has no held-out prompts yet; make more answers or give --prompts")
    return [found[key] for key in sorted(found)]
