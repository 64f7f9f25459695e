"""Many gRPC streams at once, from a process of their own: the client side of `bench`'s measurement of the server.

    python -m dspark_build.bench_streams URL

reads one JSON object a line from standard input, `{"prompts": [[ids], ...], "max_tokens": n}`, sends every prompt on a
stream of its own, all at once, and answers with `{"tokens": n, "seconds": s, "first_token_s": [...]}` once the last
stream has ended. Greedy, plain decoding, end tokens ignored.
"""

from __future__ import annotations

import json
import queue
import sys
import time
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client

__all__ = ["main"]


class Stream:
    """One connection with one stream. Every response goes into the queue that all streams share."""

    def __init__(
        self, url: str, number: int, received: queue.SimpleQueue[tuple[int, Any, Any, float]]
    ) -> None:
        self._number, self._received = number, received
        self._client = grpc_client.InferenceServerClient(url)
        self._client.start_stream(self._take, stream_timeout=600.0)

    def send(self, prompt_ids: list[int], max_tokens: int) -> None:
        arrays = {
            "input_ids": np.array([prompt_ids], np.int32),
            "stream": np.array([[True]]),
            "max_tokens": np.array([[max_tokens]], np.int32),
            "temperature": np.zeros((1, 1), np.float32),
            "num_draft_tokens": np.zeros((1, 1), np.int32),
            "ignore_eos": np.array([[True]]),
        }
        types = {"i": "INT32", "f": "FP32", "b": "BOOL"}
        inputs = []
        for name, array in arrays.items():
            inputs.append(grpc_client.InferInput(name, list(array.shape), types[array.dtype.kind]))
            inputs[-1].set_data_from_numpy(array)
        outputs = [grpc_client.InferRequestedOutput(name) for name in ("text_output", "output_ids")]
        self._client.async_stream_infer("dspark", inputs, outputs=outputs, enable_empty_final_response=True)

    def close(self) -> None:
        self._client.stop_stream()
        self._client.close()

    def _take(self, result: Any, error: Any) -> None:
        self._received.put((self._number, result, error, time.perf_counter()))


class Streams:
    """As many streams as were ever needed at once, kept open between runs."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._received: queue.SimpleQueue[tuple[int, Any, Any, float]] = queue.SimpleQueue()
        self._streams: list[Stream] = []

    def run(self, prompts: list[list[int]], max_tokens: int) -> dict[str, object]:
        """Send all prompts at once and read every answer to its end.

        Raises:
            RuntimeError: with the server's words, when a request failed.
        """
        while len(self._streams) < len(prompts):
            self._streams.append(Stream(self._url, len(self._streams), self._received))
        started_s = time.perf_counter()
        for stream, prompt in zip(self._streams, prompts, strict=False):
            stream.send(prompt, max_tokens)
        tokens, left, ended_s = 0, len(prompts), started_s
        first_s: dict[int, float] = {}
        while left:
            number, result, error, at_s = self._received.get(timeout=600.0)
            if error is not None:
                raise RuntimeError(str(error))
            ids = result.as_numpy("output_ids")
            if ids is not None:
                tokens += ids.size
                ended_s = at_s
                first_s.setdefault(number, at_s - started_s)
            left -= result.get_response().parameters["triton_final_response"].bool_param
        return {"tokens": tokens, "seconds": ended_s - started_s, "first_token_s": sorted(first_s.values())}

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


def main() -> int:
    streams = Streams(sys.argv[1])
    try:
        for line in sys.stdin:
            wanted = json.loads(line)
            print(json.dumps(streams.run(wanted["prompts"], wanted["max_tokens"])), flush=True)
    finally:
        streams.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
