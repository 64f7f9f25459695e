"""The pure parts of the benchmarks: what a line says, what the prompts are, what a verdict compares."""

import random
import time
from dataclasses import replace

import pytest
from dspark.errors import DSparkError
from dspark_build.bench import SECTIONS, main, ratios
from dspark_build.bench_contexts import decoding_pass
from dspark_build.bench_engine import num_until
from dspark_build.bench_lines import Line, median, spread, table
from dspark_build.bench_load import Turn, kept_turns, median_rate, median_ratio, over_peer, save_turns
from dspark_build.bench_load import table as load_table
from dspark_build.bench_memory import MemoryReport, num_weights, short_prompts
from dspark_build.bench_native import CONTEXT, PAGE_SIZE, pass_over, verdicts
from dspark_build.bench_native import Line as PassLine
from dspark_build.bench_overhead import measure_overhead, overhead_table
from dspark_build.bench_peer import pass_times
from dspark_build.bench_prompts import MIXED, NEW, REPEATING, as_messages
from dspark_build.bench_sources import Answer, Sum, check_answers
from dspark_build.bench_sources import table as sources_table

from tests.support.tiny_models import tiny_config


@pytest.mark.parametrize(
    ("value", "bounds", "holds"),
    [
        (1.5, {"at_least": 1.5}, True),
        (1.49, {"at_least": 1.5}, False),
        (3.0, {"at_most": 3.0}, True),
        (3.01, {"at_most": 3.0}, False),
        (9.0, {}, None),
    ],
)
def test_a_line_holds_up_to_and_with_its_bound(value, bounds, holds):
    line = Line(name="x", value=value, unit="times", **bounds)
    assert line.holds is holds
    assert line.as_json()["holds"] is holds
    assert ("NO" in table([line])) is (holds is False)


def test_the_middle_the_spread_and_the_ratios_are_those_of_the_rounds():
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert spread([3.0, 1.0, 2.0]) == "1.00 to 3.00"
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="argument 2"):
        ratios([1.0], [1.0, 2.0])


def test_sixteen_requests_share_no_prompt_and_no_round_repeats_another():
    assert len(MIXED) == 16 == len(set(MIXED))
    assert not set(REPEATING) & set(NEW)
    assert as_messages(MIXED[0], 1) != as_messages(MIXED[0], 2)


def test_short_prompts_differ_and_stay_in_the_vocabulary():
    prompts = short_prompts(50, vocab_size=97, seed=3)
    assert prompts == short_prompts(50, vocab_size=97, seed=3)
    assert len(set(prompts)) == 50
    assert all(4 <= len(p) <= 12 and max(p) < 97 for p in prompts)


def test_what_is_held_beside_weights_and_caches_is_what_is_left():
    report = MemoryReport(
        executor="native",
        dtype="int8",
        weight_bytes=50,
        cache_bytes=20,
        warm_bytes=95,
        end_bytes=100,
        num_requests=7,
    )
    assert (report.beside_bytes, report.growth_bytes) == (30, 5)


def test_tied_tables_are_counted_once():
    tied, untied = tiny_config(tie=True), tiny_config(tie=False)
    table_size = tied.vocab_size * tied.decoder.hidden_size
    assert num_weights(untied) - num_weights(tied) == table_size


@pytest.mark.parametrize("num_rows", [1, 8, 17])
def test_a_timed_pass_lies_behind_the_context_in_pages_of_its_own(num_rows):
    batch = pass_over(num_rows, 97)
    assert batch.positions.tolist() == list(range(CONTEXT, CONTEXT + num_rows))
    assert batch.tokens.max() < 97
    assert batch.page_table.size * PAGE_SIZE >= CONTEXT + num_rows
    assert len(batch.logit_rows) == num_rows


def test_verdicts_compare_with_the_bound_with_one_row_and_with_the_peers():
    bandwidth = 1e9  # 10 MB take 10 ms
    lines = [
        PassLine("native int8", 10_000_000, {1: 12.0, 8: 30.0, 16: 50.0}),
        PassLine("llama.cpp Q8_0", 10_000_000, {1: 24.0, 8: 60.0, 16: 40.0}),
    ]
    found = {what: (ratio, limit) for what, ratio, limit in verdicts(bandwidth, lines)}
    assert found["int8: one row / read bound"] == (pytest.approx(1.2), 1.3)
    assert found["int8: 8 rows / one row"] == (pytest.approx(2.5), 1.9)
    assert found["int8: 1 rows / llama.cpp Q8_0"][0] == pytest.approx(0.5)
    assert found["int8: 16 rows / llama.cpp Q8_0"][0] == pytest.approx(1.25)
    assert len(found) == 5


def test_a_bound_read_in_the_same_turn_comes_before_the_machines_bandwidth():
    line = PassLine("native int8", 10_000_000, {1: 12.0}, read_ms=8.0, over_bound=1.4)
    assert line.bound_ms(1e9) == 8.0
    assert verdicts(1e9, [line]) == [("int8: one row / read bound", 1.4, 1.3)]


def test_a_turn_times_the_passes_behind_its_warm_ones():
    waits = iter([0.05, 0.05, 0.0, 0.0, 0.0])
    times = pass_times(lambda: time.sleep(next(waits)), warm=2, timed=3)
    assert len(times) == 3
    assert max(times) < 0.05


def _turn(load: int, policy: str, rate: float, number: int = 0) -> Turn:
    return Turn(
        load=load,
        policy=policy,
        round=number,
        tokens_per_second=rate,
        mean_verify_len=1.0,
        accepted_len=1.5,
        steps=10,
        step_s=0.01,
        cost_model_error=0.0,
        calibration_ece=0.0,
        scheduler_s=0.0001,
    )


def test_auto_is_held_against_the_best_of_the_others_and_against_none():
    turns = [_turn(4, "none", 10.0), _turn(4, "fixed:3", 20.0), _turn(4, "auto", 19.0)]
    random.Random(0).shuffle(turns)
    *_, last, over_all = (line.split() for line in load_table(turns).splitlines())
    assert last[:2] == ["4", "1"]
    assert {"2.000", "1.900"} <= {word.rstrip(",") for word in over_all}
    assert last[-4:] == ["0.950", "1.900", "1.00%", "0.0%"]
    assert over_peer(turns, 2.0).endswith("4: 9.5")


def test_rounds_are_compared_one_by_one_whatever_the_machine_did_in_them():
    turns = [_turn(4, "none", 10.0 * slow, number) for number, slow in enumerate((1.0, 0.5, 2.0))]
    turns += [
        _turn(4, "auto", 10.0 * slow * gain, n) for n, (slow, gain) in enumerate(((1.0, 1.1), (0.5, 1.2)))
    ]
    assert median_ratio(turns, 4, "auto", "none") == pytest.approx(1.15)
    assert median_ratio(turns, 8, "auto", "none") != median_ratio(turns, 8, "auto", "none")  # NaN: not run


def test_turns_of_another_drafter_are_not_mixed_in(tmp_path):
    path = tmp_path / "load.json"
    save_turns(path, {"drafter_hash": "a"}, [_turn(4, "none", 10.0), _turn(8, "none", 20.0)])
    assert [turn.load for turn in kept_turns(path, {"drafter_hash": "a"}, [4])] == [8]
    assert kept_turns(path, {"drafter_hash": "b"}, [4]) == []
    assert kept_turns(tmp_path / "none.json", {}, [4]) == []


def test_a_policy_counts_with_the_median_of_its_turns():
    turns = [_turn(2, "auto", rate, number) for number, rate in enumerate((1.0, 50.0, 3.0))]
    assert median_rate(turns, 2, "auto") == 3.0
    assert median_rate(turns, 4, "auto") != median_rate(turns, 4, "auto")  # NaN: not run


def test_an_unknown_section_is_refused_by_name(capsys):
    assert main(["--only", "passes,colour"]) == 1
    error = capsys.readouterr().err
    assert "'colour'" in error
    assert all(name in error for name in SECTIONS)


def test_the_policy_is_timed_with_and_without_calibrator_and_told_where_it_is_too_slow():
    found = measure_overhead(repeats=1)
    assert len({(o.num_sequences, o.policy, o.calibrated) for o in found}) == 8
    assert all(o.milliseconds > 0 for o in found)
    slow = replace(found[0], milliseconds=found[0].at_most_ms)
    fast = replace(found[0], milliseconds=0.5 * found[0].at_most_ms)
    assert "MISSED" in overhead_table([slow])
    assert "holds" in overhead_table([fast])


def test_the_sources_table_compares_with_plain_and_says_what_is_missed():
    def row(seconds: float) -> dict[str, Sum]:
        plain, drafter = Sum(2.0, 100, 100, [1.0]), Sum(seconds, 100, 50, [0.9, 2.0 / seconds])
        return {"plain": plain, "drafter": drafter, "with look-up": Sum(1.0, 100, 40, [2.0])}

    text = sources_table({"code": row(1.0), "chat": row(1.9), "other": row(1.0)}).splitlines()
    assert "2.00 (0.90 to 2.00)" in text[1] and text[1].endswith("1.3 holds")
    assert "1.05" in text[2] and text[2].endswith("1.1 MISSED")
    assert "holds" not in text[3] and "2.50" not in text[3]


def test_an_answer_that_speculation_changed_is_an_error():
    same = Answer((1, 2), 1.0, 2)
    check_answers("p", {"plain": same, "drafter": same})
    with pytest.raises(DSparkError, match="drafter changed"):
        check_answers("p", {"plain": same, "drafter": Answer((1, 3), 1.0, 2)})


def test_an_answer_counts_up_to_its_end_and_with_it():
    assert num_until([5, 7, 2, 9, 2], {2}) == 3
    assert num_until([5, 7], {2}) == 2
    assert num_until([5, 2], ()) == 2


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("context_len", [1, 15, 16, 40])
def test_a_pass_behind_scattered_pages_writes_where_its_context_ends(context_len, num_rows):
    batch = decoding_pass(3, context_len, num_rows=num_rows, page_size=16, vocab_size=100)
    assert batch.page_table.shape == (3, (context_len + num_rows - 1) // 16 + 1)
    assert sorted(batch.page_table.ravel()) == list(range(batch.page_table.size))
    assert len(batch.tokens) == batch.query_start[-1] == 3 * num_rows
    for row, (slot, position) in enumerate(zip(batch.slots, batch.positions, strict=True)):
        assert position == context_len + row % num_rows
        assert batch.page_table[row // num_rows, position // 16] == slot // 16
        assert slot % 16 == position % 16
