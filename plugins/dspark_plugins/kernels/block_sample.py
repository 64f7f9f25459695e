"""Device code of the sequential head: all G positions of all blocks in one launch.

The positions depend on each other through the drawn token, so the work is a row of phases, each spread over all
programs and ended by a barrier of the whole grid:

    project     hidden times the head's mixing weights, for all positions at once (gated and RNN heads)
    start       what multiplies the output matrix at position 0
    score       position by position: corrected logits, and what of them draws need, by tile of the vocabulary
    draw        and then one program per block that rates, draws, and prepares the next position
    share       logits become the q that verification needs

The barrier needs every program to be resident: a cooperative launch of at most as many programs as fit. The same phases
may also be launched one by one, without any barrier.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark_plugins.kernels.sampling import (
    DRAFT,
    invert_row,
    invert_tile,
    noise_of_tile,
    race_row,
    steepness,
    tile_of_row,
    truncate_row,
    uniform_of,
)

__all__ = ["block_sample_kernel"]

_INFINITE = tl.constexpr(0x7F800000)
_LAST = tl.constexpr(2147483647)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))  # never overflows
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _dot_rows(
    weight, stride, column, vector, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, DEPTH: tl.constexpr
):
    """Return weight[:RANK, column : column + RANK] @ vector[:RANK], [BLOCK_RANK] float32."""
    out = tl.arange(0, BLOCK_RANK)
    total = tl.zeros([BLOCK_RANK], tl.float32)
    for start in range(0, RANK, DEPTH):
        c = start + tl.arange(0, DEPTH)
        x = tl.load(vector + c, mask=c < RANK, other=0.0).to(tl.float32)
        at = (out.to(tl.int64) * stride)[:, None] + (column + c)[None, :]
        w = tl.load(weight + at, mask=(out < RANK)[:, None] & (c < RANK)[None, :], other=0.0).to(tl.float32)
        total += tl.sum(w * x[None, :], axis=1)
    return total


@triton.jit
def _project(
    hidden, mix_weight, mix_bias, projected, num_rows, hidden_size, pid, num_programs,
    HEAD: tl.constexpr, RANK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Fill `projected` [R * G, OUT] float32 = hidden @ weight[:, hidden columns]^T + bias."""
    OUT: tl.constexpr = RANK * 3 if HEAD == 3 else RANK
    COLUMN: tl.constexpr = RANK * 2 if HEAD == 3 else 0
    stride = hidden_size + (RANK * 2 if HEAD == 3 else RANK)
    row_tiles = (num_rows + 15) // 16
    OUT_TILES: tl.constexpr = (OUT + 63) // 64
    DEPTH: tl.constexpr = 16 if DOT == "ieee" else 32  # with 64 the RNN head spills
    for item in range(pid, row_tiles * OUT_TILES, num_programs):
        row = (item // OUT_TILES) * 16 + tl.arange(0, 16)
        out = (item % OUT_TILES) * 64 + tl.arange(0, 64)
        total = tl.zeros([16, 64], tl.float32)
        for start in range(0, hidden_size, DEPTH):
            c = start + tl.arange(0, DEPTH)
            x_at = (row.to(tl.int64) * hidden_size)[:, None] + c[None, :]
            x = tl.load(hidden + x_at, mask=(row < num_rows)[:, None] & (c < hidden_size)[None, :], other=0.0)
            w_at = (out.to(tl.int64) * stride)[None, :] + (COLUMN + c)[:, None]
            w = tl.load(mix_weight + w_at, mask=(out < OUT)[None, :] & (c < hidden_size)[:, None], other=0.0)
            total += tl.dot(x, w, input_precision=DOT)
        bias = tl.load(mix_bias + out, mask=out < OUT, other=0.0).to(tl.float32)
        to = (row.to(tl.int64) * OUT)[:, None] + out[None, :]
        tl.store(projected + to, total + bias[None, :], mask=(row < num_rows)[:, None] & (out < OUT)[None, :])


@triton.jit
def _prepare(
    block, position, token, markov_in, mix_weight, projected, previous_rows, mixed, state, block_size, hidden_size,
    HEAD: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, PREVIOUS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write what multiplies the output matrix at one position of a block, [RANK] float32; step the RNN's state."""
    if HEAD > 0:
        row = token
        if PREVIOUS:
            row = tl.load(previous_rows + token)
        embedded = markov_in + row.to(tl.int64) * RANK
        r = tl.arange(0, BLOCK_RANK)
        e = tl.load(embedded + r, mask=r < RANK, other=0.0).to(tl.float32)
        out = e
        if HEAD > 1:
            PARTS: tl.constexpr = 3 if HEAD == 3 else 1
            STATES: tl.constexpr = RANK if HEAD == 3 else 0
            its_state = state + block.to(tl.int64) * RANK
            stride = hidden_size + RANK + STATES
            column = tl.where(HEAD == 3, RANK, hidden_size)  # of W1[x]; the state's are the first
            h = projected + (block * block_size + position).to(tl.int64) * (RANK * PARTS)
            for part in range(PARTS):
                weight = mix_weight + stride.to(tl.int64) * RANK * part
                total = tl.load(h + part * RANK + r, mask=r < RANK, other=0.0)
                total += _dot_rows(weight, stride, column, embedded, RANK, BLOCK_RANK, DEPTH)
                if HEAD == 3:
                    total += _dot_rows(weight, stride, 0, its_state, RANK, BLOCK_RANK, DEPTH)
                tl.store(h + part * RANK + r, total, mask=r < RANK)
            tl.debug_barrier()  # the sums are there, and everyone has read the state
            gate = _sigmoid(tl.load(h + r, mask=r < RANK, other=0.0))
            out = gate * e
            if HEAD == 3:
                before = tl.load(its_state + r, mask=r < RANK, other=0.0)
                candidate = _tanh(tl.load(h + RANK + r, mask=r < RANK, other=0.0))
                out = _tanh(tl.load(h + RANK * 2 + r, mask=r < RANK, other=0.0))
                tl.debug_barrier()
                tl.store(its_state + r, gate * before + (1.0 - gate) * candidate, mask=r < RANK)
        tl.store(mixed + block.to(tl.int64) * RANK + r, out, mask=r < RANK)


@triton.jit
def _score(
    tile, position, base_logits, markov_out, mixed, temperature, positions, seeds, coupled, token_ids, logits,
    tile_values, tile_entries, num_blocks, block_size, vocab_size, num_tiles,
    HEAD: tl.constexpr, RANK: tl.constexpr, MAPPED: tl.constexpr, BLOCK_V: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Write corrected logits of one tile of the vocabulary, and what draws need to know of it.

    `tile_values` [R, tiles, 3]: largest logit (NaN if there is one), weight relative to it, best of the race relative
    to it. `tile_entries` [R, tiles, 2]: entry of the largest, winner of the race.
    """
    entry = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = entry < vocab_size
    for first in range(0, num_blocks, 16):
        block = first + tl.arange(0, 16)
        real = block < num_blocks
        row = (block * block_size + position).to(tl.int64) * vocab_size
        mask = real[:, None] & inside[None, :]
        x = tl.load(base_logits + row[:, None] + entry[None, :], mask=mask, other=float("-inf")).to(
            tl.float32
        )
        if HEAD > 0:
            bias = tl.zeros([16, BLOCK_V], tl.float32)
            DEPTH: tl.constexpr = 16  # with 32 the compiler spills
            for start in range(0, RANK, DEPTH):
                c = start + tl.arange(0, DEPTH)
                m_at = (block.to(tl.int64) * RANK)[:, None] + c[None, :]
                m = tl.load(mixed + m_at, mask=real[:, None] & (c < RANK)[None, :], other=0.0)
                w_at = (entry.to(tl.int64) * RANK)[None, :] + c[:, None]
                w = tl.load(markov_out + w_at, mask=inside[None, :] & (c < RANK)[:, None], other=0.0)
                bias += tl.dot(m.to(w.dtype), w, input_precision=DOT)
            x += bias
        tl.store(logits + row[:, None] + entry[None, :], x, mask=mask)
        broken = tl.max(tl.where(mask & (x != x), 1, 0), axis=1)
        clean = tl.where(mask & (x == x), x, float("-inf"))
        top = tl.max(clean, axis=1)
        safe = tl.where((top > float("-inf")) & (top < float("inf")), top, 0.0)
        where = tl.min(tl.where(clean == top[:, None], entry[None, :], _LAST), axis=1)
        scale = steepness(tl.load(temperature + block, mask=real, other=1.0))
        weight = tl.sum(tl.exp((clean - safe[:, None]) * scale[:, None]), axis=1)
        at = block * num_tiles + tile
        tl.store(tile_values + at * 3, tl.where(broken > 0, float("nan"), top), mask=real)
        tl.store(tile_values + at * 3 + 1, weight, mask=real)
        tl.store(tile_entries + at * 2, where, mask=real)
        tl.debug_barrier()  # what follows reads the logits back
        for index in range(first, tl.minimum(first + 16, num_blocks)):
            one = tl.full((), 0, tl.int32) + index  # the interpreter's is a plain number
            if (tl.load(coupled + one) != 0) & (tl.load(temperature + one) > 0):
                its = logits + (one.to(tl.int64) * block_size + position) * vocab_size
                values = tl.load(its + entry, mask=inside, other=float("-inf"))
                highest = tl.max(values, axis=0)
                highest = tl.where((highest > float("-inf")) & (highest < float("inf")), highest, 0.0)
                token = entry
                if MAPPED:
                    token = tl.load(token_ids + entry, mask=inside, other=0)
                noise = noise_of_tile(
                    tl.load(seeds + one),
                    tl.load(positions + one) + position,
                    tile * BLOCK_V,
                    token,
                    MAPPED,
                    BLOCK_V,
                )
                raced = (values - highest) * steepness(tl.load(temperature + one)) + noise
                raced = tl.where(inside, raced, float("-inf"))
                best = tl.max(raced, axis=0)
                tl.store(tile_values + (one * num_tiles + tile) * 3 + 2, best)
                winner = tl.min(tl.where(raced == best, entry, _LAST), axis=0)
                tl.store(tile_entries + (one * num_tiles + tile) * 2 + 1, winner)


@triton.jit
def _tiles(tile_values, block, start, num_tiles, BLOCK_TILES: tl.constexpr):
    """Return tiles of one block's row, which of them there are, where they are told of, and their largest logits."""
    t = start + tl.arange(0, BLOCK_TILES)
    has = t < num_tiles
    at = block * num_tiles + t
    return t, has, at, tl.load(tile_values + at * 3, mask=has, other=float("-inf"))


@triton.jit
def _tile_weights(tile_values, block, start, num_tiles, top, scale, BLOCK_TILES: tl.constexpr):
    """Return tiles of one block's row, and their weights relative to the row's largest logit."""
    t, has, at, tops = _tiles(tile_values, block, start, num_tiles, BLOCK_TILES)
    weights = tl.load(tile_values + at * 3 + 1, mask=has, other=0.0)
    return t, tl.where(weights > 0, weights * tl.exp((tops - top) * scale), 0.0)


@triton.jit
def _draw(
    block, position, row, temperature, top_k, top_p, min_p, positions, seeds, coupled, token_ids,
    tile_values, tile_entries, limits, bounds, vocab_size, num_tiles, block_size,
    MAPPED: tl.constexpr, RATES: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_TILES: tl.constexpr, SWEEP: tl.constexpr,
):  # fmt: skip
    """Draw one entry of one row, -1 where it is not finite; say in `limits`, `bounds` what it was drawn from.

    Also returns the weight of what it was drawn from relative to the likeliest entry; of all entries at temperature 0.
    """
    top = tl.full((), float("-inf"), tl.float32)
    broken = tl.full((), 0, tl.int32)
    for start in range(0, num_tiles, BLOCK_TILES):
        _, _, _, tops = _tiles(tile_values, block, start, num_tiles, BLOCK_TILES)
        broken = tl.maximum(broken, tl.max((tops != tops).to(tl.int32), axis=0))
        top = tl.maximum(top, tl.max(tl.where(tops == tops, tops, float("-inf")), axis=0))
    finite = (broken == 0) & (top < float("inf")) & (top > float("-inf"))
    heat = tl.load(temperature + block)
    k, p, floor = tl.load(top_k + block), tl.load(top_p + block), tl.load(min_p + block)
    seed, at_token = tl.load(seeds + block), tl.load(positions + block) + position
    races = tl.load(coupled + block) != 0
    scale = steepness(heat)
    cut = tl.full((), _INFINITE, tl.int32)
    last = tl.full((), _LAST, tl.int32)
    total = tl.full((), 1.0, tl.float32)
    drawn = tl.full((), -1, tl.int32)
    if finite:
        drawn = tl.full((), _LAST, tl.int32)
        for start in range(0, num_tiles, BLOCK_TILES):
            _, has, at, tops = _tiles(tile_values, block, start, num_tiles, BLOCK_TILES)
            first_at = tl.load(tile_entries + at * 2, mask=has, other=_LAST)
            drawn = tl.minimum(drawn, tl.min(tl.where(tops == top, first_at, _LAST), axis=0))
        if heat > 0:
            if ((k > 0) & (k < vocab_size)) | (p < 1.0) | (floor > 0.0):
                top, scale, cut, last, total, finite = truncate_row(row, vocab_size, heat, k, p, floor, SWEEP)
                if races:
                    drawn = race_row(
                        row, vocab_size, top, scale, cut, last, seed, at_token, token_ids, MAPPED, SWEEP
                    )
                else:
                    u = uniform_of(seed, at_token, position, DRAFT)
                    drawn = invert_row(row, vocab_size, top, scale, cut, last, total, u, SWEEP)
            else:
                total = _whole(tile_values, block, num_tiles, top, scale, BLOCK_TILES)
                if races:
                    best = tl.full((), float("-inf"), tl.float32)
                    for start in range(0, num_tiles, BLOCK_TILES):
                        _, has, at, tops = _tiles(tile_values, block, start, num_tiles, BLOCK_TILES)
                        raced = tl.load(tile_values + at * 3 + 2, mask=has, other=float("-inf"))
                        raced = tl.where(tops > float("-inf"), raced + (tops - top) * scale, float("-inf"))
                        here = tl.max(raced, axis=0)
                        if here > best:  # the first of equals
                            best = here
                            winners = tl.load(tile_entries + at * 2 + 1, mask=has, other=_LAST)
                            drawn = tl.min(tl.where(raced == here, winners, _LAST), axis=0)
                else:
                    mass = uniform_of(seed, at_token, position, DRAFT) * total.to(tl.float64)
                    before = tl.full((), 0.0, tl.float64)
                    running = tl.full((), 0.0, tl.float64)
                    tile = tl.full((), -1, tl.int32)
                    last_tile = tl.full((), 0, tl.int32)
                    for start in range(0, num_tiles, BLOCK_TILES):
                        if tile < 0:
                            t, weights = _tile_weights(
                                tile_values, block, start, num_tiles, top, scale, BLOCK_TILES
                            )
                            tile, last_tile, after = invert_tile(weights, t, running, mass, last_tile)
                            chosen = tl.where(tile < 0, last_tile, tile)
                            if chosen >= start:
                                before = running + tl.sum(tl.where(t < chosen, weights, 0.0), axis=0).to(
                                    tl.float64
                                )
                            running = after
                    tile = tl.where(tile < 0, last_tile, tile)
                    entry = tile * BLOCK_V + tl.arange(0, BLOCK_V)
                    x = tl.load(row + entry, mask=entry < vocab_size, other=float("-inf"))
                    weight = tl.exp((x - top) * scale)
                    drawn, heaviest, _ = invert_tile(weight, entry, before, mass, tl.full((), 0, tl.int32))
                    drawn = tl.where(drawn < 0, heaviest, drawn)
        elif RATES:
            total = _whole(tile_values, block, num_tiles, top, scale, BLOCK_TILES)
    pair = block * block_size + position
    tl.store(limits + pair * 3, top)
    tl.store(limits + pair * 3 + 1, scale)
    tl.store(limits + pair * 3 + 2, total)
    tl.store(bounds + pair * 2, cut)
    tl.store(bounds + pair * 2 + 1, last)
    return drawn, total


@triton.jit
def _whole(tile_values, block, num_tiles, top, scale, BLOCK_TILES: tl.constexpr):
    """Return the weight of a whole row relative to its largest logit."""
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, num_tiles, BLOCK_TILES):
        _, weights = _tile_weights(tile_values, block, start, num_tiles, top, scale, BLOCK_TILES)
        total += tl.sum(weights, axis=0)
    return total


@triton.jit
def _rate_greedy(weights, rated, total):
    """Return w0 z + w1 logit q + w2 of an arg-max draft of probability q = 1 / total."""
    log_q = -tl.log(tl.maximum(total, 1.0))
    rest = tl.maximum((total - 1.0) / tl.maximum(total, 1.0), 1e-4)
    return tl.load(weights) * rated + tl.load(weights + 1) * (log_q - tl.log(rest)) + tl.load(weights + 2)


@triton.jit
def _confidence(
    pair, token, hidden, markov_in, previous_rows, weight, bias, hidden_size,
    MARKOV: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, PREVIOUS: tl.constexpr, SWEEP: tl.constexpr,
):  # fmt: skip
    """Return the confidence logit of one position."""
    rated = tl.zeros([SWEEP], tl.float32)
    for start in range(0, hidden_size, SWEEP):
        c = start + tl.arange(0, SWEEP)
        h = tl.load(hidden + pair.to(tl.int64) * hidden_size + c, mask=c < hidden_size, other=0.0).to(
            tl.float32
        )
        rated += h * tl.load(weight + c, mask=c < hidden_size, other=0.0).to(tl.float32)
    total = tl.sum(rated, axis=0)
    if MARKOV:
        row = token
        if PREVIOUS:
            row = tl.load(previous_rows + token)
        r = tl.arange(0, BLOCK_RANK)
        e = tl.load(markov_in + row.to(tl.int64) * RANK + r, mask=r < RANK, other=0.0).to(tl.float32)
        total += tl.sum(
            e * tl.load(weight + hidden_size + r, mask=r < RANK, other=0.0).to(tl.float32), axis=0
        )
    return total + tl.load(bias)


@triton.jit
def block_sample_kernel(
    base_logits,
    hidden,
    anchors,
    num_drafts,
    positions,
    seeds,
    temperature,
    top_k,
    top_p,
    min_p,
    coupled,
    markov_in,
    markov_out,
    mix_weight,
    mix_bias,
    confidence_weight,
    confidence_bias,
    greedy_confidence,
    draft_to_target,
    previous_rows,
    tokens,
    num_tokens,
    draft_probs,
    confidence_logits,
    projected,
    mixed,
    state,
    tile_values,
    tile_entries,
    limits,
    bounds,
    barrier,
    num_blocks,
    block_size,
    vocab_size,
    hidden_size,
    num_tiles,
    first_phase,
    last_phase,
    HEAD: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    CONFIDENCE: tl.constexpr,
    MAPPED: tl.constexpr,
    PREVIOUS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    SWEEP: tl.constexpr,
    DOT: tl.constexpr,
):
    """Run phases first_phase .. last_phase - 1 of project, start, (score, draw) * G, share.

    Arguments are those of the op; then scratch: `projected` [R * G, r or 3r], `mixed` and `state` [R, r],
    `tile_values`, `tile_entries`, `limits` [R * G, 3], `bounds` [R * G, 2], and one int32 of zero for the barrier.
    HEAD is 0 none, 1 vanilla, 2 gated, 3 RNN; CONFIDENCE is 0 none, 1 over h, 2 over h and W1[x].
    """
    pid = tl.program_id(0)
    num_programs = tl.num_programs(0)
    for phase in range(first_phase, last_phase):
        if phase == 0:
            if HEAD > 1:
                _project(
                    hidden, mix_weight, mix_bias, projected, num_blocks * block_size, hidden_size, pid, num_programs,
                    HEAD, RANK, DOT,
                )  # fmt: skip
        elif phase == 2 * block_size + 2:
            SHARE: tl.constexpr = 4096
            shares = (vocab_size + SHARE - 1) // SHARE
            for item in range(pid, num_blocks * block_size * shares, num_programs):
                pair = tl.full((), 0, tl.int32) + item // shares
                block = pair // block_size
                done = tl.load(num_tokens + block)
                if (pair % block_size < done) & (tl.load(temperature + block) > 0):
                    row = draft_probs + pair.to(tl.int64) * vocab_size
                    start = (item % shares) * SHARE
                    entry, _, _, weight = tile_of_row(
                        row, start, vocab_size, tl.load(limits + pair * 3), tl.load(limits + pair * 3 + 1),
                        tl.load(bounds + pair * 2), tl.load(bounds + pair * 2 + 1), SHARE,
                    )  # fmt: skip
                    total = tl.load(limits + pair * 3 + 2)
                    tl.store(row + entry, weight / total, mask=entry < vocab_size)
        elif phase % 2 == 0:
            position = (phase - 2) // 2
            for tile in range(pid, num_tiles, num_programs):
                _score(
                    tile, position, base_logits, markov_out, mixed, temperature, positions, seeds, coupled,
                    draft_to_target, draft_probs, tile_values, tile_entries, num_blocks, block_size, vocab_size,
                    num_tiles, HEAD, RANK, MAPPED, BLOCK_V, DOT,
                )  # fmt: skip
        else:
            position = (phase - 3) // 2  # -1 = the start: the anchor is what was drawn
            for index in range(pid, num_blocks, num_programs):
                block = tl.full((), 0, tl.int32) + index
                anchor = tl.load(anchors + block)
                pair = block * block_size + position
                token = anchor
                rated = tl.full((), 0.0, tl.float32)
                goes_on = tl.full((), 1, tl.int32)
                if position >= 0:
                    goes_on = tl.full((), 0, tl.int32)
                    token = tl.full((), 0, tl.int32)
                    if (tl.load(num_tokens + block) == position) & (tl.load(num_drafts + block) > position):
                        before = anchor
                        if position > 0:
                            before = tl.load(tokens + pair - 1)
                        if CONFIDENCE > 0:
                            rated = _confidence(
                                pair, before, hidden, markov_in, previous_rows, confidence_weight, confidence_bias,
                                hidden_size, CONFIDENCE == 2, RANK, BLOCK_RANK, PREVIOUS, SWEEP,
                            )  # fmt: skip
                        drawn, total = _draw(
                            block, position, draft_probs + pair.to(tl.int64) * vocab_size, temperature, top_k, top_p,
                            min_p, positions, seeds, coupled, draft_to_target, tile_values, tile_entries, limits,
                            bounds, vocab_size, num_tiles, block_size, MAPPED, CONFIDENCE > 0, BLOCK_V, BLOCK_TILES,
                            SWEEP,
                        )  # fmt: skip
                        if CONFIDENCE > 0:
                            greedy = tl.load(temperature + block) <= 0
                            if (drawn >= 0) & greedy:
                                rated = _rate_greedy(greedy_confidence + position * 3, rated, total)
                        if (drawn >= 0) & (tl.abs(rated) < float("inf")):
                            goes_on = tl.full((), 1, tl.int32)
                            token = drawn
                            if MAPPED:
                                token = tl.load(draft_to_target + drawn)
                        else:
                            rated = tl.full((), 0.0, tl.float32)
                    tl.store(tokens + pair, token)
                    tl.store(confidence_logits + pair, rated)
                elif HEAD == 3:
                    r = tl.arange(0, BLOCK_RANK)
                    tl.store(
                        state + block.to(tl.int64) * RANK + r,
                        tl.zeros([BLOCK_RANK], tl.float32),
                        mask=r < RANK,
                    )
                    tl.debug_barrier()
                if goes_on != 0:
                    tl.store(num_tokens + block, position + 1)
                    if position + 1 < block_size:
                        _prepare(
                            block, position + 1, token, markov_in, mix_weight, projected, previous_rows, mixed,
                            state, block_size, hidden_size, HEAD, RANK, BLOCK_RANK, PREVIOUS,
                            16 if DOT != "ieee" else 8 if HEAD == 3 else 4,  # columns of a product: no spills
                        )  # fmt: skip
        if phase + 1 < last_phase:
            # Everyone's writes are before their arrival, and everyone's arrival before anyone goes on.
            tl.debug_barrier()
            tl.atomic_add(barrier, 1, sem="acq_rel")
            arrivals = (phase + 1 - first_phase) * num_programs
            while tl.atomic_add(barrier, 0, sem="acquire") < arrivals:
                pass
            tl.debug_barrier()
