"""What `dspark-build retrain` sees before its first long step: options, drafter and data that training could not take,
and an output folder that another command made.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from dspark.drafters.checkpoint import DrafterCheckpoint
from dspark.drafters.identity import drafter_identity
from dspark.errors import CheckpointError, ConfigError
from dspark.models.config import TargetConfig
from dspark.models.loading import TargetCheckpoint

from dspark_build.feature_cache import stored_layers
from dspark_build.files import write_text
from dspark_build.manifest import load_manifest
from dspark_build.progress import say

__all__ = ["check_data", "check_drafter", "check_options", "check_settings", "write_settings"]

_NAME = "options.json"
_LEAST = {"max_sequence": 3, "sequences": 1, "anchors": 1, "max_bytes": 1, "threads": 0}
_ABOVE_0 = ("minutes", "lr")


def check_options(args: argparse.Namespace) -> None:
    """Refuse numbers that no step could take. Raises ConfigError naming the option."""
    for name, low in _LEAST.items():
        if not low <= (value := getattr(args, name)) < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')}: got {value:g}, allowed is {low} or more")
    for name in _ABOVE_0:
        if not 0.0 < (value := getattr(args, name)) < math.inf:
            raise ConfigError(f"--{name}: got {value:g}, allowed is a number above 0")


def check_drafter(found: DrafterCheckpoint, target: TargetCheckpoint) -> None:
    """Refuse a drafter that training would make into one of another kind.

    Raises:
        ConfigError: naming what it has.
    """
    config, folder = found.config, found.folder
    if not config.enable_confidence_head:
        raise ConfigError(
            f"--drafter: {folder} has no confidence head, which is what serving rates drafts by"
        )
    if any(window is not None for window in config.sliding_windows):
        raise ConfigError(
            f"--drafter: {folder} has sliding windows {list(config.sliding_windows)}; trained are drafters whose "
            "layers see the whole context"
        )
    own, wanted = config.decoder, target.config.decoder
    wanted = replace(wanted, num_layers=own.num_layers, intermediate_size=own.intermediate_size)
    for name in own.__dataclass_fields__:
        here, there = getattr(own, name), getattr(wanted, name)
        if here != there:
            raise ConfigError(
                f"--drafter: {folder} has {name} {here}, the target {there}; trained are drafters with the target's"
            )
    _check_tables(found, target)
    if config.markov_rank and found.draft_to_target is not None and found.previous_to_row is None:
        say(
            "drafter: its sequential head tells all tokens of the target apart; what goes on has a row for each token "
            "it can draft and one for all others"
        )


def _check_tables(found: DrafterCheckpoint, target: TargetCheckpoint) -> None:
    """Refuse an embedding or LM head that is not the target's: training uses the target's. A copy of it is fine."""
    tied = target.config.tie_word_embeddings
    names = {"embed_tokens.weight": "embed_tokens.weight"}
    names["lm_head.weight"] = "embed_tokens.weight" if tied else "lm_head.weight"
    for name, there in names.items():
        if name not in found.weights.names():
            continue
        wanted = target.weights.float32(there)
        if name == "lm_head.weight" and found.draft_to_target is not None:
            wanted = wanted[found.draft_to_target]
        if not np.allclose(found.weights.float32(name), wanted, rtol=0.01, atol=0.001):
            raise ConfigError(
                f"--drafter: {found.folder} has an {name} that is not the target's; trained are drafters with the "
                "target's"
            )


def check_data(folders: list[Path], *, target: TargetConfig, layer_ids: tuple[int, ...]) -> None:
    """Refuse data to mix in that is of another target or lacks the drafter's feature layers.

    Raises:
        CheckpointError: naming the folder and, for layers, the command that adds them.
    """
    for folder in folders:
        manifest = load_manifest(folder)
        if manifest.target_hash != target.model_hash:
            raise CheckpointError(
                f"--data: {folder} was made for target {manifest.target_hash}, this target is {target.model_hash}"
            )
        try:
            stored = stored_layers(folder)
        except CheckpointError:
            stored = []
        if not any(set(layer_ids) <= set(layers) for layers in stored):
            names = ",".join(map(str, layer_ids))
            raise CheckpointError(
                f"--data: {folder} has features of layers {[list(layers) for layers in stored]}, the drafter needs "
                f"{list(layer_ids)}; make them with `dspark-build data --only features --feature-layers={names} "
                f"--target ... --out {folder}`"
            )


def check_settings(args: argparse.Namespace, *, data: Path, target_hash: str) -> None:
    """See that --out was made with the same options as now, or holds nothing yet.

    Arguments:
        data: folder in --out that `write_settings` wrote to, or that is not there yet.

    Raises:
        ConfigError: another option, named with both values; or other things in --out.
        CheckpointError: what an earlier run wrote cannot be read.
    """
    path = data / _NAME
    if not path.exists():
        if others := sorted(
            one.name for one in args.out.iterdir() if not one.name.startswith(f".{data.name}.")
        ):
            raise ConfigError(f"--out: {args.out} holds other things ({others[0]}); name a new folder")
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; name a new --out") from error
    for name, asked in _settings(args, target_hash).items():
        here = found.get(name) if isinstance(found, dict) else None
        if here != asked:
            raise ConfigError(
                f"--{name.replace('_', '-')}: {args.out} was made with {here}, asked for is {asked}; name a new --out, "
                "or go on with what it was made with"
            )


def write_settings(args: argparse.Namespace, data: Path, *, target_hash: str) -> None:
    """Write what `check_settings` compares."""
    write_text(data / _NAME, json.dumps(_settings(args, target_hash), indent=2) + "\n")


def _settings(args: argparse.Namespace, target_hash: str) -> dict[str, object]:
    """Return what decides the course of a run, under the options' names."""
    numbers = ("minutes", "lr", "max_sequence", "max_bytes", "sequences", "anchors")
    return {
        "target": target_hash,
        "drafter": f"{args.drafter} ({drafter_identity(str(args.drafter))[:12]})",
        "traffic": [str(folder.resolve()) for folder in args.traffic],
        "data": [str(folder.resolve()) for folder in args.data],
        **{name: getattr(args, name) for name in numbers},
    }
