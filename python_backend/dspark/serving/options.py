"""The options of `dspark serve`, and what they mean to the server and to the model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from dspark.config import DTYPES, EXECUTORS
from dspark.errors import ConfigError
from dspark.serving.checks import load_checked_config
from dspark.serving.contract import MODEL_NAME
from dspark.serving.paths import default_model_repository
from dspark.serving.process import ServerOptions

__all__ = ["add_serve_arguments", "checked_settings", "server_options"]

_SETTINGS: Final = (
    "target",
    "drafter",
    "dtype",
    "drafter_dtype",
    "num_draft_tokens",
    "prompt_lookup",
    "draft_tree",
    "executor",
    "engine",
    "device",
    "policy",
    "capacity",
    "calibration",
    "learned_calibration",
    "record",
    "record_bytes",
    "max_batch_size",
    "max_context_len",
    "max_step_tokens",
    "page_size",
    "cache_bytes",
    "num_threads",
    "pin_threads",
    "touch_cache",
    "max_queue_size",
    "max_request_ms",
)


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dspark serve`."""
    model = parser.add_argument_group(
        "model (what is not given comes from DSPARK_* variables and model.yaml)"
    )
    model.add_argument("--target", metavar="DIR|FILE.gguf", help="the model to serve")
    model.add_argument("--drafter", metavar="DIR|none|ngram|auto", help="what proposes tokens")
    model.add_argument("--dtype", choices=DTYPES)
    model.add_argument("--drafter-dtype", choices=DTYPES, help="of a trained drafter's weights")
    model.add_argument(
        "--num-draft-tokens",
        type=int,
        metavar="N",
        help="drafts of one step by a smaller model, EAGLE-3 or MTP",
    )
    model.add_argument(
        "--prompt-lookup",
        action=argparse.BooleanOptionalAction,
        help="look the text's end up in the text first, draft where that finds nothing",
    )
    model.add_argument(
        "--draft-tree",
        type=int,
        metavar="N",
        help="trees of up to N drafts for greedy requests; 0 = chains",
    )
    model.add_argument("--executor", choices=EXECUTORS)
    model.add_argument(
        "--engine",
        metavar="DIR",
        help="what executor tensorrt or onnxruntime runs; a YAML file for tensorrt_llm",
    )
    model.add_argument("--device", metavar="auto|cpu|cuda:N", help="where torch or tensorrt run")
    model.add_argument(
        "--policy", metavar="auto|none|fixed:K|threshold:P", help="how many drafts are verified"
    )
    model.add_argument("--capacity", metavar="FILE|auto|none", help="what a step costs on this machine")
    model.add_argument("--calibration", metavar="FILE|auto|none", help="how far confidences can be believed")
    model.add_argument(
        "--learned-calibration", metavar="FILE|auto|none", help="where what serving learns of it is kept"
    )
    model.add_argument(
        "--record",
        metavar="FOLDER|none",
        help="keep served answers here to retrain the drafter: token ids of prompts and answers, that is what users "
        "wrote (default: none, nothing is kept)",
    )
    model.add_argument(
        "--record-bytes", metavar="BYTES", help="most that all of these take; the oldest go first"
    )
    model.add_argument("--max-batch-size", type=int, metavar="R", help="sequences decoded together")
    model.add_argument("--max-context-len", type=int, metavar="N", help="tokens of prompt and answer")
    model.add_argument("--max-step-tokens", type=int, metavar="N", help="prompt tokens computed in one step")
    model.add_argument("--max-queue-size", type=int, metavar="N", help="requests that may wait")
    model.add_argument(
        "--max-request-ms", type=int, metavar="MS", help="longest a request may take; 0 = no limit"
    )
    model.add_argument("--page-size", type=int, metavar="N", help="tokens in one page of the caches")
    model.add_argument("--cache-bytes", metavar="BYTES", help="all caches together, e.g. 1GiB")
    model.add_argument("--num-threads", type=int, metavar="N", help="0 = one per core")
    model.add_argument(
        "--pin-threads",
        action=argparse.BooleanOptionalAction,
        help="bind native worker threads to processors, where nothing else runs",
    )
    model.add_argument(
        "--touch-cache",
        action=argparse.BooleanOptionalAction,
        help="take the cache's memory from the system at the start, not as it fills",
    )
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    for name, port in (("grpc", 8001), ("http", 8000), ("metrics", 8002)):
        server.add_argument(
            f"--{name}-port",
            type=int,
            default=port,
            metavar="PORT",
            help="0 = a free one (default: %(default)s)",
        )
    server.add_argument(
        "--openai-port",
        type=int,
        metavar="PORT",
        help="also serve OpenAI's HTTP API (/v1/chat/completions, ...) here; 0 = a free one (default: off)",
    )
    server.add_argument(
        "--served-model-name",
        default=MODEL_NAME,
        metavar="NAME",
        help="what OpenAI's clients call the model (default: %(default)s)",
    )
    server.add_argument(
        "--dashboard-port",
        type=int,
        metavar="PORT",
        help="a page that shows the metrics live (default: 8003, or a free one where that is taken)",
    )
    server.add_argument("--no-dashboard", action="store_true", help="no such page")
    server.add_argument("--model-repository", type=Path, metavar="DIR", help="default: the clone's")
    server.add_argument(
        "--log-file", type=Path, metavar="FILE", help="the server's log (default: .dspark/logs/)"
    )
    server.add_argument(
        "--otlp-url",
        metavar="URL",
        help="send OpenTelemetry spans of requests to this collector, e.g. http://127.0.0.1:4318/v1/traces",
    )
    server.add_argument(
        "--trace-rate",
        type=_at_least_one,
        default=1,
        metavar="N",
        help="trace one request in N (default: %(default)s)",
    )
    server.add_argument(
        "--start-timeout", type=float, default=600.0, metavar="SECONDS", help="default: %(default)g"
    )
    server.add_argument(
        "--drain-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long running requests may take to end when the server stops (default: %(default)g)",
    )
    server.add_argument(
        "--max-restarts",
        type=int,
        default=5,
        metavar="N",
        help="start a server that died anew, at most so often in ten minutes; 0 = never (default: %(default)s)",
    )
    server.add_argument(
        "--run",
        metavar="COMMAND",
        help="run this command when the server is ready (it finds the address in DSPARK_URL), stop the server "
        "when it ends, and return its exit status",
    )
    server.add_argument(
        "--triton-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="passed on to tritonserver; may be repeated",
    )


def server_options(args: argparse.Namespace) -> ServerOptions:
    return ServerOptions(
        host=args.host,
        grpc_port=args.grpc_port,
        http_port=args.http_port,
        metrics_port=args.metrics_port,
        model_repository=args.model_repository,
        log_file=args.log_file,
        start_timeout_s=args.start_timeout,
        drain_timeout_s=args.drain_timeout,
        otlp_url=args.otlp_url,
        trace_rate=args.trace_rate,
        triton_arguments=tuple(args.triton_arg),
    )


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text}, allowed is a whole number >= 1")
    return number


def checked_settings(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings given as options, after reading all of them as the model will.

    Raises:
        ConfigError: listing every problem, before any server is started.
    """
    given = {name: getattr(args, name) for name in _SETTINGS if getattr(args, name) is not None}
    version_dir = (args.model_repository or default_model_repository()) / MODEL_NAME / "1"
    if not version_dir.parent.is_dir():
        raise ConfigError(
            f"model-repository: got {version_dir.parents[1]}, allowed is a folder with {MODEL_NAME}/config.pbtxt"
        )
    model_yaml = version_dir / "model.yaml"
    config = load_checked_config(model_yaml if model_yaml.is_file() else None, given, base=version_dir)
    # Absolute from here on: the server may run in another working folder.
    given.update(target=config.target, drafter=config.drafter)
    given.update({"engine": config.engine} if config.engine else {})
    given.update({"record": config.record} if config.record != "none" else {})
    return given
