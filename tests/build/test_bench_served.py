"""The figures that are compared: in process and served, by the same rule."""

import pytest
from dspark_build.bench_served import Answer, figures_of


def test_only_the_time_counts_in_which_every_user_had_a_request_open():
    answers = [
        Answer(0.0, [2.0, 4.0], [1, 4]),  # the second user comes at 1.0; before that nothing counts
        Answer(1.0, [3.0, 5.0], [1, 4]),
        Answer(4.0, [5.0, 8.0], [1, 6]),  # the last to be sent at 5.0: from 8.0 on a user is missing
        Answer(5.0, [6.0, 10.0], [1, 8]),
    ]
    figures = figures_of(answers, users=2)
    # 1 to 8: all of the first three, and of the last its first token and half of the other eight.
    assert figures.tokens_per_s == pytest.approx((5 + 5 + 7 + 1 + 4) / 7.0)
    assert figures.first_token_s == pytest.approx(1.5)
    assert figures.token_s == pytest.approx(0.5)


def test_joining_outputs_changes_no_throughput():
    each = [Answer(0.0, [float(k) for k in range(1, 9)], [1] * 8), Answer(8.0, [9.0, 10.0], [1, 1])]
    joined = [Answer(0.0, [1.0, 8.0], [1, 7]), Answer(8.0, [9.0, 10.0], [1, 1])]
    assert figures_of(each, users=1).tokens_per_s == pytest.approx(figures_of(joined, users=1).tokens_per_s)
