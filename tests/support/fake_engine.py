"""A codec and an engine without a model, for tests of the serving side."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from dspark.engine.doors import Place
from dspark.engine.stats import EngineStats
from dspark.request import FinishReason, Request, RequestOutput, SpecMetrics, TokenLogProb


class ByteCodec:
    """One token per byte of UTF-8; the chat template writes role and content of every message."""

    eos_ids = (0,)
    bos_id = None

    def is_special(self, token_id):
        return token_id == 0

    def encode(self, text, **_options):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode("utf-8", "replace")

    def apply_chat_template(self, messages, *, tools=None):
        told = "" if tools is None else "".join(f"[{tool['function']['name']}]" for tool in tools)
        return list((told + "".join(f"<{m['role']}>{m['content']}" for m in messages)).encode())

    def token_bytes(self, token_id):
        return bytes([token_id])


@dataclass
class FakeEngine:
    """Keeps what was submitted; the test makes the outputs. `refuses` is raised by `submit`, `full` by `hold_place`."""

    alive: bool = True
    refuses: Exception | None = None
    full: Exception | None = None
    requests: list[Request] = field(default_factory=list)
    places: set[Place] = field(default_factory=set)

    def hold_place(self) -> Place:
        if self.full is not None:
            raise self.full
        place = Place(self.places, threading.Lock())
        self.places.add(place)
        return place

    def submit(self, request: Request, *, place: Place | None = None) -> int:
        if place is not None:
            self.places.discard(place)
        if self.refuses is not None:
            raise self.refuses
        self.requests.append(request)
        return len(self.requests)

    def watch(self, watcher) -> None:
        self.watcher = watcher

    def stats(self) -> EngineStats:
        return EngineStats(num_steps=len(self.requests), pages_total=4)

    def drain(self, _timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        self.alive = False

    def answer(
        self, texts: Sequence[str], *, finish_reason: FinishReason | None = "length", index: int = -1
    ) -> None:
        """Emit one output per text for a submitted request; the last one carries the finish reason."""
        for place, text in enumerate(texts):
            reason = finish_reason if place == len(texts) - 1 else None
            metrics = SpecMetrics(
                num_spec_steps=4,
                num_draft_tokens=8,
                num_accepted_draft_tokens=6,
                acceptance_histogram=[1, 0, 3],
            )
            metrics.seed = 17
            request = self.requests[index]
            request.emit(
                RequestOutput(
                    request_id=1,
                    token_ids=(place,),
                    text=text,
                    log_probs=(TokenLogProb(-1.0, 1),) if request.params.wants_log_probs else (),
                    finish_reason=reason,
                    metrics=metrics if reason else None,
                )
            )


def fake_runtime(engine: FakeEngine) -> SimpleNamespace:
    return SimpleNamespace(
        engine=engine,
        scheduler=None,
        tokenizer=ByteCodec(),
        target_config=SimpleNamespace(vocab_size=256, model_hash="ab12"),
        limits=SimpleNamespace(max_context_len=64, num_pages=4, page_size=16),
    )


def perf(outputs: dict) -> dict:
    """Return the spec_decode_metrics of a last answer."""
    return json.loads(outputs["spec_decode_metrics"][0])
