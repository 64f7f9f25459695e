"""Rotary position embedding of the half-split kind, in float32."""

from __future__ import annotations

import torch

__all__ = ["rope_tables", "rotate"]


def rope_tables(
    positions: torch.Tensor, frequencies: torch.Tensor, attention_factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [T, 1, D/2] float32 of rows at `positions` [T].

    Arguments:
        frequencies: [D/2] float32 inverse frequencies.
        attention_factor: multiplies both tables (YaRN).
    """
    angles = positions.to(torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    if attention_factor != 1.0:
        cos, sin = cos * attention_factor, sin * attention_factor
    return cos[:, None], sin[:, None]


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return `heads` [T, H, D] rotated, float32; element j pairs with element j + D/2."""
    first, second = heads.float().chunk(2, dim=-1)
    rotated = torch.empty_like(heads, dtype=torch.float32)
    half = rotated.shape[-1] // 2
    torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[..., half:]).addcmul_(first, sin)
    return rotated
