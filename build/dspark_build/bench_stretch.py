"""How far long prompts stretch the time between the tokens of answers that are running, through a real server.

    python -m dspark_build.bench_stretch --target models/SmolLM2-135M-Instruct.Q4_1.gguf

Some users read long answers; beside them prompts of `--prompt-tokens` tokens come, one after the other, never the same.
Inter-token times are taken as they are sent: the time between two responses over the tokens of the later one.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
from dspark.serving.contract import MODEL_NAME
from dspark.serving.process import ServerOptions, ServerProcess

__all__ = ["main"]

_LIMIT_S = 300.0  # of one answer


@dataclass(slots=True)
class Answer:
    """One stream: when each response came, and how many tokens it brought."""

    at_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    error: str | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def gaps(self, since_s: float, until_s: float) -> list[float]:
        """Return the seconds between tokens, one entry for each token that came within the times."""
        gaps = []
        for before, after, count in zip(self.at_s, self.at_s[1:], self.num_tokens[1:], strict=False):
            if since_s <= before and after <= until_s:
                gaps += [(after - before) / count] * count
        return gaps


def ask(client: Any, inputs: dict[str, Any]) -> Answer:
    """Send one request on the client's stream, which serves it alone; return its answer, which fills as it comes."""
    answer = Answer()

    def take(result: Any, error: Any) -> None:
        now_s = time.perf_counter()
        if error is not None:
            answer.error = str(error.message())
            answer.ended.set()
            return
        ids = result.as_numpy("output_ids")
        if ids is not None and ids.size:
            answer.at_s.append(now_s)
            answer.num_tokens.append(int(ids.size))
        if result.get_response().parameters["triton_final_response"].bool_param:
            answer.ended.set()

    client.start_stream(take, stream_timeout=_LIMIT_S)
    tensors = []
    for name, value in inputs.items():
        array = value if isinstance(value, np.ndarray) else np.array([[value]])
        kinds = {"b": ("BOOL", np.bool_), "f": ("FP32", np.float32), "i": ("INT32", np.int32)}
        wire_type, dtype = kinds[array.dtype.kind]
        made = grpc_client.InferInput(name, list(array.shape), wire_type)
        made.set_data_from_numpy(array.astype(dtype))
        tensors.append(made)
    client.async_stream_infer(MODEL_NAME, tensors, enable_empty_final_response=True)
    return answer


def measure(url: str, *, users: int, prompt_tokens: int, num_prompts: int, seed: int) -> dict[str, float]:
    """Return inter-token times (seconds) of the users while the prompts come, and without them.

    Raises:
        RuntimeError: a request failed.
    """
    rng = random.Random(seed)
    greedy = {"temperature": 0.0, "ignore_eos": True, "stream": True}

    def prompt(length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.array([[rng.randrange(1000, 20000) for _ in range(length)]], np.int32)

    clients = [grpc_client.InferenceServerClient(url) for _ in range(users + 1)]
    running = [
        ask(client, {"input_ids": prompt(40), "max_tokens": 4000, **greedy}) for client in clients[:users]
    ]
    while not all(answer.at_s or answer.ended.is_set() for answer in running):
        time.sleep(0.01)
    quiet_s = time.perf_counter()
    time.sleep(3.0)
    since_s = time.perf_counter()
    first_s = []
    for _ in range(num_prompts):
        sent_s = time.perf_counter()
        long = ask(clients[-1], {"input_ids": prompt(prompt_tokens), "max_tokens": 1, **greedy})
        if not long.ended.wait(_LIMIT_S) or long.error is not None or not long.at_s:
            raise RuntimeError(f"a long prompt failed: {long.error or 'it has not ended'}")
        first_s.append(long.at_s[0] - sent_s)
        clients[-1].stop_stream()
    until_s = time.perf_counter()
    if any(answer.ended.is_set() for answer in running):
        raise RuntimeError("a running answer ended before the prompts did")
    for client in clients[:users]:
        client.stop_stream(cancel_requests=True)
    for client in clients:
        client.close()
    alone = [gap for answer in running for gap in answer.gaps(quiet_s, since_s)]
    beside = [gap for answer in running for gap in answer.gaps(since_s, until_s)]
    return {
        "alone_p50_s": float(np.median(alone)),
        "alone_p99_s": float(np.percentile(alone, 99)),
        "beside_p50_s": float(np.median(beside)),
        "beside_p99_s": float(np.percentile(beside, 99)),
        "stretch": float(np.percentile(beside, 99) / np.median(beside)),
        "stretch_of_alone": float(np.percentile(beside, 99) / np.median(alone)),
        "first_token_p50_s": float(np.median(first_s)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Start a server, measure, print; return 0 when the 99th percentile is at most three times the median."""
    parser = argparse.ArgumentParser(prog="python -m dspark_build.bench_stretch", description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--model-repository", type=Path)
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--prompts", type=int, default=6)
    args = parser.parse_args(argv)
    options = ServerOptions(
        grpc_port=0, http_port=0, metrics_port=0, model_repository=args.model_repository, kill_timeout_s=2.0
    )
    settings = {"target": str(Path(args.target).resolve()), "drafter": args.drafter}
    with ServerProcess(options=options, settings=settings) as server:
        figures = measure(
            server.grpc_url,
            users=args.users,
            prompt_tokens=args.prompt_tokens,
            num_prompts=args.prompts,
            seed=1,
        )
    for name, value in figures.items():
        print(f"{name:18} {value:.2f}" if name.startswith("stretch") else f"{name:18} {1e3 * value:.1f} ms")
    return 0 if figures["stretch"] <= 3.0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
