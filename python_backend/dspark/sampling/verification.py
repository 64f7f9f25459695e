"""Lossless verification of drafted tokens (algorithm.md, section 3).

    greedy     temperature 0: a draft is accepted while it is the arg-max
    block      drawn seed: the accepted length is drawn over the whole block (`block_verification.py`)
    rejection  the same token by token: accepted with min(1, p/q), else replaced from what p has over q
    coupled    named seed: accepted while it is the token the target itself draws; the output is then a
               function of seed and target alone, the same with every drafter, policy, load and batch

Rows are read one at a time and, but for `block`, only as far as drafts are accepted. Knows no engine and no stop rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dspark.errors import ConfigError, NonFiniteError, RequestError
from dspark.sampling.block_verification import next_weight, verify_block
from dspark.sampling.distribution import Distribution
from dspark.sampling.philox import Purpose
from dspark.sampling.residual import probs_at, residual
from dspark.sampling.transforms import TokenSampler, VerificationRule, inverse_cdf

__all__ = [
    "Verdict",
    "coupled_acceptance",
    "rejection_acceptance",
    "rejection_step",
    "verify_chain",
    "verify_tree",
]

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


# Of a row that is not finite, or of which a guide or ban leaves nothing. Drafts accepted up to it are committed, the
# last of them as the added token: the answer has all that plain decoding gives before it fails.
_UNREADABLE = (NonFiniteError, RequestError)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one step commits for one sequence: the accepted drafts and one token of the target.

    `soft_labels[k]` is the exact probability, over the draw of x_k and of what comes behind it, that position k is
    accepted given that those before it were; one for every accepted position, the first rejected, and the draft
    that was cut off where `verify_chain` was told of it. None when not asked for, and at temperature 0; empty
    where a device verified drafts of a drawn seed, which tells hit and miss alone.
    """

    accepted: int  # drafts only
    token_ids: tuple[int, ...]  # [accepted + 1]
    soft_labels: tuple[float, ...] | None = None
    path: tuple[int, ...] | None = (
        None  # [accepted] nodes of a tree that were accepted; None = the chain's first ones
    )


def verify_chain(
    sampler: TokenSampler,
    logits: Float32,
    argmax: Int32 | None,
    drafts: Sequence[int],
    distributions: Sequence[Distribution | None] | None,
    *,
    position: int,
    rule: VerificationRule | None = None,
    soft_labels: bool = False,
    cut_off: tuple[int, Distribution | None] | None = None,
) -> Verdict:
    """Verify the drafts of one sequence.

    Arguments:
        sampler: the request's, committed up to and including the anchor.
        logits: [1+l, V] float32; row k follows the anchor and the first k drafts.
        argmax: [1+l] arg-max of each row, lowest id among equals, of finite rows; None = not known.
        drafts: l token ids.
        distributions: q_k of every draft, None for a one-hot one; None = all one-hot.
        position: absolute position of the first drafted token.
        rule: None = the sampler's own.
        soft_labels: whether to compute `Verdict.soft_labels`.
        cut_off: under `block` and `rejection`, the draft behind the last verified one and its q (None = one-hot), to be
            labelled when all before it are accepted: the row that gives the added token has its p.

    Raises:
        NonFiniteError, RequestError: when the row behind the anchor is not finite, or a guide or ban leaves nothing
            of it. Where that is so of the row behind accepted drafts, the last of them is the added token.
        ConfigError: for a rule that does not fit how the sampler draws.
    """
    rule = sampler.rule if rule is None else rule
    if rule != sampler.rule:
        raise ConfigError(
            f"verification rule: got {rule!r}, but this request's drafts are drawn for {sampler.rule!r}"
        )
    drafts = [int(token_id) for token_id in drafts]
    if rule in ("block", "rejection"):
        qs = [None] * len(drafts) if distributions is None else list(distributions[: len(drafts)])
        verify = _verify_block if rule == "block" and _gains_by_block(qs) else _verify_rejection
        return verify(sampler, logits, drafts, qs, position, soft_labels, cut_off if soft_labels else None)
    return _verify_same_token(
        sampler, logits, argmax, drafts, distributions, position, soft_labels and rule == "coupled"
    )


def verify_tree(
    sampler: TokenSampler,
    logits: Float32,
    argmax: Int32 | None,
    drafts: Sequence[int],
    parents: Sequence[int],
    *,
    position: int,
) -> Verdict:
    """Walk down a tree as long as the token that the target itself draws is among the children.

    Every committed token is one that the target drew, so no distribution of the drafts is needed: the rule holds
    with any tree that was made without looking at the draws (at temperature 0 and with a named seed the output is
    that of plain decoding).

    Arguments:
        sampler: the request's, committed up to and including the anchor.
        logits: [1+l, V] float32; row 0 follows the anchor, row 1+k node k.
        argmax: [1+l] arg-max of each row, lowest id among equals; None = not known.
        drafts: l token ids, one for each node.
        parents: of each node, -1 = the anchor; siblings differ in their tokens.
        position: absolute position behind the anchor.

    Raises:
        NonFiniteError: when a row that was read is not finite.
    """
    children = {edge: node for node, edge in enumerate(zip(parents, drafts, strict=True))}
    drawn: list[int] = []
    path: list[int] = []
    at = -1
    while True:
        token_id = sampler.sample(
            logits[at + 1],
            position=position + len(path),
            drafted=tuple(drawn),
            argmax=None if argmax is None else int(argmax[at + 1]),
        )
        drawn.append(token_id)
        node = children.get((at, token_id))
        if node is None:
            return Verdict(len(path), tuple(drawn), path=tuple(path))
        path.append(node)
        at = node


def rejection_step(
    p: Distribution, q: Distribution | None, draft: int, *, accept_u: float, replace_u: float
) -> int:
    """Return the token that one position commits under rejection sampling; `draft` itself = accepted.

    A replacement is never the draft: the residual has no mass there, unless it has none at all, and then p =
    q accepts.

    Arguments:
        p: target distribution.
        q: distribution that `draft` was drawn from, None for a one-hot one.
        draft: token id.
        accept_u, replace_u: independent uniforms in (0, 1).
    """
    drafted_with = 1.0 if q is None else q.prob(draft)
    if accept_u * drafted_with < p.prob(draft):
        return draft
    left = residual(p, q, draft)
    entry = inverse_cdf(left if left.any() else p.probs, replace_u)
    return entry if p.token_ids is None else int(p.token_ids[entry])


def rejection_acceptance(p: Distribution, q: Distribution) -> float:
    """Return the probability that a draft from q is accepted by rejection sampling, 1 - 0.5 * sum|p - q|."""
    return float(np.minimum(p.probs, probs_at(q, p)).sum())


def coupled_acceptance(p: Distribution, q: Distribution) -> float:
    """Return the probability that the Gumbel races of p and q over the same noise have the same winner.

    Token x wins both with probability 1 / sum_y max(p_y / p_x, q_y / q_x); sorted by p/q the inner sum splits
    in two, so that all of them take one sort. Source: Daliri et al., arXiv 2408.07978.
    """
    at = probs_at(q, p)  # q on p's support
    shared = (p.probs > 0) & (at > 0)
    ps, qs = p.probs[shared], at[shared]
    if len(ps) == 0:
        return 0.0
    order = np.argsort(ps / qs)
    ps, qs = ps[order], qs[order]
    only_p = p.probs.sum() - ps.sum()
    only_q = q.probs.sum() - qs.sum()
    p_from = ps[::-1].cumsum()[::-1] + only_p  # tokens of at least this ratio
    q_below = qs.cumsum() - qs + only_q  # tokens of a smaller one
    return float(np.sum(1.0 / (p_from / ps + q_below / qs)))


def _gains_by_block(qs: Sequence[Distribution | None]) -> bool:
    """Return whether the two rules differ: not for a single draft, nor where nothing was drawn.

    Of one-hot drafts k are accepted with p_1(x_1) * ... * p_k(x_k) either way, and token by token reads fewer rows.
    """
    return len(qs) > 1 and any(q is not None for q in qs)


def _verify_same_token(
    sampler: TokenSampler,
    logits: Float32,
    argmax: Int32 | None,
    drafts: list[int],
    distributions: Sequence[Distribution | None] | None,
    position: int,
    soft_labels: bool,
) -> Verdict:
    """Accept drafts while they are the tokens that the target itself draws: greedy and coupled."""
    labels: list[float] = []
    accepted = 0
    while True:
        drafted = drafts[:accepted]
        try:
            token_id = sampler.sample(
                logits[accepted],
                position=position + accepted,
                drafted=drafted,
                argmax=None if argmax is None else int(argmax[accepted]),
            )
        except _UNREADABLE:
            if not drafted:
                raise
            accepted, token_id = accepted - 1, drafted[-1]
            break
        if soft_labels and accepted < len(drafts):
            p = sampler.distribution(logits[accepted], drafted=drafted)
            labels.append(coupled_acceptance(p, _draft_distribution(distributions, accepted, drafts)))
        if accepted == len(drafts) or token_id != drafts[accepted]:
            break
        accepted += 1
    return Verdict(accepted, (*drafts[:accepted], token_id), tuple(labels) if soft_labels else None)


def _verify_block(
    sampler: TokenSampler,
    logits: Float32,
    drafts: list[int],
    qs: Sequence[Distribution | None],
    position: int,
    soft_labels: bool,
    cut_off: tuple[int, Distribution | None] | None,
) -> Verdict:
    block = verify_block(sampler, logits, drafts, qs, position=position, soft_labels=soft_labels)
    accepted, labels = block.accepted, list(block.soft_labels)
    if block.replacement is not None:
        token_ids = (*drafts[:accepted], block.replacement)
    else:
        cut_off = cut_off if accepted == len(drafts) else None
        token_ids = _with_added(
            sampler, logits[accepted], drafts[:accepted], position, labels, cut_off, weight=block.weight
        )
    return Verdict(len(token_ids) - 1, token_ids, tuple(labels) if soft_labels else None)


def _verify_rejection(
    sampler: TokenSampler,
    logits: Float32,
    drafts: list[int],
    qs: Sequence[Distribution | None],
    position: int,
    soft_labels: bool,
    cut_off: tuple[int, Distribution | None] | None,
) -> Verdict:
    labels: list[float] = []
    weight = 1.0
    for accepted, (draft, q) in enumerate(zip(drafts, qs, strict=True)):
        drafted = drafts[:accepted]
        try:
            p = sampler.distribution(logits[accepted], drafted=drafted)
        except _UNREADABLE:
            if not drafted:
                raise
            token_ids = tuple(drafted)
            break
        if soft_labels:
            labels.append(_label(p, draft, q))
        token_id = rejection_step(
            p,
            q,
            draft,
            accept_u=sampler.uniform(position + accepted, Purpose.ACCEPT),
            replace_u=sampler.uniform(position + accepted, Purpose.REPLACE),
        )
        if token_id != draft:
            token_ids = (*drafted, token_id)
            break
        if (
            sampler.rule == "block"
        ):  # of which this is the short form: the draft cut off would be one of its block
            weight = next_weight(weight, p.prob(draft), 1.0 if q is None else q.prob(draft))
    else:
        token_ids = _with_added(
            sampler, logits[len(drafts)], drafts, position, labels, cut_off, weight=weight
        )
    return Verdict(len(token_ids) - 1, token_ids, tuple(labels) if soft_labels else None)


def _with_added(
    sampler: TokenSampler,
    logits: Float32,
    drafts: list[int],
    position: int,
    labels: list[float],
    cut_off: tuple[int, Distribution | None] | None,
    *,
    weight: float,
) -> tuple[int, ...]:
    """Return drafts that were all accepted and the token behind them, where there is one; label the draft that was cut
    off there.

    Arguments:
        weight: w_l of block verification, 1 token by token.
    """
    position += len(drafts)
    try:
        if cut_off is None:
            return (*drafts, sampler.sample(logits, position=position, drafted=drafts))
        p = sampler.distribution(logits, drafted=drafts)
    except _UNREADABLE:
        if not drafts:
            raise
        return tuple(drafts)
    labels.append(_label(p, *cut_off, weight=weight))
    return (*drafts, sampler.draw(p, position=position, purpose=Purpose.SAMPLE))


def _label(p: Distribution, draft: int, q: Distribution | None, *, weight: float = 1.0) -> float:
    """Return the acceptance of a draft from q given those before it, sum_x min(w * p, q) / w; of a one-hot one, p
    of the token.
    """
    if q is None:
        return p.prob(draft)
    if weight == 1.0:
        return rejection_acceptance(p, q)
    return max(0.0, 1.0 - float(residual(p, q, draft, weight).sum()) / weight)


def _draft_distribution(
    distributions: Sequence[Distribution | None] | None, k: int, drafts: Sequence[int]
) -> Distribution:
    q = None if distributions is None else distributions[k]
    return Distribution.one_hot(drafts[k]) if q is None else q
