"""`dspark-build retrain`: a drafter goes on learning from what was served, and is kept where it drafts better."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.errors import CapacityError, ConfigError
from dspark.models.config import DrafterConfig, TargetConfig
from dspark.models.loading import load_target

from dspark_build.block_records import Asked, BlockRecords, decode
from dspark_build.drafter_gain import LEAST_PROMPTS, gain_of
from dspark_build.files import write_atomically
from dspark_build.folder_lock import locked_folder, remove_abandoned
from dspark_build.progress import StopSignal, say
from dspark_build.retrain_checks import (
    check_data,
    check_drafter,
    check_options,
    check_settings,
    write_settings,
)
from dspark_build.traffic import (
    RecordedAnswer,
    TrafficLimits,
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
_CHECKED = 64  # prompts that old and new drafter are compared on
_DATA = "answers"  # folder of what was read, whole once it is there
_RATING_MINUTES = 1.6  # of the confidence head, at most
_FRESH = ".drafter."  # a kept drafter while it is copied


def add_retrain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="folder, .gguf file or hub name that was served")
    parser.add_argument(
        "--drafter", required=True, type=Path, help="drafter folder to go on from, with a confidence head"
    )
    parser.add_argument(
        "--traffic",
        required=True,
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="what servers recorded (`dspark serve --record FOLDER`); they may go on meanwhile",
    )
    parser.add_argument(
        "--data",
        type=Path,
        nargs="*",
        default=[],
        metavar="FOLDER",
        help="data of `dspark-build data` to mix in, with features of the drafter's layers",
    )
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        help="new folder: the work, and drafter/ where its gain is more than chance; the same command resumes",
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
    parser.add_argument(
        "--max-bytes",
        type=float,
        default=6e9,
        help="of cached features; the newest answers are taken (default %(default)g)",
    )
    parser.add_argument("--sequences", type=int, default=8, help="of a micro-batch (default %(default)s)")
    parser.add_argument(
        "--anchors", type=int, default=64, help="blocks of each sequence (default %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=0, help="0 = one per core")


def run_retrain(args: argparse.Namespace) -> int:
    """Train, fit the confidence head, calibrate, compare; 1 where the drafter that serves stays.

    Raises:
        ConfigError: too few answers, a line that is none, a drafter of a kind that is not trained, or an --out that was
            made with other options.
        CheckpointError: answers, data or a drafter of another target.
    """
    check_options(args)
    args.drafter, args.out = args.drafter.resolve(), args.out.resolve()
    checkpoint = load_target(args.target)
    found = load_drafter_checkpoint(args.drafter, target=checkpoint.config)
    check_drafter(found, checkpoint)
    check_data(args.data, target=checkpoint.config, layer_ids=found.config.target_layer_ids)
    with locked_folder(args.out):
        check_settings(args, data=args.out / _DATA, target_hash=checkpoint.config.model_hash)
        check = _collect(args, checkpoint.config, num_layers=len(found.config.target_layer_ids))
        room = checkpoint.config.max_context_len - max(len(a.prompt_ids) for a in check)
        max_tokens = min(_MOST_TOKENS, room)
        *steps, calibrate = _commands(args, found.config, max_tokens=max_tokens)
        with StopSignal() as stop:
            for command in steps:
                if not stop():
                    _run(*command)
        if stop():
            say("retrain: stopped; the same command goes on from here")
            return 130
        # What follows may be interrupted at any moment: each writes whole or not at all.
        try:
            _run(*calibrate)
        except ConfigError as error:
            say(f"{error}: left out, the server calibrates while it serves")
        return _compare(args, check, max_tokens=max_tokens)


def _collect(args: argparse.Namespace, config: TargetConfig, *, num_layers: int) -> list[RecordedAnswer]:
    """Write the data folders of the traffic, unless an earlier run did; return the answers to check with."""
    data: Path = args.out / _DATA
    if data.exists():
        say(f"traffic: going on with what {args.out} holds; name another --out for what was recorded since")
    else:
        parts = _parts(args, config, num_layers=num_layers)
        fresh = data.with_name(f".{_DATA}.part")
        shutil.rmtree(fresh, ignore_errors=True)  # of a run that was killed here
        try:
            fresh.mkdir(mode=0o700)  # it holds what users of the server wrote
        except OSError as error:
            raise ConfigError(f"--out: {args.out} cannot be written: {error}") from error
        for name, part in (("learn", parts.learn), ("rate", parts.rate), ("check", parts.check)):
            write_part(fresh / name, part, target_hash=config.model_hash, held_out=name == "check")
        write_settings(args, fresh, target_hash=config.model_hash)
        fresh.rename(data)
    return list(read_part(data / "check"))


def _commands(args: argparse.Namespace, served: DrafterConfig, *, max_tokens: int) -> list[list[str]]:
    """Return the steps, each a command of `dspark-build` that can be run again by hand."""
    out: Path = args.out
    data = out / _DATA
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
        "data": [data / "learn", *args.data],
        "out": out / "run",
        "init": args.drafter,
        "vocab-from": args.drafter,
    }
    learn |= {"lr": args.lr, "max-minutes": args.minutes, "kl-weight": 0.5, "kl-until": 0.4, "ema": 0.99}
    rate = {
        "data": data / "rate",
        "out": out / "rated",
        "init": learnt,
        "vocab-from": learnt,
        "confidence-only": True,
    }
    rate |= {"all-slots": True, "lr": 3e-3, "ema": 0.98, "max-minutes": min(_RATING_MINUTES, args.minutes)}
    features = common | {"only": "features", "feature-layers": layers, "max-bytes": f"{args.max_bytes:.0f}"}
    return [
        _command("data", features | {"out": data / "learn"}),
        _command("data", features | {"out": data / "rate"}),
        _command("train", shape | learn),
        _command("train", shape | rate),
        _command("calibrate", common | {"drafter": rated, "data": data / "check", "max-tokens": max_tokens}),
    ]


def _command(name: str, options: Mapping[str, object]) -> list[str]:
    """Return the words of a command: true stands for an option without value, false for no option.

    A value is in the word of its option: layers may begin with -1, which by itself reads as an option.
    """
    words = [name]
    for option, value in options.items():
        if isinstance(value, list):
            words += [f"--{option}", *map(str, value)]
        elif value is not False:
            words.append(f"--{option}" if value is True else f"--{option}={value}")
    return words


def _parts(args: argparse.Namespace, config: TargetConfig, *, num_layers: int) -> TrafficParts:
    """Read the traffic and deal it out. Raises ConfigError where a part has too little to be of use."""
    answers = read_traffic(
        args.traffic,
        target_hash=config.model_hash,
        vocab_size=config.vocab_size,
        limits=TrafficLimits(
            max_sequence=min(args.max_sequence, config.max_context_len),
            max_prompt=config.max_context_len - _ROOM,
            max_tokens=int(args.max_bytes / ((num_layers + 1) * config.decoder.hidden_size * 2)),
        ),
        tell=say,
    )
    mixed_in = {answer.prompt_ids for folder in args.data for answer in read_part(folder)}
    parts = split_traffic(answers, learnt=mixed_in)
    named = {"learn from": parts.learn, "rate": parts.rate, "check": parts.check}
    prompts = {name: len({a.prompt_ids for a in part}) for name, part in named.items()}
    say(
        f"traffic: {len(answers)} answers to {sum(prompts.values())} prompts: "
        + ", ".join(f"{len(part)} to {name}" for name, part in named.items())
    )
    if len(answers) < MIN_ANSWERS:
        raise ConfigError(
            f"--traffic: {len(answers)} answers of use, needed are {MIN_ANSWERS}: let the server record more, or see "
            "--max-sequence and --max-bytes"
        )
    if min(prompts.values()) < LEAST_PROMPTS:
        dealt = ", ".join(f"{count} to {name}" for name, count in prompts.items())
        raise ConfigError(
            f"--traffic: {len(answers)} answers, but to {sum(prompts.values())} different prompts only; answers to one "
            f"prompt stay together, and each part needs {LEAST_PROMPTS} prompts, got {dealt}: let the server record "
            "more of other prompts"
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
    """Decode the checked prompts with either drafter; keep the new one where it is surely accepted further."""
    new: Path = args.out / "rated" / "drafter"
    served, trained = (
        _decode(args, answers, folder, max_tokens=max_tokens) for folder in (args.drafter, new)
    )
    for name, records in (("served", served), ("new", trained)):
        rates = " ".join(f"{rate:.2f}" for rate in records.conditional())
        print(f"{name:7} accepted length {records.accepted_len:.3f}, acceptance by position {rates}")
    gain = gain_of(served, trained)
    print(f"gain    {gain}")
    if gain.is_sure:
        kept: Path = args.out / "drafter"
        _keep(new, kept)
        print(f"{kept} is accepted further; name it as `drafter` in model.yaml and load the model again")
        return 0
    why = "is accepted less far" if gain.is_loss else "is not accepted further by more than chance"
    print(
        f"the drafter that serves stays: the new one, {new}, {why}; more recorded answers or more --minutes, "
        "with a new --out, may change that"
    )
    return 1


def _checked(answers: Sequence[RecordedAnswer]) -> list[RecordedAnswer]:
    """Return one answer of each prompt, evenly over the time of recording where there are too many."""
    single = list({a.prompt_ids: a for a in answers}.values())
    count = min(_CHECKED, len(single))
    return [single[i * len(single) // count] for i in range(count)]


def _decode(
    args: argparse.Namespace, answers: Sequence[RecordedAnswer], drafter: Path, *, max_tokens: int
) -> BlockRecords:
    asked = [
        Asked(prompt_ids=a.prompt_ids, source=str(i), temperature=a.temperature, seed=i)
        for i, a in enumerate(_checked(answers))
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


def _keep(source: Path, target: Path) -> None:
    """Copy a drafter's folder; there it is whole or not at all, also when this is killed."""
    remove_abandoned(target.parent, f"{_FRESH}*")
    fresh = Path(tempfile.mkdtemp(prefix=_FRESH, dir=target.parent))
    try:
        for path in sorted(source.iterdir()):
            with path.open("rb") as read:
                write_atomically(fresh / path.name, lambda file, read=read: shutil.copyfileobj(read, file))  # type: ignore[misc]
        fresh.chmod(0o755)
        if target.exists():  # of an earlier end of the same command
            os.rename(target, Path(tempfile.mkdtemp(prefix=_FRESH, dir=target.parent)))
        os.rename(fresh, target)
    finally:
        remove_abandoned(target.parent, f"{_FRESH}*")
