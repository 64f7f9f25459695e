"""`dspark-build data`, and the examples that training reads from what it made."""

from __future__ import annotations

import argparse
import hashlib
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from dspark.errors import CapacityError, CheckpointError, ConfigError
from dspark.models.config import TargetConfig
from dspark.models.loading import TargetCheckpoint, load_target

from dspark_build.answers import AnswerShard, EngineAnswerer, make_answers, plan_questions, shard_path
from dspark_build.feature_cache import (
    FeatureStore,
    TargetHead,
    cache_bytes,
    feature_folder,
    feature_paths,
    make_features,
    stored_layers,
)
from dspark_build.manifest import DataManifest, load_manifest, open_manifest
from dspark_build.progress import StopSignal, say
from dspark_build.prompt_files import Prompt, read_prompts, without
from dspark_build.training_batch import Example

__all__ = [
    "Dataset",
    "add_data_arguments",
    "default_feature_layers",
    "parse_temperatures",
    "run_data",
    "target_head",
    "tokenize_prompts",
]

Array = npt.NDArray[np.int64]

HELD_OUT_EVERY = 40  # prompts with this divisor of their index are never trained on


class Dataset:
    """Examples of a data folder; features stay on disk until an example is asked for.

    Arguments:
        folder: made by `dspark-build data`; shards without features are left out.
        target: must be the target it was made with.
        layer_ids: feature layers the drafter wants, among the stored ones.
        head: final norm of the target, for its hidden states.

    Raises:
        CheckpointError: no manifest, another target, layers that are not stored, nothing finished.
    """

    def __init__(
        self, folder: Path, *, target: TargetConfig, layer_ids: tuple[int, ...], head: TargetHead
    ) -> None:
        self.manifest = load_manifest(folder)
        if self.manifest.target_hash != target.model_hash:
            raise CheckpointError(
                f"{folder}: was made for target {self.manifest.target_hash}, this "
                f"target is {target.model_hash}"
            )
        sets = stored_layers(folder)
        stored = next((ids for ids in reversed(sets) if set(layer_ids) <= set(ids)), None)
        if stored is None:
            raise CheckpointError(f"{folder}: has features of layers {sets}, asked for are {list(layer_ids)}")
        features = feature_folder(folder, stored)
        d = target.decoder.hidden_size
        self._width = d
        self._head = head
        self._columns = [slice(stored.index(i) * d, stored.index(i) * d + d) for i in layer_ids]
        self._all_columns = layer_ids == stored
        self._shards: list[AnswerShard] = []
        self._stores: list[FeatureStore] = []
        self._row_start: list[Array] = []  # first feature row of each sequence
        self._answer_start: list[Array] = []  # first answer row of each sequence
        train: list[tuple[int, int]] = []
        held_out: list[tuple[int, int]] = []
        for index in range(self.manifest.num_shards):
            if not all(
                path.exists() for path in (shard_path(folder, index), *feature_paths(features, index))
            ):
                continue
            shard = AnswerShard.load(shard_path(folder, index))
            number = len(self._shards)
            self._shards.append(shard)
            self._stores.append(FeatureStore(features, index, width=len(stored) * d))
            lengths = np.diff(shard.offsets) - 1
            self._row_start.append(np.concatenate([[0], np.cumsum(lengths)]))
            answer_rows = lengths - (shard.prompt_len - 1)
            self._answer_start.append(np.concatenate([[0], np.cumsum(answer_rows)]))
            for i in range(len(shard)):
                if answer_rows[i] < 2:
                    continue
                part = held_out if shard.prompt_id[i] % HELD_OUT_EVERY == 0 else train
                part.append((number, i))
        if not train:
            raise CheckpointError(
                f"{folder}: has no finished shard to train on; run `dspark-build data` to its end"
            )
        self.train = train
        self.held_out = held_out

    @property
    def content_hash(self) -> str:
        """Digest of the manifest and of which shards are there: a run is resumed on the same examples
        only.
        """
        text = f"{self.manifest}|{[len(shard.tokens) for shard in self._shards]}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def num_answer_tokens(self) -> int:
        return sum(shard.num_answer_tokens for shard in self._shards)

    def token_counts(self, vocab_size: int) -> Array:
        """Return how often each token occurs in answers that are trained on [V]."""
        counts = np.zeros(vocab_size, np.int64)
        for number, i in self.train:
            shard = self._shards[number]
            counts += np.bincount(shard.sequence(i)[shard.prompt_len[i] :], minlength=vocab_size)
        return counts

    def example(self, key: tuple[int, int]) -> Example:
        """Read one example; `key` is an entry of `train` or `held_out`."""
        number, i = key
        shard, store = self._shards[number], self._stores[number]
        first, last = int(self._row_start[number][i]), int(self._row_start[number][i + 1])
        rows = store.rows[first:last]
        prompt_len = int(shard.prompt_len[i])
        answers = slice(int(self._answer_start[number][i]), int(self._answer_start[number][i + 1]))
        features = rows if self._all_columns else torch.cat([rows[:, c] for c in self._columns], dim=1)
        return Example(
            tokens=shard.sequence(i).astype(np.int64),
            prompt_len=prompt_len,
            features=features,
            target_hidden=self._head.hidden(rows[prompt_len - 1 :, -self._width :]),
            target_lse=store.lse[answers],
            target_argmax=store.argmax[answers],
        )


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """Return four evenly spread layers, the last one among them."""
    return tuple(sorted({round((num_layers - 1) * share) for share in (0.25, 0.5, 0.75, 1.0)}))


def target_head(checkpoint: TargetCheckpoint, *, dtype: torch.dtype) -> TargetHead:
    """Return the target's final norm and LM head."""
    weights = checkpoint.weights
    tied = checkpoint.config.tie_word_embeddings
    return TargetHead(
        norm=weights.float32("norm.weight"),
        eps=checkpoint.config.decoder.rms_norm_eps,
        head=weights.float32("embed_tokens.weight" if tied else "lm_head.weight"),
        dtype=dtype,
    )


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="folder, .gguf file or hub name")
    parser.add_argument("--prompts", nargs="*", default=[], metavar="FILE", help='JSONL files with "turns"')
    parser.add_argument(
        "--generated-prompts", type=int, default=0, metavar="N", help="add N seeded prompts of many kinds"
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
    parser.add_argument("--only", choices=("answers", "features"), help="do one of the two stages")
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
        CapacityError: the cache would be larger than allowed or than the disk.
    """
    checkpoint = load_target(args.target)
    config = checkpoint.config
    temperatures = parse_temperatures("--temperatures", args.temperatures)
    layers = _layers(args.feature_layers, config.decoder.num_layers)
    prompts = _gather_prompts(args)
    pairs = [
        (prompt, ids)
        for prompt, ids in zip(prompts, tokenize_prompts(checkpoint, prompts), strict=True)
        if 0 < len(ids) <= args.max_prompt_tokens
    ]
    kept, token_ids = [prompt for prompt, _ in pairs], [ids for _, ids in pairs]
    say(f"prompts: {len(kept)} of {len(prompts)} kept, others are over {args.max_prompt_tokens} tokens")
    if not kept:
        raise ConfigError(f"max_prompt_tokens: no prompt has at most {args.max_prompt_tokens} tokens")
    plan = plan_questions(
        token_ids,
        temperatures=temperatures,
        answers_per_prompt=args.answers_per_prompt,
        shard_size=args.shard_size,
        seed=args.seed,
    )
    manifest = DataManifest(
        target_hash=config.model_hash,
        prompts_hash=hashlib.sha256("\0".join(prompt.text for prompt in kept).encode()).hexdigest(),
        num_prompts=len(kept),
        max_tokens=args.max_tokens,
        max_prompt_tokens=args.max_prompt_tokens,
        temperatures=temperatures,
        answers_per_prompt=args.answers_per_prompt,
        shard_size=args.shard_size,
        seed=args.seed,
        num_shards=len(plan),
    )
    width = len(layers) * config.decoder.hidden_size
    longest = sum(len(q.prompt_ids) + args.max_tokens - 1 for shard in plan for q in shard)
    say(
        f"data: {sum(map(len, plan))} answers in {len(plan)} shards; features "
        f"of layers {list(layers)} take at most "
        f"{longest * width * 2 / 1e9:.2f} GB"
    )
    open_manifest(args.out, manifest)
    with StopSignal() as stop:
        if args.only != "features":
            make_answers(
                args.out,
                plan,
                lambda: EngineAnswerer(
                    args.target,
                    batch=args.batch,
                    threads=args.threads,
                    dtype=args.dtype,
                    executor=args.executor,
                ),
                max_tokens=args.max_tokens,
                tell=say,
                should_stop=stop,
            )
        if args.only != "answers" and not stop():
            folder = feature_folder(args.out, layers)
            make_features(
                args.out,
                folder,
                _shards_that_fit(args.out, folder, len(plan), width=width, max_bytes=int(args.max_bytes)),
                lambda: _feature_target(checkpoint, layers, args),
                lambda: target_head(checkpoint, dtype=torch.bfloat16),
                tell=say,
                should_stop=stop,
            )
        if stop():
            say("stopped; finished shards are kept, the same command goes on from here")
    return 0


def _feature_target(checkpoint: TargetCheckpoint, layers: tuple[int, ...], args: argparse.Namespace):  # type: ignore[no-untyped-def]
    from dspark.config import ServeConfig
    from dspark.runtime import choose_executor, make_target

    serve = ServeConfig(
        target=args.target, dtype=args.dtype, executor=args.executor, num_threads=args.threads
    )
    return make_target(
        checkpoint, executor=choose_executor(args.executor), dtype=args.dtype, layer_ids=layers, config=serve
    )


def _gather_prompts(args: argparse.Namespace) -> list[Prompt]:
    prompts = read_prompts(args.prompts) if args.prompts else []
    if args.generated_prompts:
        from dspark_build.prompts import generate_prompts

        prompts += generate_prompts(args.generated_prompts, seed=args.seed)
    if not prompts:
        raise ConfigError("prompts: none given; name files with --prompts or ask for --generated-prompts N")
    excluded = read_prompts(args.exclude) if args.exclude else []
    left = without(prompts, excluded)
    if len(left) < len(prompts):
        say(f"prompts: {len(prompts) - len(left)} left out because --exclude names them")
    order = np.random.default_rng(args.seed).permutation(len(left))
    return [left[int(i)] for i in order][: args.limit]


def tokenize_prompts(checkpoint: TargetCheckpoint, prompts: list[Prompt]) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt, through the target's chat template where it has one.

    Raises:
        ConfigError: the target has no tokenizer.
    """
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        raise ConfigError("target: has no tokenizer, and prompts are text; use a folder or file that has one")
    if tokenizer.has_chat_template:
        return [tuple(tokenizer.apply_chat_template([{"role": "user", "content": p.text}])) for p in prompts]
    return [tuple(tokenizer.encode(prompt.text)) for prompt in prompts]


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


def parse_temperatures(name: str, text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"{name}: got {text!r}, allowed are numbers with commas, such as 0,0.7,1.0"
        ) from error
    if not all(0.0 <= value <= 5.0 for value in values):
        raise ConfigError(f"{name}: got {text!r}, allowed are numbers from 0 to 5")
    return values


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
