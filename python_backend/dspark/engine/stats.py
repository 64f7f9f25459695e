"""Counters of an engine: what it did since the start, what it holds right now."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineStats"]


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counters since the start, and what is held right now."""

    num_running: int = 0
    num_waiting: int = 0
    pages_held: int = 0
    pages_total: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_spec_steps: int = 0  # sequence-steps that verified at least one draft
    num_proposed_tokens: int = 0
    num_draft_tokens: int = 0  # verified
    num_accepted_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0  # found again by prefix reuse
    num_generation_tokens: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_drafter_faults: int = 0
