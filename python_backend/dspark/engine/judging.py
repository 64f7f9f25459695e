"""The verdict over one sequence's rows of a target pass."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dspark.drafters.interface import DraftBlock
from dspark.engine.sequence import Sequence
from dspark.engine.verifying import device_verdict
from dspark.errors import NonFiniteError
from dspark.executors.interface import TargetOutput
from dspark.sampling.verification import Verdict, verify_chain, verify_tree

__all__ = ["judge_drafts", "judge_first_token"]


def judge_drafts(
    sequence: Sequence, block: DraftBlock, index: int, *, num_drafts: int, span: slice, output: TargetOutput
) -> Verdict:
    """Judge the drafts of a decoding sequence; rows that are not finite end the usable part.

    Of drafts that p decides about, the one that leads to such a row is judged as well: leaving it out would make how
    many are verified depend on the very token, and bend the answer.

    Of a drawn seed's drafts the verdict has exact labels, that of the first draft that was cut off among them;
    they cost a sum over two distributions that are at hand anyway. There are none where nobody learns from them: of
    rated drafts of requests that alter their logits.

    Arguments:
        block: drafts of all decoding sequences, [R, G].
        index: of this sequence among them.
        num_drafts: drafts verified.
        span: the 1 + num_drafts logit rows of this sequence.

    Raises:
        NonFiniteError: the row behind the anchor is not finite.
    """
    if output.verified is not None:
        drafts = block.tokens[index, :num_drafts].tolist()
        return device_verdict(sequence, output.verified, index, finite=output.finite[span], drafts=drafts)
    usable = _usable_rows(sequence, output.finite[span])
    verified = min(num_drafts, usable - 1)
    looked_up = block.looked_up is not None and block.looked_up[index]  # a chain, beside trees as well
    if block.tree is not None and not looked_up:
        return verify_tree(
            sequence.sampler,
            output.logits[span],
            output.argmax[span],
            block.tree.tokens[index, :verified].tolist(),
            block.tree.parents[index, :verified].tolist(),
            position=len(sequence.token_ids),
        )
    drawn = sequence.sampler.rule in ("block", "rejection")
    if drawn:
        verified = min(num_drafts, usable)
    count = int(block.num_tokens[index])
    drafts = block.tokens[index, :count].tolist()
    distributions = block.distributions[index] if block.distributions else None
    learnt_from = block.confidence_logits is None or not sequence.request.params.alters_logits
    labelled = count > 0 and drawn and learnt_from
    cut_off = None
    if labelled and verified < count:
        cut_off = (drafts[verified], distributions[verified] if distributions else None)
    return verify_chain(
        sequence.sampler,
        output.logits[span],
        output.argmax[span],
        drafts[:verified],
        distributions,
        position=len(sequence.token_ids),
        soft_labels=labelled,
        cut_off=cut_off,
    )


def judge_first_token(sequence: Sequence, index: int, row: int, output: TargetOutput) -> Verdict:
    """Draw the first token of an answer from the logit row of its prompt's last token.

    Arguments:
        index: of this sequence among those of the pass.
        row: the logit row.

    Raises:
        NonFiniteError: that row is not finite.
    """
    span = slice(row, row + 1)
    if output.verified is not None:
        return device_verdict(sequence, output.verified, index, finite=output.finite[span], drafts=[])
    _usable_rows(sequence, output.finite[span])
    return verify_chain(
        sequence.sampler,
        output.logits[span],
        output.argmax[span],
        (),
        None,
        position=len(sequence.token_ids),
    )


def _usable_rows(sequence: Sequence, finite: npt.NDArray[np.bool_]) -> int:
    """Return how many leading rows may be used, at least 1: those before the first that is not finite."""
    usable = len(finite) if finite.all() else int(np.argmin(finite))
    if usable == 0:
        raise NonFiniteError(
            f"the target gave NaN or infinite logits at position {len(sequence.token_ids)}; the request ends here, "
            "others go on"
        )
    return usable
