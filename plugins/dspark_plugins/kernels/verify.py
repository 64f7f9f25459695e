"""Device code of verification: first every row's truncation, then the joint weights of chains, then one walk down each
sequence's tree.

The rules are those of the plain version. A walk reads the logits of the rows it comes to, and keeps what is left of p
after rejected children in `left`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark_plugins.kernels.sampling import (
    ACCEPT,
    REPLACE,
    SAMPLE,
    invert_row,
    invert_tile,
    race_row,
    tile_of_row,
    truncate_row,
    uniform_of,
)

__all__ = ["chain_weights_kernel", "row_limits_kernel", "walk_kernel"]

_NONE = tl.constexpr(2147483647)


@triton.jit
def _sequence_of(query_start, num_sequences, row):
    """Return the sequence that a row is of, the last one behind all rows."""
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) <= row:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def row_limits_kernel(
    logits,
    query_start,
    temperature,
    top_k,
    top_p,
    min_p,
    limits,
    bounds,
    num_sequences,
    vocab_size,
    logits_stride,
    BLOCK: tl.constexpr,
):
    """Find what stays of every row; grid (T,).

    `limits` [T, 3] float32: top, scale, weight of what stays. `bounds` [T, 3] int32: cut, last, finite.
    """
    row = tl.program_id(0)
    low = _sequence_of(query_start, num_sequences, row)
    if row < tl.load(query_start + num_sequences):
        top, scale, cut, last, total, finite = truncate_row(
            logits + row.to(tl.int64) * logits_stride,
            vocab_size,
            tl.load(temperature + low),
            tl.load(top_k + low),
            tl.load(top_p + low),
            tl.load(min_p + low),
            BLOCK,
        )
        tl.store(limits + row * 3, top)
        tl.store(limits + row * 3 + 1, scale)
        tl.store(limits + row * 3 + 2, total)
        tl.store(bounds + row * 3, cut)
        tl.store(bounds + row * 3 + 1, last)
        tl.store(bounds + row * 3 + 2, finite.to(tl.int32))


@triton.jit
def chain_weights_kernel(
    logits,
    tokens,
    query_start,
    draft_probs,
    prob_rows,
    target_to_draft,
    temperature,
    coupled,
    limits,
    bounds,
    weights,
    num_sequences,
    vocab_size,
    draft_vocab_size,
    logits_stride,
    max_depth,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find joint weights for block verification; grid (T,).

    `weights` [T, 2] float32: w_k of row k of a chain, and S_k = sum of max(w_k p - q, 0) where a draft is behind it.
    Rows of the anchor, of other rules and behind a row that is not finite are not for reading.
    """
    row = tl.program_id(0)
    low = _sequence_of(query_start, num_sequences, row)
    start = tl.load(query_start + low)
    end = tl.load(query_start + low + 1)
    k = row - start
    by_block = (tl.load(temperature + low) > 0) & (tl.load(coupled + low) == 0)
    if by_block & (row < end) & (k > 0) & (k <= max_depth):
        weight = tl.full((), 1.0, tl.float32)
        for j in range(1, k + 1):
            at = start + j - 1
            drafted = tl.load(tokens + at + 1)
            p = _p_at(
                logits + at.to(tl.int64) * logits_stride, drafted, vocab_size, tl.load(limits + at * 3),
                tl.load(limits + at * 3 + 1), tl.load(bounds + at * 3), tl.load(bounds + at * 3 + 1),
            )  # fmt: skip
            finite = tl.load(bounds + at * 3 + 2) != 0
            joint = weight * (p / tl.where(finite, tl.load(limits + at * 3 + 2), 1.0))
            q = _drafted(
                draft_probs, tl.load(prob_rows + at + 1), draft_vocab_size, target_to_draft, drafted, drafted,
                drafted < vocab_size, MAPPED,
            )  # fmt: skip
            weight = tl.where(joint < q, joint / tl.maximum(q, 1e-37), tl.where(joint > 0, 1.0, 0.0))
        rest = tl.full((), 0.0, tl.float32)
        if (weight > 0) & (row + 1 < end) & (k < max_depth) & (tl.load(bounds + row * 3 + 2) != 0):
            rest = _anything_left(
                logits + row.to(tl.int64) * logits_stride, weights, 1, vocab_size, tl.load(limits + row * 3),
                tl.load(limits + row * 3 + 1), tl.load(bounds + row * 3), tl.load(bounds + row * 3 + 1),
                tl.load(limits + row * 3 + 2) / weight, draft_probs, tl.load(prob_rows + row + 1),
                draft_vocab_size, target_to_draft, tl.load(tokens + row + 1), MAPPED, BLOCK,
            )  # fmt: skip
        tl.store(weights + row * 2, weight)
        tl.store(weights + row * 2 + 1, rest)


@triton.jit
def _block_length(
    prob_rows, bounds, weights, start, num_drafts, seed, position,
):  # fmt: skip
    """Return how many drafts of a chain are accepted by block verification and their joint weight; -1 where nothing
    was drawn, so that it goes token by token.
    """
    best = tl.full((), 0, tl.int32)
    best_weight = tl.full((), 1.0, tl.float32)
    drawn = tl.full((), 0, tl.int32)
    readable = tl.load(bounds + start * 3 + 2)
    for k in range(1, num_drafts + 1):
        at = start + k
        drawn = tl.maximum(drawn, (tl.load(prob_rows + at) >= 0).to(tl.int32))
        weight = tl.load(weights + at * 2)
        left = tl.load(weights + at * 2 + 1)
        goes_on = (k < num_drafts) & (tl.load(bounds + at * 3 + 2) != 0)
        total = left + 1.0 - weight
        inner = tl.where(total > 0, left / tl.maximum(total, 1e-37), 1.0)
        u = uniform_of(seed, position + k - 1, k - 1, ACCEPT).to(tl.float32)
        accepts = (readable != 0) & (u < tl.where(goes_on, inner, weight))
        best = tl.where(accepts, k, best)
        best_weight = tl.where(accepts, weight, best_weight)
        readable = tl.where(goes_on, readable, 0)
    return tl.where(drawn != 0, best, -1), best_weight


@triton.jit
def _child(
    parents,
    tokens,
    start,
    num_rows,
    node,
    after,
    token,
    ANY: tl.constexpr,
    TREE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the first row behind `after` whose parent is `node` (and whose token is `token`), -1 = none."""
    if TREE:
        found = tl.full((), _NONE, tl.int32)
        for begin in range(0, num_rows, BLOCK):
            row = begin + tl.arange(0, BLOCK)
            hit = (row < num_rows) & (row > after)
            hit = hit & (tl.load(parents + start + row, mask=row < num_rows, other=-2) == node)
            if not ANY:
                hit = hit & (tl.load(tokens + start + row, mask=row < num_rows, other=-1) == token)
            found = tl.minimum(found, tl.min(tl.where(hit, row, _NONE), axis=0))
        found = tl.where(found == _NONE, -1, found)
    else:
        # A chain's only child; asked for again it has no sibling.
        row = node + 1
        inside = (row < num_rows) & (row > after)
        found = tl.where(inside, row, -1)
        if not ANY:
            its = tl.load(tokens + start + row, mask=inside, other=-1)
            found = tl.where(its == token, found, -1)
    return found


@triton.jit
def _drafted(draft_probs, row, vocab_size, target_to_draft, token, entry, inside, MAPPED: tl.constexpr):
    """Return q of target tokens `entry`; `row` -1 = one-hot at `token`."""
    at = entry
    real = inside
    if MAPPED:
        at = tl.load(target_to_draft + entry, mask=inside, other=-1)
        real = inside & (at >= 0)
    q = tl.load(draft_probs + row.to(tl.int64) * vocab_size + at, mask=real & (row >= 0), other=0.0)
    return tl.where(row >= 0, q, tl.where(entry == token, 1.0, 0.0))


@triton.jit
def _p_at(row, token, n, top, scale, cut, last):
    """Return the weight of one token that may lie outside the vocabulary."""
    x = tl.load(row + token, mask=token < n, other=float("-inf")).to(tl.float32)
    distance = (top - x) * scale
    bits = distance.to(tl.int32, bitcast=True)
    return tl.where((bits < cut) | ((bits == cut) & (token <= last)), tl.exp(-distance), 0.0)


@triton.jit
def _keep_left(
    row, left, first, n, top, scale, cut, last, mass, draft_probs, q_row, draft_size, target_to_draft, token,
    MAPPED: tl.constexpr, SUBTRACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write max(p - q, 0) (or p) into `left` [n], return its sum; p comes from the logits first, then from `left`."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, n, BLOCK):
        entry, _, _, p = tile_of_row(row, start, n, top, scale, cut, last, BLOCK)
        inside = entry < n
        if first == 0:
            p = tl.load(left + entry, mask=inside, other=0.0)
        p = p / mass
        if SUBTRACT:
            q = _drafted(draft_probs, q_row, draft_size, target_to_draft, token, entry, inside, MAPPED)
            p = tl.maximum(p - tl.where(inside, q, 0.0), 0.0)
        tl.store(left + entry, p, mask=inside)
        total += tl.sum(p, axis=0).to(tl.float64)
    return total.to(tl.float32)


@triton.jit
def _anything_left(
    row, left, first, n, top, scale, cut, last, mass, draft_probs, q_row, draft_size, target_to_draft, token,
    MAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the weight of max(p - q, 0), writing nothing."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, n, BLOCK):
        entry, _, _, p = tile_of_row(row, start, n, top, scale, cut, last, BLOCK)
        inside = entry < n
        if first == 0:
            p = tl.load(left + entry, mask=inside, other=0.0)
        q = _drafted(draft_probs, q_row, draft_size, target_to_draft, token, entry, inside, MAPPED)
        total += tl.sum(tl.maximum(p / mass - tl.where(inside, q, 0.0), 0.0), axis=0).to(tl.float64)
    return total.to(tl.float32)


@triton.jit
def _invert_left(left, n, mass, BLOCK: tl.constexpr):
    running = tl.full((), 0.0, tl.float64)
    found = tl.full((), -1, tl.int32)
    fallback = tl.full((), 0, tl.int32)
    for start in range(0, n, BLOCK):
        if found < 0:
            entry = start + tl.arange(0, BLOCK)
            weight = tl.load(left + entry, mask=entry < n, other=0.0)
            found, fallback, running = invert_tile(weight, entry, running, mass, fallback)
    return tl.where(found < 0, fallback, found)


@triton.jit
def walk_kernel(
    logits,
    tokens,
    query_start,
    parents,
    draft_probs,
    prob_rows,
    target_to_draft,
    positions,
    seeds,
    temperature,
    coupled,
    limits,
    bounds,
    weights,
    left_of_all,
    accepted,
    path,
    next_token,
    vocab_size,
    draft_vocab_size,
    logits_stride,
    max_depth,
    TREE: tl.constexpr,
    PROBS: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_CHILDREN: tl.constexpr,
):
    """Walk one sequence; grid (R,). `left_of_all` [R, V] float32 is room for what refusing leaves of p, `weights` what
    `chain_weights_kernel` found (read for chains with distributions alone).
    """
    sequence = tl.program_id(0)
    start = tl.load(query_start + sequence)
    num_rows = tl.load(query_start + sequence + 1) - start
    seed = tl.load(seeds + sequence)
    position = tl.load(positions + sequence)
    sampled = tl.load(temperature + sequence) > 0
    races = tl.load(coupled + sequence) != 0
    left = left_of_all + sequence.to(tl.int64) * vocab_size
    none = tl.full((), -1, tl.int32)
    depth = tl.full((), 0, tl.int32)
    node = tl.full((), 0, tl.int32)
    token = none
    walking = (num_rows > 0).to(tl.int32)
    for i in range(max_depth):
        tl.store(path + sequence * max_depth + i, -1)
    block_weight = tl.full((), -1.0, tl.float32)  # of the accepted drafts, where they are decided on together
    if PROBS and not TREE:
        num_drafts = tl.minimum(num_rows - 1, max_depth)
        if sampled & (races == 0) & (num_drafts > 1):
            length, weight = _block_length(prob_rows, bounds, weights, start, num_drafts, seed, position)
            if length >= 0:
                block_weight = weight
                depth = length
                node = length
                for i in range(length):
                    tl.store(path + sequence * max_depth + i, i + 1)
    while walking > 0:
        at = start + node
        row = logits + at.to(tl.int64) * logits_stride
        top = tl.load(limits + at * 3)
        scale = tl.load(limits + at * 3 + 1)
        total = tl.load(limits + at * 3 + 2)
        cut = tl.load(bounds + at * 3)
        last = tl.load(bounds + at * 3 + 1)
        token = none
        taken = none
        if tl.load(bounds + at * 3 + 2) != 0:
            if sampled & (races == 0):
                child = none
                if depth < max_depth:
                    child = _child(
                        parents, tokens, start, num_rows, node, node, none, True, TREE, BLOCK_CHILDREN
                    )
                if child < 0:
                    u = uniform_of(seed, position + depth, 0, SAMPLE)
                    token = invert_row(row, vocab_size, top, scale, cut, last, total, u, BLOCK)
                else:
                    first = tl.full((), 1, tl.int32)
                    lane = tl.full((), 0, tl.int32)
                    mass = total
                    if block_weight >= 0:
                        mass = total / block_weight
                    while child >= 0:
                        drafted = tl.load(tokens + start + child)
                        q_row = none
                        if PROBS:
                            q_row = tl.load(prob_rows + start + child)
                        p = _p_at(row, drafted, vocab_size, top, scale, cut, last)
                        if first == 0:
                            p = tl.load(left + drafted, mask=drafted < vocab_size, other=0.0)
                        p = p / mass
                        q = _drafted(
                            draft_probs, q_row, draft_vocab_size, target_to_draft, drafted, drafted,
                            drafted < vocab_size, MAPPED,
                        )  # fmt: skip
                        number = lane if TREE else depth
                        u = uniform_of(seed, position + depth, number, ACCEPT).to(tl.float32)
                        if (u * q < p) & (block_weight < 0):
                            taken = child
                            child = none
                        else:
                            rest = _anything_left(
                                row, left, first, vocab_size, top, scale, cut, last, mass,
                                draft_probs, q_row, draft_vocab_size, target_to_draft, drafted, MAPPED, BLOCK,
                            )  # fmt: skip
                            tl.debug_barrier()
                            if rest > 0:
                                mass = _keep_left(
                                    row, left, first, vocab_size, top, scale, cut, last, mass,
                                    draft_probs, q_row, draft_vocab_size, target_to_draft, drafted,
                                    MAPPED, True, BLOCK,
                                )  # fmt: skip
                            else:
                                mass = _keep_left(
                                    row, left, first, vocab_size, top, scale, cut, last, mass,
                                    draft_probs, q_row, draft_vocab_size, target_to_draft, drafted,
                                    MAPPED, False, BLOCK,
                                )  # fmt: skip
                            tl.debug_barrier()
                            first = tl.full((), 0, tl.int32)
                            lane += 1
                            child = _child(
                                parents,
                                tokens,
                                start,
                                num_rows,
                                node,
                                child,
                                none,
                                True,
                                TREE,
                                BLOCK_CHILDREN,
                            )
                    if taken < 0:
                        share = uniform_of(seed, position + depth, 0, REPLACE) * mass.to(tl.float64)
                        token = _invert_left(left, vocab_size, share, BLOCK)
            else:
                if sampled:
                    token = race_row(
                        row, vocab_size, top, scale, cut, last, seed, position + depth, tokens, False, BLOCK
                    )
                else:
                    token = last
                if depth < max_depth:
                    taken = _child(
                        parents, tokens, start, num_rows, node, node, token, False, TREE, BLOCK_CHILDREN
                    )
        if taken < 0:
            walking = tl.full((), 0, tl.int32)
        else:
            tl.store(path + sequence * max_depth + depth, taken)
            depth += 1
            node = taken
    tl.store(accepted + sequence, depth)
    tl.store(next_token + sequence, token)
