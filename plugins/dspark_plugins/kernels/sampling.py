"""Device code of sampling: noise, truncation and draws of one row of logits in global memory.

Every function is run by one program, which sweeps the row tile by tile. Kept tokens are a prefix in the order "likelier
first, the lower entry first among equals", so a row's truncation is three numbers: the largest distance from the top
that stays, how many entries stay at just this distance (as the last entry that does), and the weight of all that stay.
Distances are compared as bits: those of a float32 >= 0 rise with its value.

Float32 throughout but for running totals; the noise is within 2e-6 of the float64 formula.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "ACCEPT",
    "DRAFT",
    "REPLACE",
    "SAMPLE",
    "invert_row",
    "noise_of_tile",
    "race_row",
    "steepness",
    "tile_of_row",
    "truncate_row",
    "uniform_of",
]

# What a random number decides: the third word of its counter.
DRAFT = tl.constexpr(0)
ACCEPT = tl.constexpr(1)
REPLACE = tl.constexpr(2)
SAMPLE = tl.constexpr(3)
TOKEN_COARSE = tl.constexpr(4)
TOKEN_FINE = tl.constexpr(5)

_INFINITE = tl.constexpr(0x7F800000)  # bits of +inf
_WAYS = tl.constexpr(16)  # thresholds tried in one sweep


@triton.jit
def uniform_of(seed, position, lane, PURPOSE: tl.constexpr):
    """Return one float64 number in (0, 1), with 52 random bits."""
    c0 = tl.zeros([1], tl.int32) + lane
    c1 = tl.zeros([1], tl.int32) + position
    c2 = tl.zeros([1], tl.int32) + PURPOSE
    high, low, _, _ = tl.philox(seed, c0, c1, c2, c0 * 0)
    bits = (high.to(tl.int64) << 20) | (low.to(tl.int64) >> 12)
    u = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2**-52
    return tl.sum(u, axis=0)


@triton.jit
def _four_words(seed, counter, position, PURPOSE: tl.constexpr, N: tl.constexpr):
    """Return the words of N counters one behind the other, [4 * N] uint32."""
    c1 = tl.zeros([N], tl.int32) + position
    c2 = tl.zeros([N], tl.int32) + PURPOSE
    w0, w1, w2, w3 = tl.philox(seed, counter, c1, c2, c1 * 0)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [4 * N])


@triton.jit
def _word_of(seed, token, position, SHIFT: tl.constexpr, PURPOSE: tl.constexpr):
    """Return the four words of each token's own counter."""
    c1 = token * 0 + position
    return tl.philox(seed, token >> SHIFT, c1, token * 0 + PURPOSE, token * 0)


@triton.jit
def _pick(w0, w1, w2, w3, at):
    return tl.where(at == 0, w0, tl.where(at == 1, w1, tl.where(at == 2, w2, w3)))


@triton.jit
def noise_of_tile(seed, position, first, token, MAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the Gumbel noise that tokens own at a position, [BLOCK] float32.

    Arguments:
        first: first token of the tile, a multiple of 16; read where the tokens are in order.
        token: [BLOCK] int32 tokens; read with MAPPED.
    """
    if MAPPED:
        c0, c1, c2, c3 = _word_of(seed, token, position, 4, TOKEN_COARSE)
        byte = (_pick(c0, c1, c2, c3, (token >> 2) & 3) >> ((token & 3) * 8).to(tl.uint32)) & 255
        f0, f1, f2, f3 = _word_of(seed, token, position, 2, TOKEN_FINE)
        word = _pick(f0, f1, f2, f3, token & 3)
    else:
        coarse = _four_words(
            seed, first // 16 + tl.arange(0, BLOCK // 16), position, TOKEN_COARSE, BLOCK // 16
        )
        low, high = tl.join(coarse, coarse >> 16), tl.join(coarse >> 8, coarse >> 24)
        byte = tl.reshape(tl.join(low, high), [BLOCK]) & 255
        word = _four_words(seed, first // 4 + tl.arange(0, BLOCK // 4), position, TOKEN_FINE, BLOCK // 4)
    # -log(u) = -log1p(-v) for v = 1 - u, exact to a few units of the last place on either side of 1/2:
    # the 40-bit number and its complement are both turned into floats without cancellation.
    whole = (byte.to(tl.uint64) << 32) | word.to(tl.uint64)
    complement = (whole ^ 0xFFFFFFFFFF).to(tl.float32)
    u = (whole.to(tl.float32) + 0.5) * 9.094947017729282e-13  # 2**-40
    v = (complement + 0.5) * 9.094947017729282e-13
    s = v / (2.0 - v)  # log(1 - v) = -2 artanh(s)
    s2 = s * s
    series = 1.0 / 13.0
    series = series * s2 + 1.0 / 11.0
    series = series * s2 + 1.0 / 9.0
    series = series * s2 + 1.0 / 7.0
    series = series * s2 + 1.0 / 5.0
    series = series * s2 + 1.0 / 3.0
    series = series * s2 + 1.0
    near_one = 2.0 * s * series
    return -tl.log(tl.where(v <= 0.5, near_one, -tl.log(tl.maximum(u, 1e-30))))


@triton.jit
def steepness(temperature):
    """Return 1 / temperature as a float32 factor; 1 at temperature 0."""
    return tl.where(temperature > 0, tl.minimum(1.0 / tl.maximum(temperature, 1e-38), 1e37), 1.0).to(
        tl.float32
    )


@triton.jit
def tile_of_row(row, start, n, top, scale, cut, last, BLOCK: tl.constexpr):
    """Load a tile of a row.

    Returns:
        entry: [BLOCK] int32.
        bits: [BLOCK] int32 distances from the top.
        real: [BLOCK] which entries stay.
        weight: [BLOCK] float32 exp((x - top) * scale) of those, 0 elsewhere.
    """
    entry = start + tl.arange(0, BLOCK)
    x = tl.load(row + entry, mask=entry < n, other=float("-inf")).to(tl.float32)
    distance = (top - x) * scale
    bits = distance.to(tl.int32, bitcast=True)
    real = (entry < n) & ((bits < cut) | ((bits == cut) & (entry <= last)))
    return entry, bits, real, tl.where(real, tl.exp(-distance), 0.0)


@triton.jit
def _search(row, n, top, scale, cut, last, wanted, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the smallest bits at which the kept tokens up to them count (or weigh) at least `wanted`.

    Also returns what those strictly nearer count (or weigh).
    """
    low = tl.full((), -1, tl.int32)
    high = tl.full((), _INFINITE, tl.int32)
    below = tl.full((), 0.0, tl.float32)
    while high - low > 1:
        step = (high - low + _WAYS - 1) // _WAYS
        # In int64: low + 16 steps may pass 2**31.
        tries = tl.minimum(
            low.to(tl.int64) + step.to(tl.int64) * (tl.arange(0, _WAYS) + 1), high.to(tl.int64)
        ).to(tl.int32)
        totals = tl.zeros([_WAYS], tl.float32)
        for start in range(0, n, BLOCK):
            _, bits, real, weight = tile_of_row(row, start, n, top, scale, cut, last, BLOCK)
            if COUNT:
                weight = tl.where(real, 1.0, 0.0)
            totals += tl.sum(tl.where(bits[:, None] <= tries[None, :], weight[:, None], 0.0), axis=0)
        enough = totals >= wanted
        enough = enough | (tries == high)
        high_new = tl.min(tl.where(enough, tries, _INFINITE), axis=0)
        low_new = tl.max(tl.where(tries < high_new, tries, low), axis=0)
        below = tl.where(low_new > low, tl.max(tl.where(tries < high_new, totals, 0.0), axis=0), below)
        low = low_new
        high = high_new
    return high, below


@triton.jit
def _nth_entry(row, n, top, scale, cut, nth, BLOCK: tl.constexpr):
    """Return the entry of the nth token (from 1) whose bits are `cut`."""
    seen = tl.full((), 0, tl.int32)
    found = tl.full((), -1, tl.int32)
    for start in range(0, n, BLOCK):
        entry, bits, _, _ = tile_of_row(row, start, n, top, scale, cut, n, BLOCK)
        equal = ((entry < n) & (bits == cut)).to(tl.int32)
        count = tl.sum(equal, axis=0)
        if (found < 0) & (seen + count >= nth):
            at = (equal > 0) & (seen + tl.cumsum(equal, axis=0) == nth)
            found = tl.max(tl.where(at, entry, -1), axis=0)
        seen += count
    return found


@triton.jit
def truncate_row(row, n, temperature, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """Look through one row [n].

    Returns:
        top: the largest logit.
        scale: 1 / temperature.
        cut, last: entries stay whose distance bits are below `cut`, or equal to it up to entry `last`.
        total: weight exp((x - top) * scale) of what stays, float32.
        finite: whether the row can be sampled from at all.
    """
    top_tile = tl.full([BLOCK], float("-inf"), tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        x = tl.load(row + entry, mask=entry < n, other=float("-inf")).to(tl.float32)
        bad = bad | (x != x).to(tl.int32)
        top_tile = tl.maximum(top_tile, tl.where(x == x, x, float("-inf")))
    top = tl.max(top_tile, axis=0)
    finite = (tl.max(bad, axis=0) == 0) & (top < float("inf")) & (top > float("-inf"))
    top = tl.where(finite, top, 0.0)
    scale = steepness(temperature)
    cut = tl.full((), _INFINITE, tl.int32)
    last = tl.full((), 2147483647, tl.int32)
    if finite & (temperature <= 0):
        cut = tl.full((), 0, tl.int32)
        last = _nth_entry(row, n, top, scale, cut, 1, BLOCK)
    if finite & (temperature > 0) & (top_k > 0) & (top_k < n):
        cut, nearer = _search(row, n, top, scale, cut, last, top_k.to(tl.float32), True, BLOCK)
        last = _nth_entry(row, n, top, scale, cut, top_k - nearer.to(tl.int32), BLOCK)
    if finite & (top_p < 1.0) & (temperature > 0):
        wanted = top_p * _total(row, n, top, scale, cut, last, BLOCK)
        cut_p, nearer = _search(row, n, top, scale, cut, last, wanted, False, BLOCK)
        each = tl.exp(-(cut_p.to(tl.float32, bitcast=True)))
        # Equals that stay: as few as reach the share.
        ties = tl.ceil((wanted - nearer) / tl.maximum(each, 1e-38))
        ties = tl.minimum(tl.maximum(ties, 1.0), 2147483520.0).to(tl.int32)
        last_p = _nth_entry(row, n, top, scale, cut_p, ties, BLOCK)
        if cut_p < cut:
            cut = cut_p
            last = tl.where(last_p < 0, 2147483647, last_p)
        else:
            last = tl.where(last_p < 0, last, tl.minimum(last, last_p))
    if finite & (min_p > 0.0) & (temperature > 0):
        floor = (-tl.log(min_p)).to(tl.int32, bitcast=True)
        if floor < cut:
            cut = floor
            last = tl.full((), 2147483647, tl.int32)
    return top, scale, cut, last, _total(row, n, top, scale, cut, last, BLOCK), finite


@triton.jit
def _total(row, n, top, scale, cut, last, BLOCK: tl.constexpr):
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, n, BLOCK):
        _, _, _, weight = tile_of_row(row, start, n, top, scale, cut, last, BLOCK)
        total += tl.sum(weight, axis=0).to(tl.float64)
    return total.to(tl.float32)


@triton.jit
def invert_row(row, n, top, scale, cut, last, total, u, BLOCK: tl.constexpr):
    """Return the entry whose share of the running total holds u; never one of weight 0."""
    mass = u * total.to(tl.float64)
    running = tl.full((), 0.0, tl.float64)
    found = tl.full((), -1, tl.int32)
    fallback = tl.full((), 0, tl.int32)
    for start in range(0, n, BLOCK):
        if found < 0:
            entry, _, _, weight = tile_of_row(row, start, n, top, scale, cut, last, BLOCK)
            found, fallback, running = invert_tile(weight, entry, running, mass, fallback)
    return tl.where(found < 0, fallback, found)


@triton.jit
def invert_tile(weight, entry, running, mass, fallback):
    """Return the entry of this tile that holds `mass` (-1 = none), the last of any weight so far, the new total."""
    reached = running + tl.cumsum(weight, axis=0).to(tl.float64) > mass
    inside = reached & (weight > 0)
    first = tl.min(tl.where(inside, entry, 2147483647), axis=0)
    heaviest = tl.max(tl.where(weight > 0, entry, -1), axis=0)
    found = tl.where(first < 2147483647, first, -1)
    running += tl.sum(weight, axis=0).to(tl.float64)
    return found, tl.maximum(fallback, heaviest), running


@triton.jit
def race_row(
    row, n, top, scale, cut, last, seed, position, token_ids, MAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the entry with the largest log weight plus noise of its token, the first among equals."""
    best = tl.full((), float("-inf"), tl.float32)
    winner = tl.full((), 0, tl.int32)
    for start in range(0, n, BLOCK):
        entry, bits, real, _ = tile_of_row(row, start, n, top, scale, cut, last, BLOCK)
        token = entry
        if MAPPED:
            token = tl.load(token_ids + entry, mask=entry < n, other=0)
        noise = noise_of_tile(seed, position, start, token, MAPPED, BLOCK)
        raced = tl.where(real, noise - bits.to(tl.float32, bitcast=True), float("-inf"))
        here = tl.max(raced, axis=0)
        if here > best:
            best = here
            winner = tl.min(tl.where(raced == here, entry, 2147483647), axis=0)
    return winner
