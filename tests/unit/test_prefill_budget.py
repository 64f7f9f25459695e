"""The prompt tokens of a step beside running answers: bounded by what they may be held up, never none."""

import pytest
from dspark.engine.prefill_budget import UNNOTICED_S, PrefillBudget


def learnt(*, alone_s, row_s, max_tokens=256, rounds=200):
    """Feed a machine whose steps take alone_s, plus row_s for every prompt row, to its own budget."""
    budget = PrefillBudget(max_tokens=max_tokens)
    slowest = 0.0
    for index in range(rounds):
        budget.observe(num_decoding=3, prefill_tokens=0, step_s=alone_s)
        tokens = budget.tokens(num_decoding=3)
        step_s = alone_s + row_s * tokens
        budget.observe(num_decoding=3, prefill_tokens=tokens, step_s=step_s)
        if index > rounds // 2:
            slowest = max(slowest, step_s)
    return budget, slowest


@pytest.mark.parametrize("alone_s", [0.001, 0.01, 0.2])
@pytest.mark.parametrize("cost", [0.02, 0.1, 0.25])
def test_a_step_with_prompt_rows_takes_at_most_three_times_the_usual_or_what_nobody_notices(alone_s, cost):
    budget, slowest = learnt(alone_s=alone_s, row_s=cost * alone_s)
    assert slowest <= max(3 * alone_s, 1.5 * UNNOTICED_S)
    assert budget.tokens(num_decoding=1) >= 4


def test_short_steps_take_prompt_rows_up_to_what_nobody_notices():
    budget, slowest = learnt(alone_s=0.005, row_s=0.00025)
    assert budget.tokens(num_decoding=1) == pytest.approx(60, rel=0.1)
    assert slowest == pytest.approx(UNNOTICED_S, rel=0.1)


def test_cheap_rows_are_bounded_by_the_step_alone():
    assert learnt(alone_s=0.1, row_s=1e-6)[0].tokens(num_decoding=1) == 256


def test_dear_rows_still_let_a_prompt_come_on():
    assert learnt(alone_s=0.001, row_s=1.0)[0].tokens(num_decoding=1) == 4
    assert PrefillBudget(max_tokens=2).tokens(num_decoding=1) == 2


def test_nothing_is_held_back_when_nothing_decodes():
    assert learnt(alone_s=0.001, row_s=1.0)[0].tokens(num_decoding=0) == 256
    assert PrefillBudget(max_tokens=256).tokens(num_decoding=0) == 256


def test_it_follows_a_machine_that_changes():
    budget, _ = learnt(alone_s=0.01, row_s=0.001)
    before = budget.tokens(num_decoding=1)
    for _ in range(100):
        budget.observe(num_decoding=1, prefill_tokens=10, step_s=0.01 + 10 * 0.0001)
    assert budget.tokens(num_decoding=1) > 4 * before
