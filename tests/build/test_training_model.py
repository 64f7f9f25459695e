"""Laws of the training forward pass: what a block sees, what the loss is, what the gradient is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from dspark_build.block_attention import block_attention
from dspark_build.drafting_loss import HeadInputs, LossWeights, head_loss
from dspark_build.training_batch import choose_anchors, pack
from support.training import VOCAB, WIDTH, batch, drafter_config, drafter_model, example
from torch.nn import functional

HEADS = [
    ("vanilla", 6, True),
    ("vanilla", 6, False),
    ("gated", 6, True),
    ("rnn", 6, True),
    ("vanilla", 0, True),
]


def heads():
    return pytest.mark.parametrize(("kind", "rank", "with_markov"), HEADS)


def config_of(kind, rank, with_markov, **changes):
    return drafter_config(
        markov_head_type=kind, markov_rank=rank, confidence_head_with_markov=with_markov, **changes
    )


def plain_attention(query, ck, cv, bk, bv, context_start, block_start, anchors):
    """One block at a time, one row of keys at a time: the definition."""
    out = torch.empty_like(query)
    group = query.shape[2] // ck.shape[1]
    for s in range(len(block_start) - 1):
        for b in range(block_start[s], block_start[s + 1]):
            seen = slice(context_start[s], context_start[s] + int(anchors[b]))
            k = torch.cat([ck[seen], bk[b]]).repeat_interleave(group, 1)
            v = torch.cat([cv[seen], bv[b]]).repeat_interleave(group, 1)
            out[b] = functional.scaled_dot_product_attention(
                query[b].transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
            ).transpose(0, 1)
    return out


def test_block_attention_and_its_gradient_equal_the_definition():
    torch.manual_seed(0)
    context_start, block_start = (0, 50, 70), (0, 37, 40)
    anchors = torch.cat([torch.arange(10, 47), torch.tensor([1, 5, 20])])
    shapes = [(40, 3, 4, 8), (70, 2, 8), (70, 2, 8), (40, 3, 2, 8), (40, 3, 2, 8)]
    mine = [torch.randn(s, requires_grad=True) for s in shapes]
    theirs = [t.detach().clone().requires_grad_() for t in mine]
    out = block_attention(
        *mine, context_start=context_start, block_start=block_start, anchor_positions=anchors
    )
    want = plain_attention(*theirs, context_start, block_start, anchors)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(out)
    out.backward(grad)
    want.backward(grad)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("weights", [LossWeights(), LossWeights(ce=0.3, tv=0.5, kl=0.7)])
def test_the_fused_loss_and_its_gradient_equal_autograd_over_full_logits(weights):
    torch.manual_seed(1)
    slots, rank, vd = 300, 5, 40
    full_head = torch.randn(VOCAB, WIDTH) * 0.4
    mapping = torch.randperm(VOCAB)[:vd].sort().values
    target_hidden = torch.randn(60, WIDTH)
    rows = torch.randint(0, 60, (slots,)).sort().values
    labels = torch.randint(-1, vd, (slots,))
    weight = torch.rand(slots) / slots
    lse = torch.logsumexp(target_hidden @ full_head.T, -1)
    leaves = [torch.randn(slots, WIDTH), torch.randn(slots, rank), torch.randn(vd, rank)]
    mine = [t.clone().requires_grad_() for t in leaves]
    theirs = [t.clone().requires_grad_() for t in leaves]
    inputs = HeadInputs(
        head=full_head[mapping],
        labels=labels,
        weight=weight,
        target_row=rows,
        target_hidden=target_hidden,
        target_lse=lse,
    )
    loss, stats = head_loss(*mine, inputs=inputs, weights=weights, want_greedy=True)

    z = theirs[0] @ full_head[mapping].T + theirs[1] @ theirs[2].T
    q = torch.softmax(z, -1)
    p_all = torch.softmax(target_hidden @ full_head.T, -1)[rows]
    q_all = torch.zeros_like(p_all).index_copy(1, mapping, q)
    l1 = (q_all - p_all).abs().sum(-1)
    log_q = torch.log_softmax(z, -1)
    ce = torch.where(labels >= 0, -log_q.gather(1, labels.clamp(min=0)[:, None])[:, 0], 0.0)
    kl = -(p_all[:, mapping] * log_q).sum(-1)
    want = (weight * (weights.ce * ce + weights.tv * l1 + weights.kl * kl)).sum()

    torch.testing.assert_close(loss, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(stats.acceptance, 1.0 - 0.5 * l1.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(stats.greedy, z.argmax(-1))
    (loss * 3.0).backward()
    (want * 3.0).backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-3)


def test_a_drafter_equal_to_the_target_has_no_loss_and_acceptance_one():
    torch.manual_seed(2)
    head = torch.randn(VOCAB, WIDTH)
    hidden = torch.randn(50, WIDTH)
    inputs = HeadInputs(
        head=head,
        labels=torch.zeros(50, dtype=torch.int64),
        weight=torch.full((50,), 1 / 50),
        target_row=torch.arange(50),
        target_hidden=hidden,
        target_lse=torch.logsumexp(hidden @ head.T, -1),
    )
    loss, stats = head_loss(hidden, None, None, inputs=inputs, weights=LossWeights(ce=0.0, tv=0.9))
    assert abs(float(loss)) < 1e-5
    torch.testing.assert_close(stats.acceptance, torch.ones(50), atol=1e-5, rtol=0)
    mine = hidden.clone().requires_grad_()
    soft, _ = head_loss(mine, None, None, inputs=inputs, weights=LossWeights(ce=0.0, tv=0.0, kl=1.0))
    soft.backward()  # the smooth distance; that of tv has a kink here
    assert float(mine.grad.abs().max()) < 1e-5


def test_target_mass_outside_the_draft_vocabulary_counts_as_rejected():
    torch.manual_seed(3)
    head = torch.randn(VOCAB, WIDTH)
    hidden = torch.randn(20, WIDTH)
    inside = torch.arange(30)
    inputs = HeadInputs(
        head=head[inside],
        labels=torch.full((20,), -1),
        weight=torch.full((20,), 1 / 20),
        target_row=torch.arange(20),
        target_hidden=hidden,
        target_lse=torch.logsumexp(hidden @ head.T, -1),
    )
    _, stats = head_loss(hidden, None, None, inputs=inputs, weights=LossWeights())
    p_in = torch.softmax(hidden @ head.T, -1)[:, inside].sum(-1)
    torch.testing.assert_close(stats.acceptance, p_in, atol=1e-5, rtol=1e-5)  # q >= p everywhere inside


@heads()
def test_every_parameter_gets_a_gradient_and_the_loss_falls(kind, rank, with_markov):
    model = drafter_model(config_of(kind, rank, with_markov, qk_norm=True))
    packed = batch(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(25):
        result = model.loss(packed, LossWeights())
        optimizer.zero_grad()
        result.loss.backward()
        losses.append(float(result.loss.detach()))
        if len(losses) == 1:
            assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]


@heads()
def test_packing_does_not_change_a_block(kind, rank, with_markov):
    model = drafter_model(config_of(kind, rank, with_markov))
    together = model.block_pass(batch(model))
    for index, anchors in enumerate([[7, 9, 12, 22], [8, 15], [10]]):
        first = [0, 4, 6][index]
        one = example(model, seed=5 + index, num_tokens=24 + index)
        for at, anchor in enumerate(anchors):
            alone = model.block_pass(pack([one], [np.array([anchor])], block_size=4))
            torch.testing.assert_close(together.hidden[first + at], alone.hidden[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(
                together.confidence_logits[first + at], alone.confidence_logits[0], atol=1e-5, rtol=1e-5
            )


def test_a_block_never_sees_its_anchors_features_later_context_or_later_tokens():
    model = drafter_model(drafter_config())
    one = example(model, seed=5)
    anchor = 12
    before = model.block_pass(pack([one], [np.array([anchor, 20])], block_size=4))
    features = one.features.clone()
    features[anchor:] += 10.0
    tokens = one.tokens.copy()
    tokens[anchor + 1 :] = (tokens[anchor + 1 :] + 1) % VOCAB
    changed = dataclasses.replace(one, features=features, tokens=tokens)
    after = model.block_pass(pack([changed], [np.array([anchor, 20])], block_size=4))
    torch.testing.assert_close(before.hidden[0], after.hidden[0])
    assert not torch.allclose(before.hidden[1], after.hidden[1])
    features = one.features.clone()
    features[anchor - 1] += 10.0
    seen = model.block_pass(
        pack([dataclasses.replace(one, features=features)], [np.array([anchor])], block_size=4)
    )
    assert not torch.allclose(before.hidden[0], seen.hidden[0])


def test_only_answer_tokens_are_anchors_and_labels():
    rng = np.random.default_rng(0)
    for _ in range(50):
        prompt_len, num_tokens = int(rng.integers(1, 10)), int(rng.integers(10, 30))
        anchors = choose_anchors(rng, prompt_len=prompt_len, num_tokens=num_tokens, num_anchors=8)
        assert len(set(anchors.tolist())) == len(anchors) == min(8, num_tokens - 1 - prompt_len)
        assert np.all(np.diff(anchors) > 0)
        assert anchors[0] >= prompt_len and anchors[-1] <= num_tokens - 2


def test_slots_past_the_answer_are_not_valid_and_rows_name_the_right_prediction():
    model = drafter_model(drafter_config())
    one = example(model, seed=5, num_tokens=24, prompt_len=7)
    packed = pack([one], [np.array([7, 21])], block_size=4)
    assert packed.valid.tolist() == [[True] * 4, [True, True, False, False]]
    assert packed.labels[0].tolist() == one.tokens[8:12].tolist()
    assert packed.previous[0].tolist() == one.tokens[7:11].tolist()
    assert packed.target_row[0].tolist() == [1, 2, 3, 4]  # row 0 predicts token 7
    assert packed.target_row[1, :2].tolist() == [15, 16]
    assert len(one.target_hidden) == 17


def test_sampled_slots_keep_the_expected_loss():
    model = drafter_model(drafter_config(enable_confidence_head=False))
    packed = batch(model)
    whole = float(model.loss(packed, LossWeights()).loss.detach())
    generator = torch.Generator().manual_seed(0)
    share = torch.tensor([1.0, 0.9, 0.7, 0.5])
    drawn = []
    for _ in range(400):
        kept = torch.rand(packed.valid.shape, generator=generator) < share
        with torch.no_grad():
            drawn.append(float(model.loss(packed, LossWeights(), keep=kept * share).loss))
    assert np.mean(drawn) == pytest.approx(whole, abs=4 * np.std(drawn) / 20)
