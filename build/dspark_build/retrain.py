"""`dspark-build retrain`: a drafter goes on learning from what was served, and is kept where it drafts better."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.errors import CapacityError, ConfigError
from dspark.models.config import DrafterConfig, TargetConfig
from dspark.models.loading import load_target

from dspark_build.block_records import Asked, BlockRecords, decode
from dspark_build.files import write_atomically, write_text
from dspark_build.folder_lock import locked_folder
from dspark_build.progress import StopSignal, say
from dspark_build.traffic import (
    RecordedAnswer,
    TrafficParts,
    read_part,
    read_traffic,
    split_traffic,
    write_part,
)

__all__ = ["add_retrain_arguments", "run_retrain"]

MIN_ANSWERS = 100  # below, the check is of fewer than ten answers
_ROOM = 64  # tokens that an answer must have room for, when prompts are answered anew
_MOST_TOKENS = 256  # of an answer then
_CHECKED = 64  # answers that old and new drafter are compared on
_COLLECTED = "collected"  # says that the data folders are whole
_RATING_MINUTES = 1.6  # of the confidence head, at most


def add_retrain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="folder, .gguf file or hub name that was served")
    parser.add_argument("--drafter", required=True, type=Path, help="drafter folder to go on from")
    parser.add_argument(
        "--traffic",
        required=True,
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="what servers recorded (`record`)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        nargs="*",
        default=[],
        metavar="FOLDER",
        help="data of `dspark-build data` to mix in",
    )
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        help="work, and drafter/ where it is better; the same command resumes",
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="of training (default %(default)g)")
    parser.add_argument("--lr", type=float, default=4e-4, help="highest learning rate (default %(default)g)")
    parser.add_argument(
        "--max-sequence",
        type=int,
        default=1024,
        metavar="N",
        help="leave answers out that end behind N tokens (default %(default)s)",
    )
    parser.add_argument("--sequences", type=int, default=8, help="of a micro-batch (default %(default)s)")
    parser.add_argument(
        "--anchors", type=int, default=64, help="blocks of each sequence (default %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=0, help="0 = one per core")


def run_retrain(args: argparse.Namespace) -> int:
    """Train, fit the confidence head, calibrate, compare; 1 where the drafter that serves is the better one.

    Raises:
        ConfigError: too few answers, or a line that is none.
        CheckpointError: answers or a drafter of another target.
    """
    checkpoint = load_target(args.target)
    served = load_drafter_checkpoint(args.drafter, target=checkpoint.config).config
    if not served.enable_confidence_head:
        raise ConfigError(
            f"--drafter: {args.drafter} has no confidence head, which is what serving rates drafts by"
        )
    with locked_folder(args.out), StopSignal() as stop:
        check = _collect(args, checkpoint.config)
        room = checkpoint.config.max_context_len - max(len(a.prompt_ids) for a in check)
        for command in _commands(args, served, max_tokens=min(_MOST_TOKENS, room)):
            if stop():
                break
            _run(*command)
        if stop():
            say("retrain: stopped; the same command goes on from here")
            return 130
        return _compare(args, check, max_tokens=min(_MOST_TOKENS, room))


def _collect(args: argparse.Namespace, config: TargetConfig) -> list[RecordedAnswer]:
    """Write the data folders of the traffic, unless an earlier run did; return the answers to check with."""
    done = args.out / _COLLECTED
    if done.exists():
        say(f"traffic: going on with what {args.out} holds; name another --out for what was recorded since")
    else:
        answers = read_traffic(args.traffic, target_hash=config.model_hash, vocab_size=config.vocab_size)
        parts = _parts(answers, max_sequence=args.max_sequence, max_prompt=config.max_context_len - _ROOM)
        for name, part in (("learn", parts.learn), ("rate", parts.rate), ("check", parts.check)):
            shutil.rmtree(args.out / name, ignore_errors=True)  # of a run that was killed here
            write_part(args.out / name, part, target_hash=config.model_hash, held_out=name == "check")
        write_text(done, f"{len(answers)} answers\n")
    return read_part(args.out / "check")


def _commands(args: argparse.Namespace, served: DrafterConfig, *, max_tokens: int) -> list[list[str]]:
    """Return the steps, each a command of `dspark-build` that can be run again by hand."""
    out: Path = args.out
    common = {"target": args.target, "threads": args.threads}
    layers = ",".join(map(str, served.target_layer_ids))
    head = served.markov_head_type if served.markov_rank else "none"
    shape = common | {
        "target-layers": layers,
        "layers": served.decoder.num_layers,
        "intermediate-size": served.decoder.intermediate_size,
        "block-size": served.block_size,
        "mask-token": served.mask_token_id,
        "head": head,
        "rank": served.markov_rank or 1,
        "confidence-without-markov": head != "none" and not served.confidence_head_with_markov,
        "sequences": args.sequences,
        "anchors": args.anchors,
        "positions": "1e12",
    }
    learnt, rated = out / "run" / "drafter", out / "rated" / "drafter"
    learn = {
        "data": [out / "learn", *args.data],
        "out": out / "run",
        "init": args.drafter,
        "vocab-from": args.drafter,
    }
    learn |= {"lr": args.lr, "max-minutes": args.minutes, "kl-weight": 0.5, "kl-until": 0.4, "ema": 0.99}
    rate = {
        "data": out / "rate",
        "out": out / "rated",
        "init": learnt,
        "vocab-from": learnt,
        "confidence-only": True,
    }
    rate |= {"all-slots": True, "lr": 3e-3, "ema": 0.98, "max-minutes": min(_RATING_MINUTES, args.minutes)}
    features = common | {"only": "features", "feature-layers": layers}
    return [
        _command("data", features | {"out": out / "learn"}),
        _command("data", features | {"out": out / "rate"}),
        _command("train", shape | learn),
        _command("train", shape | rate),
        _command("calibrate", common | {"drafter": rated, "data": out / "check", "max-tokens": max_tokens}),
    ]


def _command(name: str, options: Mapping[str, object]) -> list[str]:
    """Return the words of a command: an option's value follows it, true stands for none, false for no option."""
    words = [name]
    for option, value in options.items():
        if value is not False:
            values = [] if value is True else value if isinstance(value, list) else [value]
            words += [f"--{option}", *map(str, values)]
    return words


def _parts(answers: Sequence[RecordedAnswer], *, max_sequence: int, max_prompt: int) -> TrafficParts:
    kept = [
        a
        for a in answers
        if len(a.prompt_ids) <= max_prompt and len(a.prompt_ids) + len(a.output_ids) <= max_sequence
    ]
    parts = split_traffic(kept)
    sizes = {"learn from": len(parts.learn), "rate": len(parts.rate), "check": len(parts.check)}
    say(
        f"traffic: {len(kept)} of {len(answers)} answers end within {max_sequence} tokens: "
        + ", ".join(f"{size} to {name}" for name, size in sizes.items())
    )
    if len(kept) < MIN_ANSWERS or not all(sizes.values()):
        raise ConfigError(
            f"--traffic: {len(kept)} answers of use, needed are {MIN_ANSWERS}: let the server record more"
        )
    return parts


def _run(*arguments: str) -> None:
    """Run a command of ours in this process, after telling it."""
    from dspark_build.cli import COMMANDS

    say("$ dspark-build " + " ".join(arguments))
    command = next(one for one in COMMANDS if one.name == arguments[0])
    add_arguments, run = command.load()
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    status = run(parser.parse_args(arguments[1:]))
    if status:
        raise CapacityError(
            f"retrain: dspark-build {arguments[0]} ended with {status}; what it finished is kept"
        )


def _compare(args: argparse.Namespace, answers: Sequence[RecordedAnswer], *, max_tokens: int) -> int:
    """Decode the checked prompts with either drafter; keep the new one where it is accepted further."""
    new: Path = args.out / "rated" / "drafter"
    found = {
        name: _decode(args, answers, folder, max_tokens=max_tokens)
        for name, folder in (("served", args.drafter), ("new", new))
    }
    for name, records in found.items():
        rates = " ".join(f"{rate:.2f}" for rate in records.conditional())
        print(f"{name:7} accepted length {records.accepted_len:.3f}, acceptance by position {rates}")
    gain = found["new"].accepted_len / found["served"].accepted_len - 1.0
    if gain <= 0.0:
        print(f"the drafter that serves stays: the new one, {new}, is accepted {-gain:.1%} less far")
        return 1
    kept: Path = args.out / "drafter"
    _copy(new, kept)
    print(
        f"{kept} is accepted {gain:.1%} further; name it as `drafter` in model.yaml and load the model again"
    )
    return 0


def _decode(
    args: argparse.Namespace, answers: Sequence[RecordedAnswer], drafter: Path, *, max_tokens: int
) -> BlockRecords:
    asked = [
        Asked(prompt_ids=a.prompt_ids, source="traffic", temperature=a.temperature, seed=i)
        for i, a in enumerate(answers[:_CHECKED])
    ]
    run = decode(
        asked,
        target=args.target,
        drafter=str(drafter),
        max_tokens=max_tokens,
        batch=32,
        threads=args.threads,
        tell=say,
    )
    return run.records


def _copy(source: Path, target: Path) -> None:
    for path in sorted(source.iterdir()):
        with path.open("rb") as read:
            write_atomically(target / path.name, lambda file, read=read: shutil.copyfileobj(read, file))  # type: ignore[misc]
