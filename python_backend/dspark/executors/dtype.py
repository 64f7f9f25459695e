"""Which compute type a machine is good at."""

from __future__ import annotations

from typing import Literal

import torch

from dspark.errors import ConfigError

__all__ = ["DtypeName", "auto_dtype", "torch_dtype"]

DtypeName = Literal["float32", "bfloat16", "float16"]

_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def auto_dtype(device: str = "cpu") -> DtypeName:
    """Return bfloat16 where the device computes in it (AVX512-BF16, AMX, a GPU with it), else float32."""
    if torch.device(device).type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if has_bf16 else "float32"


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch type of a name.

    Raises:
        ConfigError: for any other name.
    """
    try:
        return _DTYPES[name]
    except KeyError:
        raise ConfigError(f"dtype is {name!r}, allowed are {', '.join(_DTYPES)}") from None
