"""Everything a run needs to go on bit for bit, in one file; order and anchors need none, they follow from
the seed.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from dspark.errors import CheckpointError, ConfigError
from torch import Tensor

from dspark_build.files import write_atomically

__all__ = ["Counters", "Ema", "TrainSettings", "load_state", "save_state"]

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """What decides the course of a run; a run is only resumed with the same."""

    target_hash: str
    data_hash: str
    num_layers: int
    intermediate_size: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    markov_rank: int
    markov_head_type: str
    confidence: bool
    confidence_with_markov: bool
    confidence_only: bool  # nothing else learns
    draft_vocab_size: int
    init: str
    sequences: int  # of one micro-batch
    anchors: int  # of one sequence
    accumulate: int  # micro-batches of a step
    sample_slots: bool
    positions: int  # the schedule's length; also the end
    max_minutes: float  # 0 = none; else the schedule ends with whatever comes first
    optimizer: str  # muon or adamw
    lr: float
    min_lr_share: float
    warmup_share: float
    weight_decay: float
    clip: float
    ema: float  # 0 = none
    ce: float
    tv: float
    kl: float
    kl_until: float  # share of the run after which kl is 0
    confidence_weight: float
    decay: float
    dtype: str
    seed: int
    repeat_hot: int  # times that an answer of temperature 0.9 or above counts


@dataclass(slots=True)
class Counters:
    """How far a run is."""

    step: int = 0
    positions: int = 0  # slots whose label was an answer token
    elapsed_s: float = 0.0


class Ema:
    """A running mean of the parameters; young means forget faster."""

    def __init__(self, parameters: dict[str, Tensor], decay: float) -> None:
        self.decay = decay
        self.mean = {name: value.detach().clone() for name, value in parameters.items()}

    def update(self, parameters: dict[str, Tensor], step: int) -> None:
        decay = min(self.decay, (1.0 + step) / (10.0 + step))
        torch._foreach_lerp_(
            list(self.mean.values()), [value.detach() for value in parameters.values()], 1.0 - decay
        )


def save_state(
    path: Path,
    *,
    settings: TrainSettings,
    counters: Counters,
    parameters: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    ema: Ema | None,
    draft_to_target: Tensor,
) -> None:
    """Write the state atomically. Raises CapacityError when the disk is full; the state before it stays."""
    content = {
        "format_version": FORMAT_VERSION,
        "settings": asdict(settings),
        "counters": asdict(counters),
        "parameters": {name: value.detach() for name, value in parameters.items()},
        "optimizer": optimizer.state_dict(),
        "ema": None if ema is None else ema.mean,
        "draft_to_target": draft_to_target,
    }
    write_atomically(path, lambda file: torch.save(content, file))


def load_state(path: Path, *, settings: TrainSettings, device: torch.device) -> dict[str, Any]:
    """Read the state of a run with the same settings.

    Raises:
        ConfigError: a setting differs; names it and both values.
        CheckpointError: the file is damaged or of another format.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({error}); delete it to start again") from error
    if state.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format_version must be {FORMAT_VERSION}, got {state.get('format_version')!r}"
        )
    for field in fields(TrainSettings):
        there, here = state["settings"].get(field.name), getattr(settings, field.name)
        if there != here:
            raise ConfigError(
                f"{path.parent}: was trained with {field.name} {there!r}, asked for is "
                f"{here!r}; use another --out, the "
                "same setting, or --restart"
            )
    return state


def remove_state(path: Path) -> None:
    """Forget a run."""
    if path.exists():
        os.remove(path)
