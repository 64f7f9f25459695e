"""What the nodes of a drafted tree are worth, learnt while serving.

The probability that a node is right, given that its parent is, is modelled as

    sigmoid(w0 + w1 * logit(q) + w2 * rating + w3 * depth)

with weights of its own for the likeliest sibling, the second, and all others; q is the drafter's, `rating` the
confidence logit of the slot. Every verified step tells the truth of all children of all nodes on the accepted path,
verified or not: the token that the target drew there is known. Nothing is censored but what lies deeper.

The weights follow by Newton steps on a fading history (logistic regression, recursive); a strong prior holds them at
"q is right" while data is scarce.

A tree sorted by the survival of its nodes (the product along the path) is to a scheduler what a chain is: each node
costs one row, and the first n nodes promise the sum of their survivals. So `rate` gives the ratio of one survival to
the one before as that node's confidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dspark.drafters.interface import DraftBlock, DraftTree
from dspark.sampling.verification import Verdict
from dspark.scheduling.interface import Calibrator, Float32, Kinds

__all__ = ["RATED", "BlockCalibrator", "TreeRater"]

Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]

RATED = 3  # kind of traffic, beside those of `scheduling.interface`: the logits are honest already
_RANKS = 3  # the likeliest sibling, the second, all others
_PRIOR = np.diag([8.0, 8.0, 8.0, 8.0])  # worth some dozens of nodes
_FADE = 0.998  # of the history, each time it is learnt from
_LEARN_EVERY = 8  # steps
_MOST = 20.0  # largest logit


class TreeRater:
    """Rates trees, orders their nodes, and learns from what became of them."""

    def __init__(self) -> None:
        self.weights = np.tile(np.array([0.0, 1.0, 0.0, 0.0]), (_RANKS, 1))  # [rank, feature]
        self._curvature = np.tile(_PRIOR, (_RANKS, 1, 1))
        self._seen: list[tuple[Float64, Int32, Bool]] = []  # features, rank groups, labels of nodes
        self._num_steps = 0

    def rate(self, block: DraftBlock) -> DraftBlock:
        """Return the block with its trees in order of survival, and their confidence logits.

        Looked-up rows stay as they are, their logits NaN. A node that was rated NaN or infinite is left out, and so is
        what lies behind it.
        """
        tree = block.tree
        assert tree is not None, "only trees are rated here"
        survival = self.survival(tree)
        at = np.arange(survival.shape[1], dtype=np.int32)
        kept = (at < tree.num_nodes[:, None]) & np.isfinite(survival)
        survival[~kept] = -1.0
        num_nodes = kept.sum(axis=1, dtype=np.int32)
        if block.looked_up is not None:
            survival[block.looked_up] = -at  # keeps its order
            num_nodes = np.where(block.looked_up, tree.num_nodes, num_nodes)
        order = np.argsort(-survival, axis=1, kind="stable")  # a parent stands before its children already
        rows = np.arange(len(order))[:, None]
        place = np.empty_like(order)
        place[rows, order] = at
        parents = tree.parents[rows, order]
        ordered = DraftTree(
            tokens=tree.tokens[rows, order],
            parents=np.where(parents < 0, -1, place[rows, np.maximum(parents, 0)]).astype(np.int32),
            depths=tree.depths[rows, order],
            ranks=tree.ranks[rows, order],
            log_q=tree.log_q[rows, order],
            rating=None if tree.rating is None else tree.rating[rows, order],
            num_nodes=num_nodes,
        )
        logits = _confidence_logits(survival[rows, order])
        if block.looked_up is not None:
            logits[block.looked_up] = np.nan
        return replace(
            block, tokens=ordered.tokens, num_tokens=num_nodes, confidence_logits=logits, tree=ordered
        )

    def survival(self, tree: DraftTree) -> Float64:
        """Return the probability that a node and all before it on its path are right [R, N], NaN where nothing says."""
        group = np.minimum(tree.ranks, _RANKS - 1)
        z = (self.weights[group] * _features(tree)).sum(axis=2)
        confidence = 1.0 / (1.0 + np.exp(-np.clip(z, -_MOST, _MOST)))
        survival = np.empty_like(confidence)
        for row, (values, parents) in enumerate(zip(confidence.tolist(), tree.parents.tolist(), strict=True)):
            path: list[float] = []
            for value, parent in zip(values, parents, strict=True):
                path.append(value if parent < 0 else value * path[parent])
            survival[row] = path
        return np.asarray(survival)

    def observe(self, block: DraftBlock, verdicts: Sequence[Verdict | None], *, usable: Bool) -> None:
        """Take what became of the trees of a block that `rate` returned.

        Arguments:
            verdicts: of every row, None where it failed.
            usable: [R] rows to learn from; looked-up ones and those without drafts are left out anyway.
        """
        tree = block.tree
        if tree is None:
            return
        self._num_steps += 1
        for row, verdict in enumerate(verdicts):
            looked_up = block.looked_up is not None and block.looked_up[row]
            if verdict is None or not usable[row] or looked_up or not tree.num_nodes[row]:
                continue
            nodes, labels = _labels(tree, row, verdict.token_ids)
            self._seen.append(
                (
                    _features(tree, row, nodes),
                    np.minimum(tree.ranks[row, nodes], _RANKS - 1).astype(np.int32),
                    np.array(labels, np.bool_),
                )
            )
        if self._num_steps % _LEARN_EVERY == 0 and self._seen:
            self._learn()

    def _learn(self) -> None:
        x, group, label = (np.concatenate(part) for part in zip(*self._seen, strict=True))
        self._seen.clear()
        for rank in range(_RANKS):
            mine = group == rank
            if not mine.any():
                continue
            xs = x[mine]
            p = 1.0 / (1.0 + np.exp(-np.clip(xs @ self.weights[rank], -_MOST, _MOST)))
            old = _FADE * self._curvature[rank] + (1.0 - _FADE) * _PRIOR
            self._curvature[rank] = old + (xs * np.maximum(p * (1.0 - p), 0.01)[:, None]).T @ xs
            self.weights[rank] += np.linalg.solve(self._curvature[rank], xs.T @ (label[mine] - p))


class BlockCalibrator:
    """A calibrator for blocks of two kinds: chains, which `inner` calibrates, and trees that are rated already.

    Arguments:
        inner: of chains of G drafts; what lies behind them in wider arrays means nothing.
        chain_len: G.
    """

    def __init__(self, inner: Calibrator, *, chain_len: int) -> None:
        self.inner = inner
        self.chain_len = chain_len

    def confidence(self, logits: Float32, *, sampled: Kinds) -> Float64:
        """Return c_k [R, W] for logits [R, W]; NaN for a logit that is not finite."""
        rated = np.asarray(sampled) == RATED
        honest = np.asarray(0.5 * (1.0 + np.tanh(0.5 * logits.astype(np.float64))))
        if rated.all():
            return honest
        kinds = np.where(rated, 0, sampled).astype(np.int8)
        chains = self.inner.confidence(np.ascontiguousarray(logits[:, : self.chain_len]), sampled=kinds)
        honest[~rated, : self.chain_len] = chains[~rated]
        return honest

    def confidence_of_one(self, logits: Sequence[float], *, sampled: int) -> list[float]:
        """Return c_k of one sequence, up to the first logit that is not finite."""
        if sampled != RATED:
            return self.inner.confidence_of_one(logits[: self.chain_len], sampled=sampled)
        honest = []
        for logit in logits:
            if not math.isfinite(logit):
                break
            honest.append(0.5 * (1.0 + math.tanh(0.5 * logit)))
        return honest

    def observe(
        self, logits: Float32, labels: Float64, *, sampled: Kinds, usable: Bool, num_steps: int = 1
    ) -> None:
        """Hand on what some steps showed of their chains."""
        self.inner.observe(
            np.ascontiguousarray(logits[:, : self.chain_len]),
            np.ascontiguousarray(labels[:, : self.chain_len]),
            sampled=sampled,
            usable=usable,
            num_steps=num_steps,
        )

    def ece(self) -> Float64:
        """Return the expected calibration error of each position of chains [G]."""
        return self.inner.ece()

    def deepest_starved(self) -> int:
        """Return the deepest position of chains that has shown nothing for long, 0 when there is none."""
        return self.inner.deepest_starved()


def _features(tree: DraftTree, row: int | None = None, nodes: Sequence[int] | None = None) -> Float64:
    """Return 1, logit of q, rating and depth of all nodes [R, N, 4], or of some of one row [n, 4]."""
    at = (slice(None),) if row is None else (row, nodes)
    log_q = tree.log_q[at].astype(np.float64)
    logit = log_q - np.log(np.maximum(-np.expm1(log_q), 1e-6))
    rating = np.zeros_like(log_q) if tree.rating is None else tree.rating[at]
    rating = np.where(np.isfinite(rating), rating, np.nan)
    features = np.stack([np.ones_like(log_q), logit, rating, 0.25 * tree.depths[at]], axis=-1)
    return np.asarray(np.clip(features, -_MOST, _MOST))


def _labels(tree: DraftTree, row: int, token_ids: Sequence[int]) -> tuple[list[int], list[bool]]:
    """Return the nodes whose parent is on the path that the target took, and whether they are on it as well.

    Arguments:
        token_ids: what was drawn from the anchor on, the added token too.
    """
    count = int(tree.num_nodes[row])
    tokens, parents = tree.tokens[row, :count].tolist(), tree.parents[row, :count].tolist()
    nodes: list[int] = []
    labels: list[bool] = []
    at = -1
    for token in token_ids:
        found = None
        for node in range(max(at, 0), count):
            if parents[node] == at:
                nodes.append(node)
                labels.append(tokens[node] == token)
                if tokens[node] == token:
                    found = node
        if found is None:
            break
        at = found
    return nodes, labels


def _confidence_logits(survival: Float64) -> npt.NDArray[np.float32]:
    """Return the logits of c_k whose running products are these falling survivals [R, N]."""
    before = np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], axis=1)
    ratio = np.clip(np.maximum(survival, 0.0) / np.maximum(before, 1e-12), 1e-9, 1.0 - 1e-7)
    return np.asarray(np.log(ratio) - np.log1p(-ratio), np.float32)
