"""`dspark-build eval`: accepted length, acceptance and calibration by real decoding at full block."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dspark.calibration.sts import ScaledFit
from dspark.models.loading import load_target

from dspark_build.block_records import Asked, BlockRecords, decode
from dspark_build.calibrate import load_offline_fit
from dspark_build.files import write_text
from dspark_build.progress import say
from dspark_build.prompt_files import read_prompts, tokenize_prompts

__all__ = ["add_eval_arguments", "report", "run_eval"]


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="folder, .gguf file or hub name")
    parser.add_argument("--drafter", required=True, help="drafter folder, or ngram")
    parser.add_argument(
        "--prompts", required=True, type=Path, nargs="+", help='JSONL files with "turns" and "source"'
    )
    parser.add_argument("--limit", type=int, help="at most N prompts")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    parser.add_argument(
        "--calibration", type=Path, help="default: calibration.json in the drafter folder, if there"
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument("--out", type=Path, help="folder for report.json and pictures")
    parser.add_argument(
        "--batch", type=int, default=32, help="prompts decoded together (default %(default)s)"
    )
    parser.add_argument("--executor", choices=("auto", "native", "torch"), default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--drafter-dtype", default="auto", help="of the drafter's weights (default %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=0, help="0 = one per core")
    parser.add_argument("--seed", type=int, default=0)


def run_eval(args: argparse.Namespace) -> int:
    """Decode the prompts and report, overall and by source."""
    checkpoint = load_target(args.target)
    prompts = read_prompts(args.prompts, limit=args.limit)
    asked = [
        Asked(
            prompt_ids=ids, source=prompt.source, temperature=args.temperature, seed=args.seed * 1_000_003 + i
        )
        for i, (prompt, ids) in enumerate(zip(prompts, tokenize_prompts(checkpoint, prompts), strict=True))
    ]
    run = decode(
        asked,
        target=args.target,
        drafter=args.drafter,
        max_tokens=args.max_tokens,
        batch=args.batch,
        threads=args.threads,
        executor=args.executor,
        dtype=args.dtype,
        drafter_dtype=args.drafter_dtype,
        tell=say,
    )
    fit = _offline_fit(args, run.records.block_size)
    content = {
        "target": args.target,
        "drafter": args.drafter,
        "temperature": args.temperature,
        "max_tokens": args.max_tokens,
        "block_size": run.records.block_size,
        "num_prompts": len(asked),
        "num_failed": run.num_failed,
        "num_tokens": run.num_tokens,
        "overall": report(run.records, fit),
        "sources": {
            source: report(run.records.of(source), fit) for source in sorted(set(run.records.source.tolist()))
        },
    }
    text = json.dumps(_finite(content), indent=None if args.json else 2)
    if args.out is not None:
        write_text(args.out / "report.json", json.dumps(_finite(content), indent=2) + "\n")
        from dspark_build.eval_plots import draw_all

        for path in draw_all(args.out, run.records, fit):
            say(f"wrote {path}")
    if args.json:
        print(text)
    else:
        _print_table(content)
    return 1 if run.num_failed else 0


def report(records: BlockRecords, fit: ScaledFit | None) -> dict[str, Any]:
    """Return the figures of some blocks as plain values."""
    raw = records.calibration(None)
    calibrated = None if fit is None else records.calibration(fit)
    return {
        "num_steps": len(records),
        "accepted_len": records.accepted_len,
        "conditional_acceptance": records.conditional().tolist(),
        "cumulative_acceptance": records.cumulative().tolist(),
        "confidence_raw": None if raw is None else asdict(raw),
        "confidence_calibrated": None if calibrated is None else asdict(calibrated),
    }


def _offline_fit(args: argparse.Namespace, block_size: int) -> ScaledFit | None:
    path = args.calibration or Path(args.drafter) / "calibration.json"
    if args.calibration is None and not path.exists():
        return None
    return load_offline_fit(path, block_size=block_size, greedy=args.temperature == 0)


def _finite(value: Any) -> Any:
    """Return the value with NaN as null, which JSON can say."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print_table(content: dict[str, Any]) -> None:
    print(f"{'source':<12} {'steps':>7} {'accepted length':>16}   conditional acceptance by position")
    for source, figures in [*content["sources"].items(), ("overall", content["overall"])]:
        by_position = " ".join(f"{value:.2f}" for value in figures["conditional_acceptance"])
        print(f"{source:<12} {figures['num_steps']:>7} {figures['accepted_len']:>16.2f}   {by_position}")
    for name in ("confidence_raw", "confidence_calibrated"):
        score = content["overall"][name]
        if score is not None:
            errors, least = (
                " ".join(f"{value:.1%}" for value in score[key]) for key in ("ece", "ece_of_perfect")
            )
            order = " ".join(f"{value:.2f}" for value in score["auc"])
            print(
                f"{name.replace('_', ', ')}: ECE of the survival {errors} (true forecasts: {least}); AUC {order}"
            )
