"""From the name a user gives to a drafter: `none`, `ngram`, the folder of a checkpoint, or a smaller model."""

from __future__ import annotations

import importlib
from typing import Any, Literal, NamedTuple, cast

from dspark.config import NUM_DRAFT_TOKENS, drafter_dtype
from dspark.drafters.autoregressive import AutoregressiveDrafter
from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.drafters.draft_model import load_draft_checkpoint
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.feature_heads import HeadKind, load_head_checkpoint
from dspark.drafters.interface import Drafter
from dspark.drafters.kinds import DrafterKind, drafter_kind
from dspark.drafters.ngram import NgramDrafter
from dspark.drafters.none import NoneDrafter
from dspark.errors import ConfigError
from dspark.executors.interface import BlockDrafterExecutor, TargetExecutor
from dspark.models.config import DecoderConfig, TargetConfig
from dspark.models.tokenizer import Tokenizer

__all__ = ["DrafterOutline", "ExecutorName", "load_drafter", "peek_drafter"]

ExecutorName = Literal["auto", "torch", "native"]
_Classes = dict[str, tuple[str, str]]  # by executor: module, class
_BLOCK_EXECUTORS: _Classes = {
    "native": ("dspark.executors.native_drafter", "NativeBlockDrafter"),
    "torch": ("dspark.executors.torch_drafter", "TorchBlockDrafter"),
}
_MODEL_EXECUTORS: _Classes = {
    "native": ("dspark.executors.native_target", "NativeTarget"),
    "torch": ("dspark.executors.torch_target", "TorchTarget"),
}


class DrafterOutline(NamedTuple):
    """What the target executor must know of a drafter before either is built."""

    feature_layer_ids: tuple[int, ...]  # -1 = the embedding output
    block_size: int  # G, 0 = never drafts
    has_confidence: bool = False
    kind: DrafterKind = "none"
    decoder: DecoderConfig | None = None  # whose K/V it caches


def peek_drafter(
    spec: str,
    target: TargetConfig,
    *,
    tokenizer: Tokenizer | None = None,
    num_draft_tokens: int = NUM_DRAFT_TOKENS,
) -> DrafterOutline:
    """Check a drafter against the target and say which features it wants, without loading weights.

    Arguments:
        tokenizer: the target's, which a draft model's must equal; None where there is none.
        num_draft_tokens: G of drafters that draft token by token.

    Raises:
        ConfigError: not `none`, `ngram`, a folder or a model's file.
        CheckpointError: one that cannot be served with this target.
    """
    kind = drafter_kind(spec)
    builtin = _builtin(kind)
    if builtin is not None:
        return DrafterOutline(builtin.feature_layer_ids, builtin.block_size, kind=kind)
    if kind == "draft_model":
        model = load_draft_checkpoint(spec, target=target, tokenizer=tokenizer).config
        return DrafterOutline((), num_draft_tokens, kind=kind, decoder=model.decoder)
    if kind == "eagle3" or kind == "mtp":
        head = load_head_checkpoint(spec, kind=kind, target=target).config
        return DrafterOutline(head.target_layer_ids, num_draft_tokens, kind=kind, decoder=head.decoder)
    config = load_drafter_checkpoint(spec, target=target).config
    return DrafterOutline(
        config.target_layer_ids, config.block_size, config.enable_confidence_head, kind, config.decoder
    )


def load_drafter(
    spec: str,
    *,
    target: TargetConfig,
    target_executor: TargetExecutor,
    executor: ExecutorName = "auto",
    dtype: str = "float32",
    device: str = "cpu",
    num_draft_tokens: int = NUM_DRAFT_TOKENS,
) -> Drafter:
    """Build a drafter.

    Arguments:
        spec: `none`, `ngram`, the folder of a checkpoint, or folder or .gguf file of a smaller model.
        target: the target's configuration.
        target_executor: gives embedding and LM head where the checkpoint has none of its own.
        executor: what runs a checkpoint; auto takes the native one where it can be loaded, else torch.
        dtype: of a checkpoint's weights; auto as the setting drafter_dtype has it.
        device: of a checkpoint's weights; the native executor runs on the CPU only.
        num_draft_tokens: as for `peek_drafter`.

    Raises:
        ConfigError: not a drafter, an unknown executor, or one that cannot be loaded.
        CheckpointError: a folder that cannot be served with this target.
    """
    kind = drafter_kind(spec)
    builtin = _builtin(kind)
    if builtin is not None:
        return builtin
    if kind == "draft_model":
        return _draft_model(
            spec,
            target=target,
            target_executor=target_executor,
            executor=executor,
            dtype=dtype,
            device=device,
            block_size=num_draft_tokens,
        )
    if kind == "eagle3" or kind == "mtp":
        return _head(
            spec,
            kind=kind,
            target=target,
            target_executor=target_executor,
            dtype=dtype,
            device=device,
            block_size=num_draft_tokens,
        )
    checkpoint = load_drafter_checkpoint(spec, target=target)
    _check_layers(checkpoint.config.target_layer_ids, target_executor)
    build = _executor_class(executor, device, _BLOCK_EXECUTORS)
    native = build.__name__ == "NativeBlockDrafter"
    dtype = _dtype(dtype, native=native, target_executor=target_executor)
    options: dict[str, Any] = {} if native else {"device": device}
    if native and target_executor.name == "native":
        options["target"] = target_executor  # its packed embedding and head are shared, its threads too
    else:
        options["target_embedding"], options["target_head"] = target_executor.embedding_and_head()
    block_executor = build(checkpoint, dtype=dtype, **options)
    return DSparkDrafter(cast(BlockDrafterExecutor, block_executor), checkpoint.draft_to_target)


def _draft_model(
    spec: str,
    *,
    target: TargetConfig,
    target_executor: TargetExecutor,
    executor: ExecutorName,
    dtype: str,
    device: str,
    block_size: int,
) -> AutoregressiveDrafter:
    """Build a drafter whose runner is a smaller model in an executor of its own."""
    checkpoint = load_draft_checkpoint(spec, target=target)
    build = _executor_class(executor, device, _MODEL_EXECUTORS)
    native = build.__name__ == "NativeTarget"
    runner = build(
        checkpoint.config,
        checkpoint.weights,
        dtype=_dtype(dtype, native=native, target_executor=target_executor),
        num_threads=getattr(target_executor, "num_threads", None) if native else None,
        **({} if native else {"device": device}),
    )
    return AutoregressiveDrafter(
        runner,
        name="draft_model",
        block_size=block_size,
        max_context_len=checkpoint.config.max_context_len,
    )


def _head(
    spec: str,
    *,
    kind: HeadKind,
    target: TargetConfig,
    target_executor: TargetExecutor,
    dtype: str,
    device: str,
    block_size: int,
) -> AutoregressiveDrafter:
    """Build a drafter whose runner is a head in torch, whatever runs the target."""
    from dspark.executors.dtype import auto_dtype
    from dspark.executors.torch_head import TorchHead

    checkpoint = load_head_checkpoint(spec, kind=kind, target=target)
    _check_layers(checkpoint.config.target_layer_ids, target_executor)
    if dtype == "auto":
        dtype = target_executor.dtype if target_executor.dtype != "int8" else auto_dtype(device)
    embedding, head = target_executor.embedding_and_head()
    runner = TorchHead(
        checkpoint,
        target_embedding=embedding,
        target_head=head,
        dtype=dtype,
        device=device,
        num_threads=getattr(target_executor, "num_threads", None),
    )
    return AutoregressiveDrafter(
        runner,
        name=kind,
        block_size=block_size,
        max_context_len=target.max_context_len,
        draft_to_target=checkpoint.draft_to_target,
        features=(runner, checkpoint.config.target_layer_ids),
    )


def _check_layers(wanted: tuple[int, ...], target_executor: TargetExecutor) -> None:
    if target_executor.feature_layer_ids != wanted:
        raise ConfigError(
            f"feature_layer_ids: the drafter reads target layers {wanted}, "
            f"the target executor was made for {target_executor.feature_layer_ids}"
        )


def _dtype(wanted: str, *, native: bool, target_executor: TargetExecutor) -> str:
    """Return the type of a drafter's weights; a target is asked for its own only where that is left open."""
    if wanted != "auto":
        return wanted
    name = "native" if native else "torch"
    return drafter_dtype(wanted, executor=name, target_dtype=target_executor.dtype)


def _builtin(kind: DrafterKind) -> Drafter | None:
    """Return the drafter of a reserved name, None for the others."""
    if kind == "none":
        return NoneDrafter()
    return NgramDrafter() if kind == "ngram" else None


def _executor_class(name: ExecutorName, device: str, classes: _Classes) -> type[Any]:
    """Import one executor, and with it torch or the native library only where it is used."""
    if name not in ("auto", *classes):
        raise ConfigError(f"executor: must be auto, native or torch, got {name!r}")
    if name == "native" and device != "cpu":
        raise ConfigError(f"device: the native executor runs on cpu, got {device!r}")
    wanted: tuple[str, ...] = (name,)
    if name == "auto":
        wanted = ("native", "torch") if device == "cpu" else ("torch",)
    failures = []
    for candidate in wanted:
        module, class_name = classes[candidate]
        try:
            return cast(type[Any], getattr(importlib.import_module(module), class_name))
        except (ImportError, OSError) as error:
            failures.append(f"{candidate}: {error}")
    raise ConfigError(f"executor: {name} cannot be loaded ({'; '.join(failures)})")
