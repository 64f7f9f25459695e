"""`python -m dspark.gateway`: the gateway alone, in front of a server that runs already."""

from __future__ import annotations

import argparse
import os
import threading
import time

import uvicorn

from dspark.gateway.app import make_app

__all__ = ["main"]


def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="python -m dspark.gateway", description="OpenAI-compatible HTTP in front of a dspark model."
    )
    parser.add_argument("--url", default="127.0.0.1:8001", help="gRPC address (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=9000, help="default: %(default)s")
    parser.add_argument("--model-name", default="dspark", help="what clients call it (default: %(default)s)")
    parser.add_argument(
        "--drain-timeout", type=int, default=60, metavar="SECONDS", help="default: %(default)s"
    )
    parser.add_argument("--parent", type=int, metavar="PID", help="end when this process has")
    args = parser.parse_args()
    if args.parent is not None:
        threading.Thread(target=_end_with, args=(args.parent,), daemon=True).start()
    uvicorn.run(
        make_app(args.url, model_name=args.model_name),
        host=args.host,
        port=args.port,
        log_level="warning",
        timeout_graceful_shutdown=args.drain_timeout,
    )


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


if __name__ == "__main__":
    main()
