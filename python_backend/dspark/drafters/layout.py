"""What a drafter's config.json says, in our words: the published layouts, the slot convention, every refusal.

Read are DeepSpec's flat layout (`Qwen3DSparkModel`: keys at the top level), the same keys nested under
`dflash_config` or `dspark_config`, and the speculators layout (`transformer_layer_config`,
`aux_hidden_state_layer_ids`). Knows no tensors beyond the one fact that it is told: whether there are query
and key norms.

Slot convention. Published drafters use one of two block layouts, and nothing in the weights tells them apart:

* `sample_from_anchor` true, ours: the anchor and G-1 masks go in, every slot predicts the token after it, G
  drafts come out;
* `sample_from_anchor` false (DFlash): the anchor and masks go in, only the masks predict, themselves.

The explicit key decides. Without it DeepSpec's own layout (`markov_rank` at the top level) is the first by
construction; the architectures `DFlashDraftModel` and `DSparkDraftModel` have been exported with the second
and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from dspark.errors import CheckpointError
from dspark.models.checks import require_neutral
from dspark.models.config import DecoderConfig, DrafterConfig, TargetConfig
from dspark.models.hf import read_decoder, read_json

__all__ = [
    "FORMAT_VERSION",
    "PreviousVocab",
    "config_to_json",
    "parse_config",
    "previous_vocab",
    "read_config_file",
]

FORMAT_VERSION = 1
PreviousVocab = Literal["target", "draft"]  # what the rows of markov_w1 are indexed by

_NESTED = ("dflash_config", "dspark_config")
_AMBIGUOUS_ARCHITECTURES = ("DFlashDraftModel", "DSparkDraftModel", "DSparkSpeculator")
_HEADS = ("vanilla", "gated", "rnn")
_WINDOW_KEYS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
_WHERE = "drafter config.json"
# Keys of drafters that change the maths, with the values under which they change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention_sink_bias": (False, None),
    "causal": (False, None),
    "draft_adapter_rank": (0, None),
}


def read_config_file(folder: Path) -> dict[str, Any]:
    """Return config.json of a drafter folder, flattened into DeepSpec's names.

    Raises:
        CheckpointError: no such file, not a JSON object, or the same key with two values.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: a drafter is a folder with config.json and *.safetensors, found none"
        )
    return _flatten(read_json(folder / "config.json"))


def _flatten(raw: Mapping[str, Any]) -> dict[str, Any]:
    flat = {key: value for key, value in raw.items() if key not in (*_NESTED, "transformer_layer_config")}
    for block_name in (*_NESTED, "transformer_layer_config"):
        block = raw.get(block_name) or {}
        if not isinstance(block, Mapping):
            raise CheckpointError(f"{block_name}: must be a JSON object, got {block!r}")
        for key, value in block.items():
            if block_name == "transformer_layer_config":
                flat.setdefault(key, value)
            elif flat.setdefault(key, value) != value:
                raise CheckpointError(f"{key}: {flat[key]!r} at the top level but {value!r} in {block_name}")
    if "aux_hidden_state_layer_ids" in flat and "target_layer_ids" not in flat:
        ids = flat["aux_hidden_state_layer_ids"]
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            raise CheckpointError(f"aux_hidden_state_layer_ids: must be whole numbers, got {ids!r}")
        flat["target_layer_ids"] = [i - 1 for i in ids]  # they count the embedding output as layer 0
    # Where a nested block brings the DSpark keys, the top level did not say DeepSpec.
    flat["_deepspec"] = "markov_rank" in raw
    return flat


def parse_config(flat: Mapping[str, Any], *, target: TargetConfig, has_qk_norm: bool) -> DrafterConfig:
    """Return the drafter's configuration after checking it against the target.

    Arguments:
        flat: what `read_config_file` returned.
        target: the target it is to draft for.
        has_qk_norm: whether the checkpoint holds query or key norms.

    Raises:
        CheckpointError: naming the key, its value and what the target or this project needs.
    """
    _check_format(flat)
    _check_slots(flat)
    require_neutral(flat, _NEUTRAL, where=_WHERE)
    vocab_size = _whole(flat, "vocab_size", 1)
    block_size = _whole(flat, "block_size", 1)
    draft_vocab_size = _whole(flat, "draft_vocab_size", 1) if flat.get("draft_vocab_size") else vocab_size
    decoder = _decoder(flat, has_qk_norm)
    markov_rank = _whole(flat, "markov_rank", 0)
    head = flat.get("markov_head_type") if markov_rank or flat.get("markov_head_type") else "vanilla"
    if head not in _HEADS:
        raise CheckpointError(f"markov_head_type: must be one of {', '.join(_HEADS)}, got {head!r}")
    confidence = _flag(flat, "enable_confidence_head", default=False)
    with_markov = _flag(flat, "confidence_head_with_markov", default=None if confidence else True)
    if confidence and with_markov and not markov_rank:
        raise CheckpointError("confidence_head_with_markov: true needs markov_rank > 0, got markov_rank 0")
    config = DrafterConfig(
        decoder=decoder,
        vocab_size=vocab_size,
        block_size=block_size,
        target_layer_ids=_layer_ids(flat, target),
        mask_token_id=_whole(flat, "mask_token_id", 0),
        markov_rank=markov_rank,
        markov_head_type=cast(Literal["vanilla", "gated", "rnn"], head),
        enable_confidence_head=confidence,
        confidence_head_with_markov=with_markov,
        sliding_windows=_windows(flat, decoder.num_layers),
        draft_vocab_size=draft_vocab_size,
        target_hash=flat.get("target_hash"),
    )
    _check_target(config, target, flat.get("num_target_layers"))
    return config


def previous_vocab(flat: Mapping[str, Any]) -> PreviousVocab:
    """Return what indexes the rows of markov_w1: every target token, or draft tokens and one row for all
    others."""
    value = flat.get("markov_previous_vocab", "target")
    if value not in ("target", "draft"):
        raise CheckpointError(f"markov_previous_vocab: must be target or draft, got {value!r}")
    return cast(PreviousVocab, value)


def config_to_json(config: DrafterConfig, *, previous: PreviousVocab) -> dict[str, Any]:
    """Return the config.json of a drafter in DeepSpec's layout, with the slot convention spelled out.

    Raises:
        CheckpointError: sliding windows of different sizes, which the layout cannot say.
    """
    decoder, rope = config.decoder, config.decoder.rope
    windows = config.sliding_windows or (None,) * decoder.num_layers
    sizes = sorted({window for window in windows if window is not None})
    if len(sizes) > 1:
        raise CheckpointError(f"sliding_windows: one size for all sliding layers, got {sizes}")
    rope_parameters: dict[str, Any] = {"rope_type": rope.scaling, "rope_theta": rope.theta}
    if rope.scaling != "default":
        names: tuple[str, ...] = ("factor",)
        if rope.scaling != "linear":
            names += ("original_max_position_embeddings",)
        if rope.scaling == "llama3":
            names += ("low_freq_factor", "high_freq_factor")
        if rope.scaling == "yarn":
            names += ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
        values = {name: getattr(rope, name) for name in names}
        rope_parameters |= {name: value for name, value in values.items() if value is not None}
    divisors = {"rope_frequency_divisors": list(rope.frequency_divisors)} if rope.frequency_divisors else {}
    return divisors | {
        "architectures": ["Qwen3DSparkModel" if decoder.qk_norm else "LlamaDSparkModel"],
        "format_version": FORMAT_VERSION,
        "model_type": "qwen3" if decoder.qk_norm else "llama",
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "rms_norm_eps": decoder.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_parameters": rope_parameters,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "sliding_window": sizes[0] if sizes else None,
        "sliding_window_non_causal": True,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "block_size": config.block_size,
        "sample_from_anchor": True,
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "markov_previous_vocab": previous,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov and config.markov_rank > 0,
        "target_hash": config.target_hash,
    }


def _check_format(flat: Mapping[str, Any]) -> None:
    version = flat.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise CheckpointError(f"format_version: this release reads {FORMAT_VERSION}, got {version!r}")


def _check_slots(flat: Mapping[str, Any]) -> None:
    ours = "anchor + (block_size - 1) masks where every slot predicts (sample_from_anchor true)"
    other = "anchor + masks where only the masks predict (sample_from_anchor false)"
    said = flat.get("sample_from_anchor")
    if said is True:
        return
    if said is not None:
        raise CheckpointError(f"slot convention: served is {ours}; the checkpoint has {other}: got {said!r}")
    architectures = flat.get("architectures") or []
    ambiguous = [name for name in architectures if name in _AMBIGUOUS_ARCHITECTURES]
    if not flat["_deepspec"] or ambiguous:
        shown = ambiguous or architectures or "none"
        raise CheckpointError(
            f"slot convention: served is {ours}; the checkpoint may have {other}: it has no "
            f"sample_from_anchor key, its architectures are {shown} and markov_rank is "
            f"{'' if flat['_deepspec'] else 'not '}at the top level; add sample_from_anchor where it is known"
        )


def _decoder(flat: Mapping[str, Any], has_qk_norm: bool) -> DecoderConfig:
    model_type = flat.get("model_type")
    if model_type not in (None, "llama", "qwen3"):
        raise CheckpointError(f"model_type: must be llama or qwen3, got {model_type!r}")
    # Windows are read here, not by the target's reader, which knows none.
    fields = {key: value for key, value in flat.items() if key not in _WINDOW_KEYS}
    decoder = read_decoder(fields, qk_norm=has_qk_norm or model_type == "qwen3", where=_WHERE)
    divisors = flat.get("rope_frequency_divisors") or ()
    if len(divisors) not in (0, decoder.head_dim // 2):
        raise CheckpointError(
            f"rope_frequency_divisors: must be {decoder.head_dim // 2} numbers, got {len(divisors)}"
        )
    return replace(decoder, rope=replace(decoder.rope, frequency_divisors=tuple(map(float, divisors))))


def _layer_ids(flat: Mapping[str, Any], target: TargetConfig) -> tuple[int, ...]:
    ids, num_layers = flat.get("target_layer_ids"), target.decoder.num_layers
    if (
        not isinstance(ids, list)
        or not ids
        or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    ):
        raise CheckpointError(f"target_layer_ids: must be a list of whole numbers, got {ids!r}")
    if min(ids) < -1 or max(ids) >= num_layers or len(set(ids)) != len(ids):
        raise CheckpointError(
            f"target_layer_ids: must be different and from -1 to {num_layers - 1} (the target has "
            f"{num_layers} layers), got {ids}"
        )
    return tuple(ids)


def _windows(flat: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    types = flat.get("layer_types")
    if types is None:
        if flat.get("use_sliding_window"):
            raise CheckpointError("layer_types: must say which layers slide when use_sliding_window is true")
        return (None,) * num_layers
    if not isinstance(types, list) or len(types) != num_layers:
        raise CheckpointError(
            f"layer_types: must have one entry for each of {num_layers} layers, got {types!r}"
        )
    unknown = sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise CheckpointError(
            f"layer_types: must be full_attention or sliding_attention, got {', '.join(unknown)}"
        )
    if "sliding_attention" not in types:
        return (None,) * num_layers
    if flat.get("sliding_window_non_causal", True) is not True:
        raise CheckpointError(
            "sliding_window_non_causal: blocks are not causal here, got false with sliding layers"
        )
    window = _whole(flat, "sliding_window", 1)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _check_target(config: DrafterConfig, target: TargetConfig, num_target_layers: object) -> None:
    pairs = (
        ("hidden_size", config.decoder.hidden_size, target.decoder.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", num_target_layers, target.decoder.num_layers),
    )
    for key, ours, theirs in pairs:
        if ours is not None and ours != theirs:
            raise CheckpointError(
                f"{key}: the drafter has {ours}, the target {theirs}; it was made for another target"
            )
    if config.mask_token_id >= config.vocab_size:
        raise CheckpointError(
            f"mask_token_id: must be below vocab_size {config.vocab_size}, got {config.mask_token_id}"
        )
    if config.draft_vocab_size > config.vocab_size:
        raise CheckpointError(
            f"draft_vocab_size: at most vocab_size {config.vocab_size}, got {config.draft_vocab_size}"
        )
    if config.target_hash and target.model_hash and config.target_hash != target.model_hash:
        raise CheckpointError(
            f"target_hash: the drafter was made for {config.target_hash}, this target is {target.model_hash}"
        )


def _whole(flat: Mapping[str, Any], key: str, low: int) -> int:
    value = flat.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        shown = "nothing" if key not in flat else repr(value)
        raise CheckpointError(f"{key}: must be a whole number >= {low}, got {shown}")
    return value


def _flag(flat: Mapping[str, Any], key: str, *, default: bool | None) -> bool:
    value = flat.get(key, default)
    if not isinstance(value, bool):
        shown = "nothing" if key not in flat else repr(value)
        raise CheckpointError(f"{key}: must be true or false, got {shown}")
    return value
