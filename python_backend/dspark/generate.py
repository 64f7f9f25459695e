"""`dspark generate`: the engine without a server, for scripts, tests and first looks.

With `--json` standard output holds one JSON object per request, in input order, and nothing else; everything meant
for a person goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.config import DTYPES, EXECUTORS, NUM_DRAFT_TOKENS, load_serve_config
from dspark.engine.engine import Engine
from dspark.errors import ConfigError, DSparkError, RequestError
from dspark.request import SAMPLING_FIELDS, Request, RequestOutput, SamplingParams, SpecMetrics, StepRecord

if TYPE_CHECKING:
    from dspark.sampling.grammar import GrammarCompiler

__all__ = ["Completion", "add_generate_arguments", "complete_all", "run_generate"]

_DEFAULT_MAX_TOKENS = 256


@dataclass(slots=True)
class Completion:
    """The answer to one request, put together from its outputs."""

    token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    finish_reason: str | None = None
    error: Exception | None = None
    metrics: SpecMetrics | None = None
    steps: tuple[StepRecord, ...] = ()
    started_s: float = 0.0
    ended_s: float = 0.0

    def take(self, output: RequestOutput) -> None:
        self.token_ids.extend(output.token_ids)
        if output.text is not None:
            self.text = (self.text or "") + output.text
        if output.final:
            self.finish_reason = output.finish_reason
            self.error, self.metrics, self.steps = output.error, output.metrics, output.steps
            self.ended_s = time.perf_counter()

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second from submission to the last token."""
        return len(self.token_ids) / max(self.ended_s - self.started_s, 1e-9)

    def as_json(self) -> dict[str, Any]:
        if self.error is not None:
            return {"error": str(self.error)}
        return {
            "output_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "steps": [
                {
                    "draft": list(step.draft),
                    "confidence": None if step.confidence is None else list(step.confidence),
                    "verify_len": step.verify_len,
                    "accepted": step.accepted,
                }
                for step in self.steps
            ],
            "tokens_per_second": self.tokens_per_second,
            "seed": self.metrics.seed if self.metrics is not None else None,
        }


def complete_all(engine: Engine, requests: Iterable[Request | Exception]) -> list[Completion]:
    """Run requests together until all are finished; an exception in place of one becomes its answer."""
    completions: list[Completion] = []
    for request in requests:
        completion = Completion(started_s=time.perf_counter())
        completions.append(completion)
        if isinstance(request, Exception):
            completion.error = request
            continue
        emit = request.emit

        def both(output: RequestOutput, completion: Completion = completion, emit: Any = emit) -> None:
            completion.take(output)
            emit(output)

        try:
            engine.add(replace(request, emit=both))
        except RequestError as error:
            completion.error = error
    while engine.has_work:
        engine.step()
    return completions


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Generate with speculative decoding, without a server."
    parser.add_argument("--target", required=True, help="Hugging Face folder, .gguf file, or hub name")
    parser.add_argument(
        "--drafter",
        default="ngram",
        help="drafter folder, folder or .gguf file of a smaller model, 'ngram' or 'none' (default: %(default)s)",
    )
    parser.add_argument(
        "--num-draft-tokens",
        type=int,
        metavar="N",
        help=f"drafts of one step by a smaller model, EAGLE-3 or MTP (default: {NUM_DRAFT_TOKENS})",
    )
    parser.add_argument(
        "--prompt-lookup",
        action="store_true",
        help="with a drafter folder: look the text's end up in the text first, draft where that finds nothing",
    )
    parser.add_argument(
        "--draft-tree",
        type=int,
        default=0,
        metavar="N",
        help="with a drafter folder: trees of up to N drafts for greedy requests; 0 = chains (default)",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="prompt text, used as it is unless --chat is given")
    source.add_argument("--prompt-ids", help="token ids, e.g. 3,5,7; needs no tokenizer")
    source.add_argument(
        "--requests",
        type=Path,
        help="JSONL file; each line has 'prompt' or 'prompt_ids' and any sampling field; all lines run together",
    )
    parser.add_argument(
        "--chat", action="store_true", help="put text prompts through the target's chat template"
    )
    parser.add_argument(
        "--max-tokens", type=int, help=f"default: {_DEFAULT_MAX_TOKENS}, or what the context leaves"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="0 = greedy (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=0, help="0 = off (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="in (0, 1] (default: %(default)s)")
    parser.add_argument("--min-p", type=float, default=0.0, help="in [0, 1) (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="same seed, same answer, whatever drafter, policy or batch")
    parser.add_argument("--stop", action="append", default=[], help="a stop text; may be given several times")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after end tokens")
    parser.add_argument(
        "--policy",
        default="auto",
        help="drafts verified per step: auto, none, fixed:K, threshold:P, prefix, lagged (default: %(default)s)",
    )
    parser.add_argument(
        "--capacity",
        default="auto",
        metavar="FILE|auto|none",
        help="what a step costs here: a file of `dspark-build profile`; auto measures once, in seconds, and keeps it; "
        "none learns while running (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="default: bfloat16 where the CPU has it"
    )
    parser.add_argument("--executor", choices=EXECUTORS, default="auto")
    parser.add_argument(
        "--engine",
        metavar="DIR",
        help="what executor tensorrt (of `dspark-build engine`) or onnxruntime (of `dspark-build export`) runs",
    )
    parser.add_argument(
        "--max-batch", type=int, default=64, help="requests that run together (default: %(default)s)"
    )
    parser.add_argument("--cache-bytes", default="1GiB", help="for the paged caches (default: %(default)s)")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda:N", help="of torch or tensorrt")
    parser.add_argument("--threads", type=int, default=0, help="0 = one per core (default)")
    parser.add_argument("--json", action="store_true", help="one JSON object per request on standard output")


def run_generate(args: argparse.Namespace) -> int:
    """Run the command; return 1 when a request failed."""
    config = load_serve_config(
        overrides={
            "target": args.target,
            "drafter": args.drafter,
            "num_draft_tokens": args.num_draft_tokens,
            "prompt_lookup": args.prompt_lookup,
            "draft_tree": args.draft_tree,
            "dtype": args.dtype,
            "executor": args.executor,
            "engine": args.engine,
            "policy": args.policy,
            "capacity": args.capacity,
            "max_batch_size": args.max_batch,
            "cache_bytes": args.cache_bytes,
            "device": args.device,
            "num_threads": args.threads,
        },
        environ={},
    )
    defaults = SamplingParams(
        max_tokens=_DEFAULT_MAX_TOKENS if args.max_tokens is None else args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop_words=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )
    lines = _read_lines(args)

    from dspark.runtime import build_engine

    engine = build_engine(config, progress=lambda message: print(f"dspark: {message}", file=sys.stderr))
    streams = not args.json and args.requests is None

    def show(output: RequestOutput) -> None:
        if streams and output.text:
            print(output.text, end="", flush=True)

    guides = _Guides(engine)

    def make(line: Mapping[str, object]) -> Request | Exception:
        try:
            return guides.apply(_make_request(engine, line, defaults, args, emit=show))
        except DSparkError as error:
            return error

    completions = complete_all(engine, [make(line) for line in lines])
    if streams:
        print()
    for completion in completions:
        if args.json:
            print(json.dumps(completion.as_json()))
        elif completion.error is not None:
            print(f"dspark: {completion.error}", file=sys.stderr)
        else:
            _tell(completion, show_text=not streams)
    return 1 if any(completion.error is not None for completion in completions) else 0


class _Guides:
    """Gives guided requests their grammars; the compiler is made with the first."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._compiler: GrammarCompiler | None = None

    def apply(self, request: Request) -> Request:
        """Return the request, with its grammar where it has a guide. Raises RequestError."""
        kind, tokenizer = request.params.guided_decoding_guide_type, self._engine.tokenizer
        if kind is None:
            return request
        if tokenizer is None:
            raise RequestError(
                "guided_decoding_guide_type", kind, "nothing, since the target has no tokenizer"
            )
        if self._compiler is None:
            from dspark.sampling.grammar import GrammarCompiler

            self._compiler = GrammarCompiler(tokenizer, vocab_size=self._engine.target.config.vocab_size)
        return replace(request, grammar=self._compiler(kind, request.params.guided_decoding_guide))


def _read_lines(args: argparse.Namespace) -> list[Mapping[str, object]]:
    if args.prompt is not None:
        return [{"prompt": args.prompt}]
    if args.prompt_ids is not None:
        try:
            return [{"prompt_ids": [int(token) for token in args.prompt_ids.split(",")]}]
        except ValueError:
            raise RequestError(
                "--prompt-ids", args.prompt_ids, "whole numbers with commas between them"
            ) from None
    try:
        text = args.requests.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--requests {args.requests}: cannot be read: {error}") from error
    lines: list[Mapping[str, object]] = []
    for number, line in enumerate(text.split("\n"), start=1):  # JSON texts may hold U+2028 as it is
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--requests {args.requests}: line {number}: not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ConfigError(
                f"--requests {args.requests}: line {number}: got {value!r}, allowed is an object"
            )
        lines.append(value)
    if not lines:
        raise ConfigError(f"--requests {args.requests}: holds no request; one JSON object a line is expected")
    return lines


def _make_request(
    engine: Engine,
    line: Mapping[str, object],
    defaults: SamplingParams,
    args: argparse.Namespace,
    *,
    emit: Any,
) -> Request:
    known = (SAMPLING_FIELDS - {"bad_words_ids"}) | {"prompt", "prompt_ids", "stop"}
    for name in line:
        if name not in known:
            raise RequestError(name, line[name], "a field among " + ", ".join(sorted(known)))
    prompt_ids = _prompt_ids(engine, line, chat=args.chat)
    given: dict[str, Any] = {name: value for name, value in line.items() if name in SAMPLING_FIELDS}
    if "stop" in line:
        given["stop_words"] = line["stop"]
    for name in ("stop_words", "stop_token_ids"):
        if name in given:
            value = given[name]
            if isinstance(value, str):
                value = [value]
            if not isinstance(value, list):
                raise RequestError(name, value, "a list")
            given[name] = tuple(value)
    params = replace(defaults, **given)
    if args.max_tokens is None and "max_tokens" not in line:
        left = engine.limits.max_context_len - len(prompt_ids)
        params = replace(params, max_tokens=max(1, min(params.max_tokens, left)))
    return Request(prompt_ids=prompt_ids, params=params, emit=emit, record_steps=args.json)


def _prompt_ids(engine: Engine, line: Mapping[str, object], *, chat: bool) -> tuple[int, ...]:
    if ("prompt" in line) == ("prompt_ids" in line):
        raise RequestError("prompt", sorted(line), "exactly one of prompt and prompt_ids")
    if "prompt_ids" in line:
        ids = line["prompt_ids"]
        if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise RequestError("prompt_ids", ids, "a list of whole numbers")
        return tuple(ids)
    text = line["prompt"]
    if not isinstance(text, str):
        raise RequestError("prompt", text, "a text")
    if engine.tokenizer is None:
        raise RequestError("prompt", text, "nothing, since the target has no tokenizer; give prompt_ids")
    if chat:
        return tuple(engine.tokenizer.apply_chat_template([{"role": "user", "content": text}]))
    return tuple(engine.tokenizer.encode(text))


def _tell(completion: Completion, *, show_text: bool) -> None:
    if show_text:
        print(completion.text if completion.text is not None else completion.token_ids)
    metrics = completion.metrics
    assert metrics is not None
    steps = max(metrics.num_spec_steps, 1)
    length = (metrics.num_accepted_draft_tokens + metrics.num_spec_steps) / steps
    print(
        f"dspark: {len(completion.token_ids)} tokens, {completion.tokens_per_second:.1f} tokens/s, "
        f"accepted length {length:.2f} (with the added token), finished by {completion.finish_reason}",
        file=sys.stderr,
    )
