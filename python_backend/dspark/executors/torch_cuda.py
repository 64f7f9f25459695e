"""The torch executors on a GPU: our operations, fixed shapes, a CUDA graph for each decoding pass.

Buckets, padding and the copies to and fro are those of the engines' runtime (tensorrt_target.py, tensorrt_drafter.py);
what runs is `device_pass` of the torch executors. Never run on a GPU.
"""

from __future__ import annotations

import torch

from dspark.config import ServeConfig, drafter_dtype
from dspark.drafters.checkpoint import DrafterCheckpoint, load_drafter_checkpoint
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.loading import DrafterOutline
from dspark.errors import ConfigError
from dspark.executors.dtype import auto_dtype
from dspark.executors.tensorrt_bindings import DTYPE_NAMES, VerifyShape
from dspark.executors.tensorrt_buckets import EngineShapes
from dspark.executors.tensorrt_drafter import TensorRTBlockDrafter
from dspark.executors.tensorrt_loading import EnginePair, engine_shapes
from dspark.executors.tensorrt_target import TensorRTTarget
from dspark.executors.torch_drafter import TorchBlockDrafter
from dspark.executors.torch_session import Capture, CudaCapture, TorchPair, TorchSession
from dspark.executors.torch_target import TorchTarget
from dspark.models.loading import TargetCheckpoint

__all__ = ["load_pair_on", "pair_on", "torch_device"]

_PRECISIONS = {name: precision for precision, name in DTYPE_NAMES.items()}


def load_pair_on(
    name: str, checkpoint: TargetCheckpoint, *, spec: str, outline: DrafterOutline, config: ServeConfig
) -> EnginePair:
    """Load what the settings name onto a device.

    Arguments:
        name: of the device.
        spec, outline: the drafter; for a builtin one there is nothing to load.

    Raises:
        ConfigError: no such GPU, or a dtype that torch has not.
    """
    device = torch_device(name)
    for setting in ("dtype", "drafter_dtype"):
        if (value := getattr(config, setting)) not in ("auto", *_PRECISIONS):
            raise ConfigError(
                f"{setting}: got {value!r}, allowed on {device} are auto, {', '.join(_PRECISIONS)}"
            )
    shapes = engine_shapes(
        max_sequences=config.max_batch_size,
        max_step_tokens=config.max_step_tokens,
        max_context_len=config.max_context_len or checkpoint.config.max_context_len,
        page_size=config.page_size,
        block_size=outline.block_size,
    )
    drafter = load_drafter_checkpoint(spec, target=checkpoint.config) if outline.kind == "dspark" else None
    return pair_on(
        device,
        checkpoint,
        drafter,
        dtype=config.dtype,
        shapes=shapes,
        page_size=config.page_size,
        layer_ids=outline.feature_layer_ids,
    )


def torch_device(name: str) -> torch.device:
    """Return the device that the setting `device` names.

    Raises:
        ConfigError: there is no such GPU.
    """
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            there = (
                f"cuda:0 to cuda:{count - 1}"
                if count
                else f"cpu: torch {torch.__version__} finds no CUDA GPU"
            )
            raise ConfigError(f"device: got {name!r}, allowed here are {there}")
    return device


def pair_on(
    device: torch.device,
    checkpoint: TargetCheckpoint,
    drafter: DrafterCheckpoint | None,
    *,
    dtype: str,
    shapes: EngineShapes,
    page_size: int,
    blocks_dtype: str = "auto",
    capture: Capture | None = None,
    layer_ids: tuple[int, ...] = (),
) -> EnginePair:
    """Load a target and, where there is one, its drafter; with the same dtype they share embedding and head.

    Arguments:
        dtype: float32, bfloat16 or float16; auto = what the device is good at.
        blocks_dtype: of the drafter; auto = the target's.
        shapes: the largest pass; the small ones are captured when caches are allocated.
        capture: None = CUDA graphs on a GPU, nothing elsewhere.
        layer_ids: features that a drafter of another kind wants.
    """
    chosen = auto_dtype(str(device)) if dtype == "auto" else dtype
    layers = drafter.config.target_layer_ids if drafter else layer_ids
    model = TorchTarget(
        checkpoint.config, checkpoint.weights, dtype=chosen, feature_layer_ids=layers, device=str(device)
    )
    model.use_pages(page_size)
    model.know_drafts(drafter.draft_to_target if drafter else None)
    memory = TorchPair(device)
    target = TensorRTTarget(
        TorchSession(model, device, _capture_on(device, capture), memory),
        checkpoint.config,
        checkpoint.weights,
        precision=_PRECISIONS[chosen],
        feature_layer_ids=layers,
        shapes=shapes,
        verify=VerifyShape.of(drafter.config if drafter else None),
    )
    if drafter is None:
        return EnginePair(target, None)
    embedding, head = target.embedding_and_head()
    blocks = drafter_dtype(blocks_dtype, executor="torch", target_dtype=chosen)
    block_model = TorchBlockDrafter(
        drafter,
        target_embedding=embedding,
        target_head=head,
        dtype=blocks,
        device=str(device),
        tables=model.tables() if blocks == chosen else None,
    )
    block_model.use_pages(page_size)
    session = TorchSession(block_model, device, _capture_on(device, capture), memory)
    executor = TensorRTBlockDrafter(session, drafter, precision=_PRECISIONS[blocks], shapes=shapes)
    return EnginePair(target, DSparkDrafter(executor, drafter.draft_to_target))


def _capture_on(device: torch.device, capture: Capture | None) -> Capture | None:
    return CudaCapture(device) if capture is None and device.type == "cuda" else capture
