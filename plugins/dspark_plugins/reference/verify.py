"""Plain version of the `verify` op: accept a path of drafted tokens, add one token of the target.

    greedy     go to the child that is the arg-max
    coupled    go to the child that the target itself draws
    block      chains of several drafts of which any was drawn: w_0 = 1, w_k = min(w_(k-1) p_k / q_k, 1), S_k the sum of
               max(w_k p_(k+1) - q_(k+1), 0); the accepted length is the largest k with u_k < S_k / (S_k + 1 - w_k), or
               < w_k at the last one; the next token is drawn from max(w p - q, 0) there (arXiv 2403.10444)
    rejection  try the children in order: child i, drawn from q_i, is taken with min(1, p_i / q_i), else
               p_(i+1) = max(p_i - q_i, 0), renormalised; with none taken the next token is drawn from what is left

A chain is the tree of one child each. Where neither a seed was named nor the temperature is 0, chains go by `block` and
trees, single drafts and one-hot chains by `rejection`; for the latter two the rules are one. `rejection` keeps the
target's distribution whatever the q_i are, as long as child i was drawn from q_i given its earlier siblings: drawn
independently they share one q (arXiv 2305.09781), drawn without replacement each has its own. Sources of its chain
rule: arXiv 2302.01318, 2211.17192.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dspark_plugins.reference.sampling import (
    ACCEPT,
    REPLACE,
    SAMPLE,
    draw,
    inverse_cdf,
    truncated_weights,
    uniform,
)

__all__ = ["VerifyOutput", "verify"]


class VerifyOutput(NamedTuple):
    """What R sequences commit: the drafts on the path, then one token of the target."""

    accepted: Tensor  # [R] int32 drafts on the path
    path: Tensor  # [R, max_depth] int32 their rows, counted from the sequence's first; -1 behind them
    next_token: Tensor  # [R] int32, -1 where a row that was read is not finite and where there are no rows


def verify(
    logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    parents: Tensor | None,
    draft_probs: Tensor | None,
    prob_rows: Tensor | None,
    target_to_draft: Tensor | None,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    coupled: Tensor,
    max_depth: int,
) -> VerifyOutput:
    """Verify R chains or trees; arguments and shapes are those of `dspark_plugins.ops.verify`."""
    num_sequences = len(query_start) - 1
    accepted = torch.zeros(num_sequences, dtype=torch.int32)
    path = torch.full((num_sequences, max_depth), -1, dtype=torch.int32)
    next_token = torch.full((num_sequences,), -1, dtype=torch.int32)
    for i in range(num_sequences):
        start, stop = int(query_start[i]), int(query_start[i + 1])
        if stop == start:
            continue
        num_rows = stop - start
        tree = Tree(
            tokens[start:stop].tolist(),
            [-1, *range(num_rows - 1)] if parents is None else parents[start:stop].tolist(),
        )
        rows = Rows(logits[start:stop], temperature[i], top_k[i], top_p[i], min_p[i])
        noise = Noise(seeds[i : i + 1], int(positions[i]), chain=parents is None)
        num_drafts = min(num_rows - 1, max_depth)
        if float(temperature[i]) > 0 and not bool(coupled[i]):
            q = Drafted(draft_probs, prob_rows, target_to_draft, start, tree.tokens, logits.shape[1])
            if parents is None and num_drafts > 1 and q.any_drawn(num_drafts):
                nodes, added = walk_block(tree.tokens, rows, q, noise, num_drafts)
            else:
                nodes, added = walk_rejection(tree, rows, q, noise, max_depth)
        else:
            nodes, added = _walk_drawn(tree, rows, noise, max_depth, coupled=bool(coupled[i]))
        accepted[i], next_token[i] = len(nodes), added
        path[i, : len(nodes)] = torch.tensor(nodes, dtype=torch.int32)
    device = logits.device
    return VerifyOutput(accepted.to(device), path.to(device), next_token.to(device))


class Tree:
    def __init__(self, tokens: list[int], parents: list[int]) -> None:
        self.tokens, self.parents = tokens, parents

    def children(self, node: int) -> list[int]:
        return [row for row in range(node + 1, len(self.parents)) if self.parents[row] == node]


class Rows:
    """The target's rows of one sequence, transformed when asked for."""

    def __init__(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> None:
        self._logits = logits
        self._params = [value[None] for value in (temperature, top_k, top_p, min_p)]

    def log_weights(self, node: int) -> Tensor | None:
        """Return [1, V], None for a row that is not finite."""
        log_weights, finite = truncated_weights(self._logits[node : node + 1].float(), *self._params)
        return log_weights if bool(finite[0]) else None

    def probs(self, node: int) -> Tensor | None:
        """Return p of a row, float64 [V], None for one that is not finite."""
        log_weights = self.log_weights(node)
        if log_weights is None:
            return None
        weights = log_weights[0].double().exp()
        return weights / weights.sum()


class Noise:
    """Random numbers of one sequence; `depth` counts from the first drafted position.

    Drafts of a chain are judged with numbers of their own for each anchor: under `block` those behind the accepted ones
    are looked at too, and drafted again.
    """

    def __init__(self, seed: Tensor, position: int, *, chain: bool = False) -> None:
        self.seed, self._position, self._chain = seed, position, chain

    def position(self, depth: int) -> Tensor:
        return torch.full_like(self.seed, self._position + depth)

    def uniform(self, depth: int, purpose: int, lane: int = 0) -> Tensor:
        if self._chain and purpose == ACCEPT:
            lane = depth
        return uniform(self.seed, self.position(depth), purpose, lane)


class Drafted:
    """What drafts were drawn from."""

    def __init__(
        self,
        probs: Tensor | None,
        rows: Tensor | None,
        target_to_draft: Tensor | None,
        start: int,
        tokens: list[int],
        vocab_size: int,
    ) -> None:
        self._probs, self._rows, self._inverse = probs, rows, target_to_draft
        self._start, self._tokens, self._vocab_size = start, tokens, vocab_size

    def any_drawn(self, num_drafts: int) -> bool:
        """Return whether one of a chain's first drafts was drawn rather than looked up."""
        rows = None if self._probs is None else self._rows
        return rows is not None and bool((rows[self._start + 1 : self._start + 1 + num_drafts] >= 0).any())

    def q(self, node: int) -> Tensor:
        """Return q over the target's vocabulary, float64 [V]."""
        row = -1 if self._rows is None else int(self._rows[self._start + node])
        if row < 0 or self._probs is None:
            one_hot = torch.zeros(self._vocab_size, dtype=torch.float64)
            one_hot[self._tokens[node]] = 1.0
            return one_hot
        drafted = self._probs[row].double()
        if self._inverse is None:
            return drafted
        return torch.where(self._inverse >= 0, drafted[self._inverse.long().clamp(min=0)], 0.0)


def _walk_drawn(
    tree: Tree, rows: Rows, noise: Noise, max_depth: int, *, coupled: bool
) -> tuple[list[int], int]:
    """Follow the tokens that the target draws; return the path and the first of them that no child is."""
    nodes: list[int] = []
    node = 0
    while True:
        log_weights = rows.log_weights(node)
        if log_weights is None:
            return nodes, -1
        token = _drawn(log_weights, noise, len(nodes), coupled=coupled)
        hits = [child for child in tree.children(node) if tree.tokens[child] == token]
        if not hits or len(nodes) == max_depth:
            return nodes, token
        node = hits[0]
        nodes.append(node)


def walk_block(
    tokens: list[int], rows: Rows, drafted: Drafted, noise: Noise, num_drafts: int
) -> tuple[list[int], int]:
    """Decide over a chain as a whole; a row that is not finite ends the block in front of it."""
    ps: list[Tensor] = []
    weights = [1.0]
    while len(ps) < num_drafts and (p := rows.probs(len(ps))) is not None:
        ps.append(p)
        token = tokens[len(ps)]
        joint, q = weights[-1] * float(p[token]), float(drafted.q(len(ps))[token])
        weights.append(joint / q if joint < q else float(joint > 0.0))

    def left_at(k: int) -> Tensor:
        return (weights[k] * ps[k] - drafted.q(k + 1)).clamp(min=0)

    def threshold(k: int) -> float:
        if k == len(ps):
            return weights[k]
        left = float(left_at(k).sum())
        total = left + 1.0 - weights[k]
        return left / total if total > 0.0 else 1.0

    fitting = (k for k in range(len(ps), 0, -1) if float(noise.uniform(k - 1, ACCEPT)) < threshold(k))
    accepted = next(fitting, 0)
    nodes = [*range(1, accepted + 1)]
    if accepted == len(ps):
        log_weights = rows.log_weights(accepted)
        return nodes, -1 if log_weights is None else _drawn(log_weights, noise, accepted, coupled=False)
    left = left_at(accepted)
    left = left if float(left.sum()) > 0 else ps[accepted]
    return nodes, int(inverse_cdf(left[None], noise.uniform(accepted, REPLACE)))


def walk_rejection(
    tree: Tree, rows: Rows, drafted: Drafted, noise: Noise, max_depth: int
) -> tuple[list[int], int]:
    nodes: list[int] = []
    node = 0
    while True:
        log_weights = rows.log_weights(node)
        if log_weights is None:
            return nodes, -1
        depth = len(nodes)
        children = tree.children(node) if depth < max_depth else []
        if not children:
            return nodes, _drawn(log_weights, noise, depth, coupled=False)
        p = log_weights[0].double().exp()
        p = p / p.sum()
        taken = None
        for lane, child in enumerate(children):
            q = drafted.q(child)
            token = tree.tokens[child]
            if float(noise.uniform(depth, ACCEPT, lane)) * float(q[token]) < float(p[token]):
                taken = child
                break
            left = (p - q).clamp(min=0)
            p = left / left.sum() if float(left.sum()) > 0 else p
        if taken is None:
            return nodes, int(inverse_cdf(p[None], noise.uniform(depth, REPLACE)))
        node = taken
        nodes.append(node)


def _drawn(log_weights: Tensor, noise: Noise, depth: int, *, coupled: bool) -> int:
    entries = torch.arange(log_weights.shape[1], device=log_weights.device)
    flag = torch.tensor([coupled], device=log_weights.device)
    return int(
        draw(
            log_weights,
            entries,
            seed=noise.seed,
            position=noise.position(depth),
            coupled=flag,
            purpose=SAMPLE,
        )
    )
