"""Noise, truncation and draws as ONNX nodes: what `dspark_plugins.reference.sampling` is in torch.

Integers are int64 throughout and stay below 2**49, so that nothing wraps; sums over a vocabulary are float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from dspark_plugins.reference.sampling import TOKEN_COARSE, TOKEN_FINE
from onnx import TensorProto

from dspark_build.export_graph import Graph

__all__ = ["SamplingParams", "all_finite", "drawn", "inverse_cdf", "shares", "truncated_weights", "uniform"]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # Philox 4x32-10 (Salmon et al., SC 2011)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10
_STEEPEST = 1e37  # largest 1 / temperature


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Values of rows, named alike to the operations' inputs."""

    seeds: str  # [N] i64
    temperature: str  # [N] fp32
    top_k: str  # [N] i32
    top_p: str  # [N] fp32
    min_p: str  # [N] fp32
    coupled: str  # [N] i32

    @classmethod
    def inputs(cls) -> SamplingParams:
        return cls("seeds", "temperature", "top_k", "top_p", "min_p", "coupled")


def _double(g: Graph, x: str) -> str:
    return g.op("Cast", x, to=TensorProto.DOUBLE)


def _number(g: Graph, value: float) -> str:
    return g.number(value, np.float64)


def _column(g: Graph, x: str) -> str:
    return g.op("Unsqueeze", x, g.ints(1))


def _count(g: Graph, flags: str) -> str:
    """Return how many of [N, V] flags are set in each row, [N, 1] int64."""
    return g.op("ReduceSum", g.to(flags, "i64"), g.ints(1), keepdims=1)


def _philox(g: Graph, seed: str, c0: str, c1: str, c2: int) -> list[str]:
    """Return the four words of counters (c0, c1, c2, 0), int64 in [0, 2**32); shapes broadcast."""
    mask = g.number(_MASK)
    low = g.op("BitwiseAnd", seed, mask)
    high = g.op("BitwiseAnd", g.op("Div", g.op("Sub", seed, low), g.number(1 << 32)), mask)
    keys = [low, high]
    x = [c0, c1, g.number(c2), g.number(0)]
    for _ in range(_ROUNDS):
        (a_high, a_low), (b_high, b_low) = (
            _product(g, m, x[at]) for m, at in zip(_MULTIPLIERS, (0, 2), strict=True)
        )
        x = [
            g.op("BitwiseXor", g.op("BitwiseXor", b_high, x[1]), keys[0]),
            b_low,
            g.op("BitwiseXor", g.op("BitwiseXor", a_high, x[3]), keys[1]),
            a_low,
        ]
        keys = [
            g.op("BitwiseAnd", g.op("Add", k, g.number(w)), mask) for k, w in zip(keys, _WEYL, strict=True)
        ]
    return x


def _product(g: Graph, m: int, x: str) -> tuple[str, str]:
    """Return the high and the low word of m * x, both below 2**32, without a product of 64 bits."""
    word = g.number(1 << 16)
    upper, lower = g.op("Mul", x, g.number(m >> 16)), g.op("Mul", x, g.number(m & 0xFFFF))
    high = g.op("Div", g.op("Add", upper, g.op("Div", lower, word)), word)
    kept = g.op("Mul", g.op("BitwiseAnd", upper, g.number(0xFFFF)), word)
    return high, g.op("BitwiseAnd", g.op("Add", kept, lower), g.number(_MASK))


def uniform(g: Graph, seed: str, position: str, purpose: int, lane: str) -> str:
    """Return numbers in the open interval (0, 1) with 52 random bits, double.

    Arguments:
        seed, position, lane: int64; shapes broadcast.
    """
    high, low, _, _ = _philox(g, seed, lane, position, purpose)
    bits = g.op("Add", g.op("Mul", high, g.number(1 << 20)), g.op("Div", low, g.number(1 << 12)))
    return g.op("Mul", g.op("Add", _double(g, bits), _number(g, 0.5)), _number(g, 2.0**-52))


def token_gumbel(g: Graph, seed: str, position: str, token_ids: str) -> str:
    """Return the noise that tokens own at positions, double [N, V].

    Arguments:
        seed, position: int64 [N].
        token_ids: int64 [V].
    """
    seed, position = _column(g, seed), _column(g, position)
    ids = g.op("Unsqueeze", token_ids, g.ints(0))

    def word(divisor: int, purpose: int, index: str) -> str:
        words = _philox(g, seed, g.op("Div", ids, g.number(divisor)), position, purpose)
        found = words[3]
        for at in range(3):
            found = g.op("Where", g.op("Equal", index, g.number(at)), words[at], found)
        return found

    lane = g.op("BitwiseAnd", ids, g.number(15))
    coarse = word(16, TOKEN_COARSE, g.op("Div", lane, g.number(4)))
    shift = g.op("Gather", g.ints(1, 1 << 8, 1 << 16, 1 << 24), g.op("BitwiseAnd", lane, g.number(3)))
    byte = g.op("BitwiseAnd", g.op("Div", coarse, shift), g.number(255))
    fine = _double(g, word(4, TOKEN_FINE, g.op("BitwiseAnd", ids, g.number(3))))
    part = g.op("Mul", g.op("Add", fine, _number(g, 0.5)), _number(g, 2.0**-32))
    u = g.op("Mul", g.op("Add", _double(g, byte), part), _number(g, 2.0**-8))
    return g.op("Neg", g.op("Log", g.op("Neg", g.op("Log", u))))


def all_finite(g: Graph, logits: str) -> str:
    """Return which rows of [N, V] hold no NaN and have a finite largest value, [N] bool; -inf is allowed."""
    nan = g.op("IsNaN", logits)
    clean = g.op("Where", nan, g.number(0, np.float32), logits)
    top = g.op("ReduceMax", clean, g.ints(1), keepdims=0)
    bad = g.op("Cast", g.op("ReduceMax", g.to(nan, "i32"), g.ints(1), keepdims=0), to=TensorProto.BOOL)
    return g.op("Not", g.op("Or", bad, g.op("IsInf", top)))


def truncated_weights(g: Graph, logits: str, finite: str, params: SamplingParams) -> str:
    """Return log weights [N, V] fp32, largest 0, -inf where cut off; rows that are not finite count as equal.

    Arguments:
        logits: [N, V] fp32.
        finite: [N] bool from `all_finite`.
    """
    zero = g.number(0, np.float32)
    logits = g.op("Where", _column(g, finite), logits, zero)
    greedy = g.op("LessOrEqual", params.temperature, zero)
    inverse = g.op("Min", g.op("Div", _number(g, 1.0), _double(g, params.temperature)), _number(g, _STEEPEST))
    scale = g.op("Where", greedy, g.number(1, np.float32), g.to(inverse, "fp32"))
    top = g.op("ReduceMax", logits, g.ints(1), keepdims=1)
    scaled = g.op("Mul", g.op("Sub", logits, top), _column(g, scale))
    # Likelier first; TopK puts the lower entry first among equals.
    vocab = g.size(logits, 1)
    best, order = g.op_of("TopK", scaled, vocab, outputs=2, axis=1)
    rank = g.op("Range", g.number(0), g.op("Squeeze", vocab, g.ints(0)), g.number(1))
    k = g.to(params.top_k, "i64")
    k = g.op("Where", g.op("Greater", k, g.number(0)), k, vocab)
    k = _column(g, g.op("Where", greedy, g.number(1), k))
    within_k = g.op("Less", rank, k)
    weights = _double(g, g.op("Where", within_k, g.op("Exp", best), zero))
    total = g.op("ReduceSum", weights, g.ints(1), keepdims=1)
    share = g.op("Mul", _double(g, _column(g, params.top_p)), total)
    inside = g.op("Add", _count(g, g.op("Less", g.op("CumSum", weights, g.number(1)), share)), g.number(1))
    every = g.op("GreaterOrEqual", _column(g, params.top_p), g.number(1, np.float32))
    within_p = g.op("Or", every, g.op("Less", rank, inside))
    floor = _column(g, g.to(g.op("Log", _double(g, params.min_p)), "fp32"))  # -inf at 0
    kept = g.op("And", g.op("And", within_k, within_p), g.op("GreaterOrEqual", best, floor))
    cut = g.op("Where", kept, best, g.number(-np.inf, np.float32))
    return g.op("ScatterElements", scaled, order, cut, axis=1)


def shares(g: Graph, log_weights: str) -> str:
    """Return probabilities [N, V] double."""
    weights = g.op("Exp", _double(g, log_weights))
    return g.op("Div", weights, g.op("ReduceSum", weights, g.ints(1), keepdims=1))


def inverse_cdf(g: Graph, weights: str, u: str) -> str:
    """Return the entry whose share of the running total holds u [N] double, [N] int64; never one of weight 0."""
    totals = g.op("CumSum", _double(g, weights), g.number(1))
    last = g.take(totals, g.ints(-1), g.ints(np.iinfo(np.int64).max), axis=1)
    entry = _count(g, g.op("LessOrEqual", totals, g.op("Mul", _column(g, u), last)))
    entry = g.op("Min", entry, _count(g, g.op("Less", totals, last)))
    return g.op("Squeeze", entry, g.ints(1))


def drawn(
    g: Graph,
    log_weights: str,
    token_ids: str,
    *,
    params: SamplingParams,
    position: str,
    purpose: int,
    lane: str,
) -> str:
    """Return one entry of each row [N, V], [N] int64; the noise of tokens is made only where a row is coupled.

    Arguments:
        token_ids: int64 [V], the tokens of the entries.
        position: int64 [N].
        lane: [] int64.
    """
    coupled = g.op("Cast", params.coupled, to=TensorProto.BOOL)
    u = uniform(g, params.seeds, position, purpose, lane)
    inverted = inverse_cdf(g, g.op("Exp", log_weights), u)

    def raced(b: Graph) -> list[str]:
        noise = token_gumbel(b, params.seeds, position, token_ids)
        best = b.op("ArgMax", b.op("Add", _double(b, log_weights), noise), axis=1, keepdims=0)
        return [b.op("Where", coupled, best, inverted)]

    (entry,) = g.choose(g.any(coupled), raced, lambda _: [inverted])
    return entry
