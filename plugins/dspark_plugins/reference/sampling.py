"""Counter-based noise, truncation and draws over rows of logits, in plain torch.

The device's half of the engine's sampling: the same counters, the same order of transforms (temperature, top-k,
top-p, min-p), the same draws. Transforms that look at a request's history are the host's.

    greedy     temperature 0: arg-max, the lowest entry among equals
    coupled    named seed: arg-max of log weight + the token's own Gumbel noise
    inverse    drawn seed: one uniform number, inversion of the running total

Source of the generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "ACCEPT",
    "DRAFT",
    "REPLACE",
    "SAMPLE",
    "TOKEN_COARSE",
    "TOKEN_FINE",
    "draw",
    "inverse_cdf",
    "philox4x32",
    "token_gumbel",
    "truncated_weights",
    "uniform",
]

# What a random number decides: the third word of its counter.
DRAFT, ACCEPT, REPLACE, SAMPLE, TOKEN_COARSE, TOKEN_FINE = range(6)

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_STEEPEST = 1e37  # largest 1 / temperature


def philox4x32(seed: Tensor, c0: Tensor, c1: Tensor, c2: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words of the counters (c0, c1, c2, 0), int64 in [0, 2**32).

    Arguments:
        seed: int64 key, any shape that broadcasts with c0 and c1.
        c0, c1: int64 counter words.
        c2: third word.
    """
    m0, m1 = _MULTIPLIERS
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1, k0, k1 = torch.broadcast_tensors(c0, c1, k0, k1)
    x0, x1, x2, x3 = c0, c1, torch.full_like(c0, c2), torch.zeros_like(c0)
    for _ in range(10):
        a, b = m0 * x0, m1 * x2  # wraps; the mask makes the arithmetic shift a logical one
        x0, x1, x2, x3 = ((b >> 32) & _MASK) ^ x1 ^ k0, b & _MASK, ((a >> 32) & _MASK) ^ x3 ^ k1, a & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return x0, x1, x2, x3


def uniform(seed: Tensor, position: Tensor, purpose: int, lane: Tensor | int = 0) -> Tensor:
    """Return float64 numbers in the open interval (0, 1), with 52 random bits.

    Arguments:
        seed, position: int64 [N].
        purpose: what the numbers decide.
        lane: int64 [N] or one for all.
    """
    lanes = lane if isinstance(lane, Tensor) else torch.full_like(position, lane)
    high, low, _, _ = philox4x32(seed, lanes, position, purpose)
    return (((high << 20) | (low >> 12)).double() + 0.5) * 2.0**-52


def token_gumbel(seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
    """Return the noise that tokens own at positions, float64 [N, V].

    u = (byte + (word + 0.5) / 2**32) / 256 with the byte of counter (t // 16, position, TOKEN_COARSE) and the word of
    (t // 4, position, TOKEN_FINE); g = -log(-log(u)).

    Arguments:
        seed, position: int64 [N].
        token_ids: int64 [V].
    """
    at = (seed[:, None], (token_ids >> 4)[None], position[:, None])
    coarse = torch.stack(philox4x32(*at, TOKEN_COARSE))  # [4, N, V]
    fine = torch.stack(philox4x32(at[0], (token_ids >> 2)[None], at[2], TOKEN_FINE))
    lane = token_ids & 15
    byte = (_pick(coarse, lane >> 2) >> ((lane & 3) * 8)) & 255
    u = (byte.double() + (_pick(fine, token_ids & 3).double() + 0.5) * 2.0**-32) * 2.0**-8
    return -torch.log(-torch.log(u))


def _pick(words: Tensor, index: Tensor) -> Tensor:
    """Return word `index` [V] of words [4, N, V], [N, V]."""
    return words.gather(0, index.expand(1, *words.shape[1:]))[0]


def truncated_weights(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log weights [N, V] float32 (largest 0, -inf where cut off) and which rows are finite [N] bool.

    Arguments:
        logits: [N, V] float32, -inf allowed for tokens that cannot be; any row may be non-finite.
        temperature: [N] float32; 0 keeps the arg-max alone.
        top_k: [N] int32, 0 = all.
        top_p: [N] float32, 1 = all.
        min_p: [N] float32, 0 = all.
    """
    num_rows, vocab_size = logits.shape
    top = logits.amax(dim=1, keepdim=True)
    finite = top[:, 0].isfinite()
    logits = torch.where(finite[:, None], logits, torch.zeros_like(logits))
    greedy = temperature <= 0
    scale = (1.0 / temperature.double()).clamp(max=_STEEPEST).float()
    scaled = (logits - logits.amax(dim=1, keepdim=True)) * torch.where(greedy, 1.0, scale)[:, None]
    # Likelier first, the lower entry first among equals: a stable descending sort.
    order = torch.sort(scaled, dim=1, descending=True, stable=True).indices
    rank = torch.empty_like(order)
    column = torch.arange(vocab_size, device=logits.device)
    rank.scatter_(1, order, column.expand(num_rows, -1))
    wanted_k = torch.where(top_k > 0, top_k, vocab_size)
    wanted_k = torch.where(greedy, 1, wanted_k).long()[:, None]
    weights = torch.where(rank < wanted_k, scaled.exp(), 0.0).double()
    cumulative = weights.gather(1, order).cumsum(dim=1)
    inside = (cumulative < top_p.double()[:, None] * weights.sum(dim=1, keepdim=True)).sum(
        dim=1, keepdim=True
    ) + 1
    kept_p = torch.where(top_p[:, None] < 1.0, rank < inside, True)
    floor = torch.log(min_p.double()).float()[:, None]  # -inf at 0
    kept = (rank < wanted_k) & kept_p & (scaled >= floor)
    return scaled.masked_fill(~kept, float("-inf")), finite


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """Return the entry whose share of the running total holds u, int64 [N]; never one of weight 0.

    Arguments:
        weights: [N, V] >= 0, none all 0.
        u: [N] float64 in (0, 1).
    """
    totals = weights.double().cumsum(dim=1)
    entry = torch.searchsorted(totals, u[:, None] * totals[:, -1:], right=True)
    last = torch.searchsorted(totals, totals[:, -1:].contiguous())
    return torch.minimum(entry, last)[:, 0]


def draw(
    log_weights: Tensor,
    token_ids: Tensor,
    *,
    seed: Tensor,
    position: Tensor,
    coupled: Tensor,
    purpose: int,
    lane: int = 0,
) -> Tensor:
    """Draw one entry of each row, int64 [N].

    Arguments:
        log_weights: [N, V] from `truncated_weights`.
        token_ids: int64 [V], the tokens of the entries.
        seed, position: int64 [N].
        coupled: [N] bool, race with the tokens' own noise instead of inverting the running total.
        purpose, lane: counter words of the inversion.
    """
    raced = (log_weights.double() + token_gumbel(seed, position, token_ids)).argmax(dim=1)
    inverted = inverse_cdf(log_weights.exp(), uniform(seed, position, purpose, lane))
    return torch.where(coupled, raced, inverted)
