"""`dspark-build data`: prompts in; answers and the target's features of them out."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from dspark.errors import CapacityError, CheckpointError, ConfigError
from dspark.models.loading import TargetCheckpoint, load_target

from dspark_build.answer_features import make_answers_with_features
from dspark_build.answers import (
    AnswerShard,
    EngineAnswerer,
    Question,
    make_answers,
    plan_questions,
    shard_path,
)
from dspark_build.feature_cache import cache_bytes, feature_folder, feature_paths, make_features
from dspark_build.files import write_text
from dspark_build.manifest import DataManifest, load_manifest, open_manifest
from dspark_build.progress import StopSignal, say
from dspark_build.prompt_files import Prompt, parse_temperatures, read_prompts, tokenize_prompts, without
from dspark_build.self_prompts import write_prompts
from dspark_build.training_data import target_head

__all__ = ["add_data_arguments", "default_feature_layers", "run_data"]


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="folder, .gguf file or hub name")
    parser.add_argument("--prompts", nargs="*", default=[], metavar="FILE", help='JSONL files with "turns"')
    parser.add_argument(
        "--generated-prompts", type=int, default=0, metavar="N", help="add N seeded prompts of many kinds"
    )
    parser.add_argument(
        "--everyday-prompts",
        type=int,
        default=0,
        metavar="N",
        help="add N short plain questions: code, maths, daily life",
    )
    parser.add_argument(
        "--self-prompts", type=int, default=0, metavar="N", help="add N prompts that the target writes itself"
    )
    parser.add_argument(
        "--exclude", nargs="*", default=[], metavar="FILE", help="prompts that must not be used (eval)"
    )
    parser.add_argument("--out", required=True, type=Path, help="data folder; the same command resumes it")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer (default %(default)s)")
    parser.add_argument(
        "--max-prompt-tokens", type=int, default=384, help="leave longer prompts out (%(default)s)"
    )
    parser.add_argument(
        "--temperatures", default="0,0.7,1.0", help="dealt out over the answers (default %(default)s)"
    )
    parser.add_argument("--answers-per-prompt", type=int, default=1, metavar="K")
    parser.add_argument("--limit", type=int, help="use only the first N prompts after shuffling")
    parser.add_argument(
        "--feature-layers", help="e.g. 7,14,22,29; the last layer is always stored (default: four)"
    )
    parser.add_argument(
        "--max-bytes",
        type=float,
        default=6e9,
        help="of cached features; further shards are left out (%(default)g)",
    )
    parser.add_argument(
        "--only",
        choices=("answers", "features"),
        help="answers: without features; features: of the answers in --out, which needs no prompts",
    )
    parser.add_argument(
        "--batch", type=int, default=64, help="questions decoded together (default %(default)s)"
    )
    parser.add_argument("--shard-size", type=int, default=256, help="answers a file (default %(default)s)")
    parser.add_argument("--executor", choices=("auto", "native", "torch"), default="auto")
    parser.add_argument("--dtype", default="auto", help="of the target's weights (default %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="0 = one per core")
    parser.add_argument("--seed", type=int, default=0)


def run_data(args: argparse.Namespace) -> int:
    """Answer prompts and cache the target's features of the answers.

    Raises:
        ConfigError: bad options or prompt files; a folder made with other settings.
        CheckpointError: answers of another target.
        CapacityError: the cache would be larger than allowed or than the disk.
    """
    checkpoint = load_target(args.target)
    layers = _layers(args.feature_layers, checkpoint.config.decoder.num_layers)
    with StopSignal() as stop:
        if args.only == "features":
            num_shards = _manifest_of(args.out, checkpoint).num_shards
        else:
            plan = _plan(args, checkpoint)
            num_shards = len(plan)
            _answer(args, checkpoint, plan, layers, stop)
        if args.only != "answers" and not stop():
            width = len(layers) * checkpoint.config.decoder.hidden_size
            folder = feature_folder(args.out, layers)
            make_features(
                args.out,
                folder,
                _shards_that_fit(args.out, folder, num_shards, width=width, max_bytes=int(args.max_bytes)),
                lambda: _feature_target(checkpoint, layers, args),
                lambda: target_head(checkpoint, dtype=torch.bfloat16),
                tell=say,
                should_stop=stop,
            )
        if stop():
            say("stopped; finished shards are kept, the same command goes on from here")
    return 0


def _plan(args: argparse.Namespace, checkpoint: TargetCheckpoint) -> list[list[Question]]:
    """Return the questions of every shard and make, or check, the manifest."""
    temperatures = parse_temperatures("--temperatures", args.temperatures)
    prompts = _gather_prompts(args, checkpoint)
    pairs = [
        (prompt, ids)
        for prompt, ids in zip(prompts, tokenize_prompts(checkpoint, prompts), strict=True)
        if 0 < len(ids) <= args.max_prompt_tokens
    ]
    say(f"prompts: {len(pairs)} of {len(prompts)} kept, others are over {args.max_prompt_tokens} tokens")
    if not pairs:
        raise ConfigError(f"max_prompt_tokens: no prompt has at most {args.max_prompt_tokens} tokens")
    plan = plan_questions(
        [ids for _, ids in pairs],
        temperatures=temperatures,
        answers_per_prompt=args.answers_per_prompt,
        shard_size=args.shard_size,
        seed=args.seed,
    )
    texts = "\0".join(prompt.text for prompt, _ in pairs)
    open_manifest(
        args.out,
        DataManifest(
            target_hash=checkpoint.config.model_hash,
            prompts_hash=hashlib.sha256(texts.encode()).hexdigest(),
            num_prompts=len(pairs),
            max_tokens=args.max_tokens,
            max_prompt_tokens=args.max_prompt_tokens,
            temperatures=temperatures,
            answers_per_prompt=args.answers_per_prompt,
            shard_size=args.shard_size,
            seed=args.seed,
            num_shards=len(plan),
        ),
    )
    return plan


def _answer(
    args: argparse.Namespace,
    checkpoint: TargetCheckpoint,
    plan: list[list[Question]],
    layers: tuple[int, ...],
    stop: StopSignal,
) -> None:
    """Make the answers that are missing: with their features, or through the engine with `--only answers`."""
    if args.only == "answers":
        make_answers(
            args.out,
            plan,
            lambda: _engine_answerer(args),
            max_tokens=args.max_tokens,
            tell=say,
            should_stop=stop,
        )
        return
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    width = len(layers) * config.decoder.hidden_size
    fitting = _plan_that_fits(plan, width=width, max_tokens=args.max_tokens, max_bytes=int(args.max_bytes))
    make_answers_with_features(
        args.out,
        feature_folder(args.out, layers),
        fitting,
        _feature_target(checkpoint, layers, args),
        max_tokens=args.max_tokens,
        eos_ids=frozenset({*config.eos_ids, *(tokenizer.eos_ids if tokenizer else ())}),
        num_lanes=args.batch,
        tell=say,
        should_stop=stop,
    )


def _engine_answerer(args: argparse.Namespace) -> EngineAnswerer:
    return EngineAnswerer(
        args.target, batch=args.batch, threads=args.threads, dtype=args.dtype, executor=args.executor
    )


def _manifest_of(folder: Path, checkpoint: TargetCheckpoint) -> DataManifest:
    """Return the manifest of answers that are there. Raises CheckpointError when another target gave them."""
    manifest = load_manifest(folder)
    if manifest.target_hash != checkpoint.config.model_hash:
        raise CheckpointError(
            f"{folder}: was made for target {manifest.target_hash}, this target is "
            f"{checkpoint.config.model_hash}"
        )
    return manifest


def _feature_target(checkpoint: TargetCheckpoint, layers: tuple[int, ...], args: argparse.Namespace):  # type: ignore[no-untyped-def]
    from dspark.config import ServeConfig
    from dspark.executors.loading import choose_executor, make_target

    serve = ServeConfig(
        target=args.target, dtype=args.dtype, executor=args.executor, num_threads=args.threads
    )
    return make_target(
        checkpoint, executor=choose_executor(args.executor), dtype=args.dtype, layer_ids=layers, config=serve
    )


def _gather_prompts(args: argparse.Namespace, checkpoint: TargetCheckpoint) -> list[Prompt]:
    prompts = read_prompts(args.prompts) if args.prompts else []
    if args.self_prompts:
        prompts += _self_prompts(args, checkpoint)
    if args.generated_prompts:
        from dspark_build.prompts import generate_prompts

        prompts += generate_prompts(args.generated_prompts, seed=args.seed)
    if args.everyday_prompts:
        from dspark_build.everyday_prompts import everyday_prompts

        prompts += everyday_prompts(args.everyday_prompts, seed=args.seed)
    if not prompts:
        raise ConfigError(
            "prompts: none given; name files with --prompts or ask for --generated-prompts N, --everyday-prompts N "
            "or --self-prompts N"
        )
    excluded = read_prompts(args.exclude) if args.exclude else []
    left = without(prompts, excluded)
    if len(left) < len(prompts):
        say(f"prompts: {len(prompts) - len(left)} left out because --exclude names them")
    order = np.random.default_rng(args.seed).permutation(len(left))
    return [left[int(i)] for i in order][: args.limit]


def _self_prompts(args: argparse.Namespace, checkpoint: TargetCheckpoint) -> list[Prompt]:
    """Return the prompts that the target wrote itself; they are written once and kept in the data folder."""
    path: Path = args.out / "self_prompts.jsonl"
    if not path.exists():
        if checkpoint.tokenizer is None:
            raise ConfigError("--self-prompts: the target has no tokenizer")
        say(f"prompts: the target writes {args.self_prompts} itself")
        written = write_prompts(
            args.self_prompts,
            _engine_answerer(args),
            checkpoint.tokenizer,
            max_tokens=128,
            seed=args.seed,
        )
        lines = (
            json.dumps({"source": prompt.source, "turns": [prompt.text]}, ensure_ascii=False) + "\n"
            for prompt in written
        )
        write_text(path, "".join(lines))
    return read_prompts([path])[: args.self_prompts]


def _plan_that_fits(
    plan: list[list[Question]], *, width: int, max_tokens: int, max_bytes: int
) -> list[list[Question]]:
    """Return the first shards whose features take at most `max_bytes`, were every answer as long as allowed.

    Raises:
        CapacityError: not even the first one does.
    """
    sizes = [sum(len(q.prompt_ids) + max_tokens - 1 for q in shard) * width * 2 for shard in plan]
    num = int(np.searchsorted(np.cumsum(sizes), max_bytes, side="right"))
    if num == 0:
        raise CapacityError(f"--max-bytes: got {max_bytes}, which holds no shard; see --feature-layers")
    if num < len(plan):
        say(f"data: {len(plan) - num} shards may not fit --max-bytes {max_bytes / 1e9:.2f} GB, left out")
    return plan[:num]


def _shards_that_fit(data: Path, folder: Path, num_shards: int, *, width: int, max_bytes: int) -> list[int]:
    """Return the first finished answer shards whose features take at most `max_bytes` together."""
    fitting: list[int] = []
    missing = total = left_out = 0
    for index in range(num_shards):
        if not shard_path(data, index).exists():
            continue
        size = cache_bytes(AnswerShard.load(shard_path(data, index)), width=width)
        if total + size > max_bytes:
            left_out += 1
            continue
        total += size
        missing += 0 if feature_paths(folder, index)[1].exists() else size
        fitting.append(index)
    say(f"features: {total / 1e9:.2f} GB in all, {missing / 1e9:.2f} GB of them still to be written")
    if left_out:
        say(f"features: {left_out} shards left out, --max-bytes is {max_bytes / 1e9:.2f} GB")
    if not fitting:
        raise CapacityError(f"--max-bytes: got {max_bytes}, which holds no shard; see --feature-layers")
    free = shutil.disk_usage(data).free
    if missing > free:
        raise CapacityError(f"features need {missing / 1e9:.2f} GB more, {data} has {free / 1e9:.2f} GB free")
    return fitting


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """Return four evenly spread layers, the last one among them."""
    return tuple(sorted({round((num_layers - 1) * share) for share in (0.25, 0.5, 0.75, 1.0)}))


def _layers(text: str | None, num_layers: int) -> tuple[int, ...]:
    if text is None:
        return default_feature_layers(num_layers)
    try:
        ids = {int(part) for part in text.split(",")}
    except ValueError as error:
        raise ConfigError(f"--feature-layers: got {text!r}, allowed are layer ids with commas") from error
    if min(ids) < -1 or max(ids) >= num_layers:
        raise ConfigError(f"--feature-layers: got {text!r}, allowed are ids from -1 to {num_layers - 1}")
    return tuple(sorted(ids | {num_layers - 1}))
