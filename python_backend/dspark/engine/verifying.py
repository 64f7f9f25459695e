"""Verification where the logits are: which steps may have it, and what it says of a sequence.

A device knows chains, temperature, top-k, top-p, min-p and the noise of a seed. A step with a request that looks at its
own text, wants log probabilities or drafted a tree is verified on the host as a whole.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dspark.drafters.device_draws import BlockDraws, KeptProbs, KeptRow
from dspark.drafters.interface import DraftBlock
from dspark.engine.batching import StepPlan
from dspark.engine.sequence import Sequence
from dspark.engine.step_batch import StepRows
from dspark.errors import NonFiniteError
from dspark.executors.interface import Int32, TargetExecutor, TargetOutput, Verified
from dspark.executors.verifying import ChainVerifier, VerifyBatch
from dspark.sampling.verification import Verdict

__all__ = ["device_verdict", "drawing_sequences", "needs_host", "run_target", "verify_batch"]


def run_target(
    target: TargetExecutor, verifier: ChainVerifier | None, plan: StepPlan, block: DraftBlock, rows: StepRows
) -> TargetOutput:
    """Run the target's pass, verified where it runs if target and requests allow it.

    Arguments:
        verifier: the target, where it verifies at all.
    """
    if verifier is not None and verifier.longest_chain:
        verify = verify_batch(plan, block, rows, longest=verifier.longest_chain, probs=verifier.reads_probs)
        if verify is not None:
            return verifier.forward_verified(rows.batch, verify)
    return target.forward(rows.batch)


def verify_batch(
    plan: StepPlan, block: DraftBlock, rows: StepRows, *, longest: int, probs: bool
) -> VerifyBatch | None:
    """Return how a step is verified by its target; None where the host must do it.

    Arguments:
        longest: drafts of a chain that the target takes.
        probs: whether it reads what the drafter keeps on the device.
    """
    drawing = drawing_sequences(plan)
    if not drawing or block.tree is not None or any(needs_host(sequence) for sequence in drawing):
        return None
    if int(rows.verify_len.max(initial=0)) > longest:
        return None
    prob_rows = _prob_rows(block, rows) if block.distributions else _one_hot(rows)
    if prob_rows is None or (not probs and (prob_rows >= 0).any()):
        return None
    sequences = plan.sequences
    counts = [*(1 + rows.verify_len), *(int(chunk.last) for chunk in plan.prefill)]
    row_start = np.zeros(len(sequences) + 1, np.int32)
    np.cumsum(counts, out=row_start[1:])
    return VerifyBatch(
        row_start=row_start,
        first_positions=np.array([len(sequence.token_ids) for sequence in sequences], np.int32),
        prob_rows=prob_rows,
        draws=BlockDraws.of(sequence.sampler for sequence in sequences),
    )


def drawing_sequences(plan: StepPlan) -> list[Sequence]:
    """Return the sequences that gain tokens in this step."""
    return [*plan.decoding, *(chunk.sequence for chunk in plan.prefill if chunk.last)]


def needs_host(sequence: Sequence) -> bool:
    """Return whether the host must see the logits of a sequence."""
    # Devices verify chains as blocks: `rejection` is known to the host alone.
    by_token = sequence.sampler.rule == "rejection"
    return by_token or sequence.request.params.wants_log_probs or sequence.sampler.alters(0)


def _one_hot(rows: StepRows) -> Int32:
    return np.full(len(rows.batch.logit_rows), -1, np.int32)


def _prob_rows(block: DraftBlock, rows: StepRows) -> Int32 | None:
    """Return the row of every logit row's draft in the kept q, None where a q that is needed is not there."""
    assert block.distributions is not None
    found, kept = _one_hot(rows), set[KeptProbs]()
    for index, of_row in enumerate(block.distributions):
        count = rows.num_drafts(index)
        if isinstance(of_row, KeptRow):
            first = rows.logit_span(index).start + 1
            found[first : first + count] = of_row.row * of_row.probs.block_size + np.arange(count)
            kept.add(of_row.probs)
        elif any(q is not None for q in of_row[:count]):
            return None
    return found if all(probs.on_device for probs in kept) else None


def device_verdict(
    sequence: Sequence, verified: Verified, row: int, *, finite: npt.NDArray[np.bool_], drafts: list[int]
) -> Verdict:
    """Return what the target found for one sequence; rows behind the first that is not finite are not used.

    Of drafts of a drawn seed nobody computed exact labels: `soft_labels` is empty, and hit and miss is what is learnt.
    The added token says nothing of a draft that was cut off: it is drawn apart from it.

    Arguments:
        row: of this sequence among the pass's.
        finite: [1 + drafts] of its logit rows.
        drafts: those verified.

    Raises:
        NonFiniteError: the row behind the anchor is not finite.
    """
    accepted, token = int(verified.accepted[row]), int(verified.next_token[row])
    usable = len(finite) if finite.all() else int(np.argmin(finite))
    if usable == 0 or (token < 0 and accepted == 0):
        raise NonFiniteError(
            f"the target gave NaN or infinite logits at position {len(sequence.token_ids)}; the request ends here, "
            "others go on"
        )
    if token < 0 or accepted > usable - 1:  # the last draft that a good row accepted is the added token
        accepted = min(accepted, usable) - 1
        token = drafts[accepted]
    labels = () if sequence.sampler.rule in ("block", "rejection") else None
    return Verdict(accepted, (*drafts[:accepted], token), labels)
