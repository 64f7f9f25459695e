"""Our drafters, settings and sampling fields in TensorRT-LLM's words. The real one was never asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from dspark.errors import ConfigError, RequestError
from dspark.executors.tensorrt_llm import (
    calibration_table,
    check_sampling,
    cost_table,
    dspark_speculation,
    ngram_speculation,
    sampling_arguments,
    token_log_prob,
)
from dspark.models.config import DrafterConfig
from dspark.request import SamplingParams
from dspark.scheduling.cost_model import CostCurve
from support.fake_tensorrt_llm import DSparkDecodingConfig, Logprob, NGramDecodingConfig
from support.fake_tensorrt_llm import SamplingParams as TheirSampling
from support.tiny_drafters import tiny_target_config

CONFIG = DrafterConfig(
    decoder=tiny_target_config().decoder,
    vocab_size=50,
    block_size=4,
    target_layer_ids=(0, 2),
    mask_token_id=49,
    markov_rank=6,
    markov_head_type="gated",
    enable_confidence_head=True,
    draft_vocab_size=50,
)
COST, CALIBRATION = Path("/s/cost_table.json"), Path("/s/calibration.json")


def told(config: DrafterConfig = CONFIG, **changes: object) -> object:
    values = {"policy": "auto", "rule": "auto", "cost_table_path": COST, "calibration_path": CALIBRATION}
    made = dspark_speculation(config, Path("/d"), **{**values, **changes})  # type: ignore[arg-type]
    return None if made is None else DSparkDecodingConfig(**made.arguments)


def test_a_drafter_is_told_field_by_field() -> None:
    assert told() == DSparkDecodingConfig(
        max_draft_len=4,
        speculative_model="/d",
        use_rejection_sampling=True,
        enable_penalty=True,
        mask_token_id=49,
        target_layer_ids=[0, 2],
        block_size=4,
        markov_rank=6,
        markov_head_type="gated",
        enable_confidence_scheduling=True,
        confidence_cost_table_path=str(COST),
        confidence_calibration_path=str(CALIBRATION),
    )


def test_policies_become_what_its_scheduler_has() -> None:
    assert told(policy="none") is None and told(policy="fixed:0") is None
    for whole in (
        told(policy="fixed:4"),
        told(policy="fixed:9"),
        told(cost_table_path=None),
        told(replace(CONFIG, enable_confidence_head=False)),
    ):
        assert isinstance(whole, DSparkDecodingConfig)
        assert not whole.enable_confidence_scheduling and whole.confidence_cost_table_path is None
    for scheduled in (told(policy="prefix"), told(policy="lagged", calibration_path=None)):
        assert isinstance(scheduled, DSparkDecodingConfig) and scheduled.enable_confidence_scheduling
    for policy in ("fixed:3", "threshold:0.5"):
        with pytest.raises(
            ConfigError, match=f"policy: got '{policy}', allowed with executor tensorrt_llm is"
        ):
            told(policy=policy)
    with pytest.raises(ConfigError, match="policy: got 'prefix' without a measured cost curve"):
        told(policy="prefix", cost_table_path=None)
    with pytest.raises(ConfigError, match="policy: got 'lagged' without a confidence head"):
        told(replace(CONFIG, enable_confidence_head=False), policy="lagged")


def test_the_coupled_rule_is_its_exact_match() -> None:
    made = [told(rule=rule) for rule in ("coupled", "rejection")]
    assert [one.use_rejection_sampling for one in made] == [False, True]  # type: ignore[attr-defined]


def test_look_up_is_its_ngram_decoding() -> None:
    made = ngram_speculation(block_size=8, max_match=6, policy="auto", rule="auto")
    assert made is not None and made.config_class == "NGramDecodingConfig" and not made.schedules
    config = NGramDecodingConfig(**made.arguments)
    assert (config.max_draft_len, config.max_matching_ngram_size, config.is_public_pool) == (8, 6, False)
    assert ngram_speculation(block_size=8, max_match=6, policy="none", rule="auto") is None


def test_drafters_that_it_has_no_words_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size is 20, allowed .* the target's 50"):
        told(replace(CONFIG, draft_vocab_size=20))
    with pytest.raises(ConfigError, match=r"target_layer_ids is \[-1, 2\], allowed .* layers from 0"):
        told(replace(CONFIG, target_layer_ids=(-1, 2)))


def test_curve_and_calibration_are_in_its_units() -> None:
    curve = CostCurve(
        target_tokens=(1, 8), verify_s=(0.001, 0.002), num_blocks=(1, 4), draft_s=(3e-4, 5e-4), context_s=1e-6
    )
    assert cost_table(curve) == {
        "token_counts": [1, 8],
        "step_time_ms": [1.0, 2.0],
        "fixed_overhead_ms": 0.0,
        "batch_sizes": [1, 4],
        "batch_overhead_ms": [pytest.approx(0.3), pytest.approx(0.5)],
    }
    assert calibration_table((1.5, 2.0)) == {"sts_temperatures": [1.5, 2.0]}


def test_sampling_fields_are_told_where_they_say_something() -> None:
    def made(end_ids: tuple[int, ...] = (2,), **fields: object) -> TheirSampling:
        params = SamplingParams(**fields)  # type: ignore[arg-type]
        return TheirSampling(**sampling_arguments(params, seed=7, end_ids=end_ids))

    common = {"pad_id": 2, "max_tokens": 9, "seed": 7, "detokenize": False}
    common |= {"include_stop_str_in_output": True}
    greedy = TheirSampling(end_id=2, top_k=1, **common)  # type: ignore[arg-type]
    assert made(max_tokens=9, temperature=0.0, top_p=0.5, top_k=3) == greedy
    # Neither top_k nor top_p would mean the arg-max.
    plain = TheirSampling(end_id=2, temperature=1.0, top_p=1.0, **common)  # type: ignore[arg-type]
    assert made(max_tokens=9) == plain
    everything = made(
        (2, 5, 9),
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        bad_words_ids=((8,),),
        logprobs=3,
    )
    assert (everything.end_id, everything.stop_token_ids, everything.bad_token_ids) == (2, [5, 9], [8])
    assert (everything.temperature, everything.top_k, everything.top_p, everything.min_p) == (
        0.5,
        4,
        0.9,
        0.1,
    )
    assert (everything.repetition_penalty, everything.presence_penalty) == (1.1, -0.5)
    assert (everything.frequency_penalty, everything.logprobs) == (0.25, 3)
    endless = made(())
    assert endless.ignore_eos and endless.end_id == -1 and endless.stop_token_ids is None
    assert made(min_tokens=4).min_tokens == 4 and made(return_log_probs=True).logprobs == 1
    with pytest.raises(
        RequestError, match="min_tokens: got 4, allowed is 0 with executor tensorrt_llm and 2"
    ):
        made((2, 3), min_tokens=4)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("num_draft_tokens", {"num_draft_tokens": 2}),
        ("guided_decoding_guide_type", {"guided_decoding_guide_type": "json"}),
        ("bad_words", {"bad_words_ids": ((1,), (2, 3))}),
    ],
)
def test_requests_that_it_has_no_words_for_are_refused(field: str, fields: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=f"{field}: got .* with executor tensorrt_llm"):
        check_sampling(SamplingParams(**fields))  # type: ignore[arg-type]
    check_sampling(SamplingParams(bad_words_ids=((1,),)))


def test_log_probabilities_come_likeliest_first() -> None:
    entry = {4: Logprob(-2.0, 3), 9: Logprob(-0.5, 1), 7: Logprob(-1.0, 2)}
    found = token_log_prob(entry, 4, num_alternatives=2)
    assert (found.log_prob, found.rank, found.top) == (-2.0, 3, ((9, -0.5), (7, -1.0)))
    assert token_log_prob({4: Logprob(-2.0), 9: Logprob(-0.5)}, 4, num_alternatives=0).rank == 2
    with pytest.raises(KeyError):
        token_log_prob(entry, 5, num_alternatives=0)
