"""What a drafter starts from: the target's layers, an earlier drafter, or chance; and which tokens it may
draft.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from dspark.drafters.checkpoint import DrafterCheckpoint, load_drafter_checkpoint, save_drafter_checkpoint
from dspark.errors import ConfigError
from dspark.models.config import DrafterConfig, TargetConfig, WeightSource
from dspark.models.loading import TargetCheckpoint
from torch import Tensor

from dspark_build.training_model import DrafterModel

__all__ = ["choose_draft_vocab", "export_drafter", "initialise"]

Int32 = npt.NDArray[np.int32]


def choose_draft_vocab(counts: npt.NDArray[np.int64], *, size: int, required: tuple[int, ...]) -> Int32:
    """Return the `size` most frequent tokens, ascending; `required` ones are always among them.

    Among equals the lower id wins: byte-pair vocabularies list frequent pieces first.

    Raises:
        ConfigError: the size is not in [1, V].
    """
    if not 1 <= size <= len(counts):
        raise ConfigError(f"--draft-vocab: got {size}, allowed is 1 to {len(counts)}")
    weighted = counts.copy()
    weighted[list(required)] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-weighted, kind="stable")[:size]).astype(np.int32)


def initialise(model: DrafterModel, checkpoint: TargetCheckpoint, *, init: str, seed: int) -> None:
    """Set every parameter.

    Arguments:
        init: `random`; `layers:A,B,...` (one target layer for each drafter layer); or a drafter folder of
            the same shape. Its block size and its draft vocabulary may differ: tokens that it could not draft
            start from its row for other tokens (W1) and from no bias (W2). A model without a sequential head
            leaves that of the folder away. A deeper one drafts as the folder does at first: its further layers
            are copies of the last that add nothing yet.

    Raises:
        ConfigError: layers that are too few, too many or out of range; a drafter of another shape.
    """
    weights = checkpoint.weights
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif parameter.dim() == 2 and not name.startswith("markov_head.markov_w2"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
            else:
                parameter.zero_()
        model.norm.weight.copy_(
            torch.from_numpy(weights.float32("norm.weight"))
        )  # what the frozen head expects
        if model.markov_head is not None:
            _principal_rows(model, model.markov_head.markov_w1.weight)
        if init == "random":
            return
        if init.startswith("layers:"):
            _copy_layers(model, checkpoint, init)
        else:
            _copy_drafter(model, Path(init), checkpoint.config)


def export_drafter(
    folder: Path,
    model: DrafterModel,
    parameters: dict[str, Tensor],
    *,
    greedy_confidence: npt.NDArray[np.float32] | None = None,
    dtype: str = "float16",
) -> None:
    """Write the serving checkpoint: the parameters and the draft vocabulary, without embedding and head.

    Arguments:
        greedy_confidence: [G, 3] weights that rate arg-max drafts, where they were fitted.
    """
    config = model.config
    tensors = {name: value.detach().float().cpu().numpy() for name, value in parameters.items()}
    if greedy_confidence is not None:
        tensors["confidence_head.greedy.weight"] = greedy_confidence
    reduced = config.draft_vocab_size < config.vocab_size
    save_drafter_checkpoint(
        folder,
        config,
        tensors,
        draft_to_target=model.frozen.draft_to_target.cpu().numpy().astype(np.int32) if reduced else None,
        dtype=dtype,  # type: ignore[arg-type]
    )


def _principal_rows(model: DrafterModel, rows: Tensor) -> None:
    """Start W1 as the embedding's leading principal components at unit size: like tokens, like rows."""
    embedding = model.frozen.embedding[model.frozen.draft_to_target].float()
    centred = embedding - embedding.mean(0)
    rank = rows.shape[1]
    values, vectors = torch.linalg.eigh(centred.T @ centred)
    leading = vectors[:, values.argsort(descending=True)[:rank]]
    projected = centred @ leading
    projected = projected / projected.pow(2).mean().sqrt().clamp(min=1e-6)
    rows.zero_()
    rows[: projected.shape[0], : projected.shape[1]] = projected


def _copy_layers(model: DrafterModel, checkpoint: TargetCheckpoint, init: str) -> None:
    config = checkpoint.config.decoder
    try:
        ids = [int(part) for part in init.removeprefix("layers:").split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--init: got {init!r}, allowed is layers:A,B with one target layer each"
        ) from error
    own = model.config.decoder
    if len(ids) != own.num_layers or not all(0 <= i < config.num_layers for i in ids):
        raise ConfigError(
            f"--init: got {init!r}, allowed are {own.num_layers} target layers from "
            f"0 to {config.num_layers - 1}"
        )
    if own.intermediate_size != config.intermediate_size:
        raise ConfigError(
            f"--init: {init} needs the target's intermediate size {config.intermediate_size}, got "
            f"{own.intermediate_size}"
        )
    for layer, source in zip(model.layers, ids, strict=True):
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.from_numpy(checkpoint.weights.float32(f"layers.{source}.{name}")))
    _imitate_context(model, checkpoint, ids)


def _imitate_context(model: DrafterModel, checkpoint: TargetCheckpoint, sources: list[int]) -> None:
    """Let the context enter K and V nearly as it does in the copied layers.

    A target layer l sees norm_l(h_{l-1}). `fc` starts by picking the stored feature nearest to that for every
    source and taking their mean, the norm as the mean of the sources' input norms; with one source whose input is
    stored this is exact.
    """
    layer_ids = model.config.target_layer_ids
    d = model.config.decoder.hidden_size
    fc = 0.002 * torch.randn(model.fc.weight.shape, generator=_generator(1))
    for source in sources:
        nearest = min(range(len(layer_ids)), key=lambda at: abs(layer_ids[at] - (source - 1)))
        fc[:, nearest * d : (nearest + 1) * d] += torch.eye(d) / len(sources)
    model.fc.weight.copy_(fc)
    norms = [checkpoint.weights.float32(f"layers.{source}.input_layernorm.weight") for source in sources]
    model.hidden_norm.weight.copy_(torch.from_numpy(np.mean(norms, axis=0)))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _copy_drafter(model: DrafterModel, folder: Path, target: TargetConfig) -> None:
    found = load_drafter_checkpoint(folder, target=target)
    # No weight depends on the block size, and nothing but the weights is taken over.
    own = model.config
    comparable = replace(
        found.config,
        target_hash=own.target_hash,
        sliding_windows=(),
        block_size=own.block_size,
        draft_vocab_size=own.draft_vocab_size,
    )
    num_layers = found.config.decoder.num_layers
    if own.decoder.num_layers > num_layers:
        deeper = replace(found.config.decoder, num_layers=own.decoder.num_layers)
        comparable = replace(comparable, decoder=deeper)
    if not own.markov_rank:
        comparable = replace(
            comparable,
            markov_rank=0,
            markov_head_type=own.markov_head_type,
            confidence_head_with_markov=own.confidence_head_with_markov,
        )
    if comparable != replace(model.config, sliding_windows=()):
        raise ConfigError(f"--init: {folder} is {_shape(found.config)}, this run is {_shape(model.config)}")
    for name, parameter in model.named_parameters():
        value = _of_layer(found.weights, name, num_layers)
        if name.startswith("markov_head.markov_w"):
            value = _rows_of_vocab(value, found, model, is_bias=name.startswith("markov_head.markov_w2"))
        if name == "confidence_head.proj.weight" and not own.markov_rank:
            value = value[:, : own.decoder.hidden_size]  # the rest sees W1
        if value.shape != parameter.shape:
            raise ConfigError(
                f"--init: {folder} has {name} {list(value.shape)}, this run {list(parameter.shape)}"
            )
        parameter.copy_(value)


def _of_layer(weights: WeightSource, name: str, num_layers: int) -> Tensor:
    """Return a tensor of a drafter of `num_layers` layers; behind those a layer is the last one that adds nothing."""
    part = name.split(".")
    if part[0] != "layers" or int(part[1]) < num_layers:
        return torch.from_numpy(weights.float32(name))
    value = torch.from_numpy(weights.float32(".".join(["layers", str(num_layers - 1), *part[2:]])))
    return torch.zeros_like(value) if part[-2] in ("o_proj", "down_proj") else value


def _rows_of_vocab(value: Tensor, found: DrafterCheckpoint, model: DrafterModel, *, is_bias: bool) -> Tensor:
    """Return the rows of W1 [Vd + 1, r] (full vocabulary: [V, r]) or W2 [Vd, r] that the model has.

    W1's row for all other tokens also starts the tokens that `found` could not draft.
    """
    others = torch.zeros(1, value.shape[1])
    vocab_size = found.config.vocab_size
    row_of = torch.arange(vocab_size)
    if is_bias and found.draft_to_target is not None:
        row_of = torch.full((vocab_size,), len(value))
        row_of[torch.from_numpy(found.draft_to_target.astype(np.int64))] = torch.arange(len(value))
    elif not is_bias and found.previous_to_row is not None:
        row_of = torch.from_numpy(found.previous_to_row.astype(np.int64))
        others = value[-1:]
    rows = torch.cat([value, others])[row_of[model.frozen.draft_to_target.cpu()]]
    reduced = model.config.draft_vocab_size < vocab_size
    return torch.cat([rows, others]) if reduced and not is_bias else rows


def _shape(config: DrafterConfig) -> str:
    decoder = config.decoder
    return (
        f"{decoder.num_layers} layers of "
        f"{decoder.hidden_size}/{decoder.intermediate_size}, block {config.block_size}, "
        f"features {list(config.target_layer_ids)}, head "
        f"{config.markov_head_type} rank {config.markov_rank}, "
        f"vocabulary {config.draft_vocab_size}, confidence "
        f"{config.enable_confidence_head}, mask {config.mask_token_id}"
    )
