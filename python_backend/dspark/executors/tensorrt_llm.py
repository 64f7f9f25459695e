"""What TensorRT-LLM's LLM API is told: our drafter, sampling fields, cost curve and calibration in its words.

Pure; imports nothing of it. Names and types are those of its public API reference, version 1.4.0rc4
(`DSparkDecodingConfig`, `TorchLlmArgs`, `KvCacheConfig`), and of the undated one (`SamplingParams`, `CompletionOutput`,
`RequestOutput`). That reference names the two files of confidence scheduling, not what they hold: their contents
follow the design page `features/dspark-confidence-scheduling` of an earlier branch, where both had other names.
**Unproven: none of this has met TensorRT-LLM.**
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dspark.errors import ConfigError, RequestError
from dspark.models.config import DrafterConfig
from dspark.request import SamplingParams, TokenLogProb
from dspark.sampling.transforms import SampledRule
from dspark.scheduling.cost_model import CostCurve
from dspark.scheduling.policy import parse_policy

__all__ = [
    "API_VERSION",
    "Speculation",
    "calibration_table",
    "check_sampling",
    "cost_table",
    "dspark_speculation",
    "ngram_speculation",
    "sampling_arguments",
    "token_log_prob",
]

API_VERSION = "1.4.0rc4"  # of the reference that was followed
_POLICIES = "none, auto, prefix, lagged, or fixed:K with K at least the block"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """A decoding configuration: its class in `tensorrt_llm.llmapi`, and the arguments."""

    config_class: Literal["DSparkDecodingConfig", "NGramDecodingConfig"]
    arguments: dict[str, Any]
    block_size: int  # drafts of a step

    @property
    def schedules(self) -> bool:
        """Whether confidences decide how much of a block is verified."""
        return bool(self.arguments.get("enable_confidence_scheduling"))


def dspark_speculation(
    config: DrafterConfig,
    folder: Path,
    *,
    policy: str,
    rule: SampledRule,
    cost_table_path: Path | None,
    calibration_path: Path | None,
) -> Speculation | None:
    """Return what makes TensorRT-LLM draft with a checkpoint; None = it shall not draft.

    Arguments:
        folder: the checkpoint's.
        policy: `auto` verifies whole blocks where there is no cost table or no confidence head.
        rule: `coupled` becomes its exact-match verification, the others its rejection sampling, token by token.
        cost_table_path, calibration_path: files of `cost_table` and `calibration_table`; None = there is none.

    Raises:
        ConfigError: a drafter or policy that its interface has no words for.
    """
    size = config.block_size
    if config.draft_vocab_size not in (0, config.vocab_size):
        raise ConfigError(
            f"drafter: draft_vocab_size is {config.draft_vocab_size}, allowed with executor tensorrt_llm is the "
            f"target's {config.vocab_size}: its interface knows no reduced vocabulary"
        )
    if min(config.target_layer_ids) < 0:
        raise ConfigError(
            f"drafter: target_layer_ids is {list(config.target_layer_ids)}, allowed with executor tensorrt_llm are "
            "layers from 0: its interface does not name the embedding output"
        )
    if not _drafts(policy, block_size=size):
        return None
    arguments: dict[str, Any] = {
        "max_draft_len": size,
        "speculative_model": str(folder),
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "block_size": size,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        **_verification(rule),
    }
    if parse_policy(policy, block_size=size).needs_cost and config.enable_confidence_head and cost_table_path:
        arguments |= {
            "enable_confidence_scheduling": True,
            "confidence_cost_table_path": str(cost_table_path),
            "confidence_calibration_path": None if calibration_path is None else str(calibration_path),
        }
    elif policy in ("prefix", "lagged"):
        missing = "a confidence head" if cost_table_path else "a measured cost curve"
        raise ConfigError(
            f"policy: got {policy!r} without {missing}, allowed then is none, auto or fixed:{size}"
        )
    return Speculation(config_class="DSparkDecodingConfig", arguments=arguments, block_size=size)


def ngram_speculation(
    *, block_size: int, max_match: int, policy: str, rule: SampledRule
) -> Speculation | None:
    """Return what makes TensorRT-LLM look drafts up in each request's own text; None = it shall not draft.

    Raises:
        ConfigError: a policy that its interface has no words for.
    """
    if not _drafts(policy, block_size=block_size):
        return None
    arguments = {
        "max_draft_len": block_size,
        "max_matching_ngram_size": max_match,
        "is_public_pool": False,
        **_verification(rule),
    }
    return Speculation(config_class="NGramDecodingConfig", arguments=arguments, block_size=block_size)


def _drafts(policy: str, *, block_size: int) -> bool:
    parsed = parse_policy(policy, block_size=block_size)
    if parsed.name == "threshold" or (parsed.name == "fixed" and 0 < parsed.num_drafts < block_size):
        raise ConfigError(
            f"policy: got {policy!r}, allowed with executor tensorrt_llm is {_POLICIES} ({block_size})"
        )
    return parsed.name != "none" and not (parsed.name == "fixed" and parsed.num_drafts == 0)


def _verification(rule: str) -> dict[str, Any]:
    # Without enable_penalty its engine turns away requests that name a penalty.
    return {"use_rejection_sampling": rule != "coupled", "enable_penalty": True}


def cost_table(curve: CostCurve) -> dict[str, list[int] | list[float] | float]:
    """Return a cost curve as its planner reads it: milliseconds by rows of the target pass, and by sequences.

    What drafting costs is its term of the batch's size, which no choice of verified drafts changes. The terms of the
    context are left out: it has none.
    """
    return {
        "token_counts": list(curve.target_tokens),
        "step_time_ms": [1e3 * seconds for seconds in curve.verify_s],
        "fixed_overhead_ms": 0.0,
        "batch_sizes": list(curve.num_blocks),
        "batch_overhead_ms": [1e3 * seconds for seconds in curve.draft_s],
    }


def calibration_table(temperatures: Sequence[float]) -> dict[str, list[float]]:
    """Return temperatures [G] of sequential temperature scaling as its planner reads them."""
    return {"sts_temperatures": [float(one) for one in temperatures]}


def check_sampling(params: SamplingParams) -> None:
    """Refuse what its interface has no words for.

    Raises:
        RequestError: names the field.
    """
    where = "with executor tensorrt_llm"
    if params.num_draft_tokens >= 0:
        raise RequestError("num_draft_tokens", params.num_draft_tokens, f"-1 {where}")
    if params.guided_decoding_guide_type is not None:
        raise RequestError("guided_decoding_guide_type", params.guided_decoding_guide_type, f"none {where}")
    for word in params.bad_words_ids:
        if len(word) > 1:
            raise RequestError("bad_words", list(word), f"words of one token {where}")


def sampling_arguments(params: SamplingParams, *, seed: int, end_ids: Collection[int]) -> dict[str, Any]:
    """Return the arguments of its `SamplingParams`. Stop texts are not among them: our side finds them.

    Arguments:
        seed: the request's, or the one that was drawn: left out, all requests would share one.
        end_ids: tokens that end the answer.

    Raises:
        RequestError: min_tokens with several end tokens, only one of which it would hold back.
    """
    first, *others = sorted(end_ids) or [-1]
    if params.min_tokens and others:
        allowed = f"0 with executor tensorrt_llm and {1 + len(others)} end tokens"
        raise RequestError("min_tokens", params.min_tokens, allowed)
    arguments: dict[str, Any] = {
        "end_id": first,
        "pad_id": max(first, 0),
        "ignore_eos": not end_ids,
        "max_tokens": params.max_tokens,
        "seed": seed,
        "detokenize": False,
        "include_stop_str_in_output": True,  # an end token belongs to the answer's tokens
    }
    if others:
        arguments["stop_token_ids"] = others
    if params.min_tokens:
        arguments["min_tokens"] = params.min_tokens
    if params.bad_words_ids:
        arguments["bad_token_ids"] = [word[0] for word in params.bad_words_ids]
    if params.greedy:
        arguments["top_k"] = 1
    else:
        # Where neither top_k nor top_p is given it takes the arg-max.
        arguments |= {"temperature": params.temperature, "top_p": params.top_p}
        arguments |= {"top_k": params.top_k} if params.top_k else {}
        arguments |= {"min_p": params.min_p} if params.min_p else {}
    for name, neutral in (
        ("repetition_penalty", 1.0),
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0),
    ):
        if getattr(params, name) != neutral:
            arguments[name] = getattr(params, name)
    if params.wants_log_probs:
        arguments["logprobs"] = max(params.logprobs, 1)
    return arguments


def token_log_prob(entry: Any, token_id: int, *, num_alternatives: int) -> TokenLogProb:
    """Return one token's log probability from its `dict[int, Logprob]` (fields logprob and rank).

    Raises:
        KeyError: the token is not in it.
    """
    likeliest = sorted(entry.items(), key=lambda item: (-item[1].logprob, item[0]))
    own = entry[token_id]
    rank = own.rank or 1 + sum(other.logprob > own.logprob for _, other in likeliest)
    return TokenLogProb(
        log_prob=float(own.logprob),
        rank=int(rank),
        top=tuple((int(one), float(other.logprob)) for one, other in likeliest[:num_alternatives]),
    )
