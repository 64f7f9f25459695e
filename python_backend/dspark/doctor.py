"""`dspark doctor`: what is installed, what will be served and how, what is missing; with --start, how long it takes."""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dspark.doctor_checks import (
    Finding,
    machine_findings,
    model_findings,
    package_findings,
    port_findings,
)
from dspark.errors import DSparkError

__all__ = ["add_doctor_arguments", "run_doctor"]

_READY_S: Final = 10.0  # with the curve of this machine kept
_STOPPED_S: Final = 5.0  # when idle
_PORTS: Final = {"http": 8000, "grpc": 8001, "metrics": 8002}


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dspark doctor`."""
    parser.add_argument("--model-repository", type=Path, metavar="DIR", help="default: the clone's")
    parser.add_argument(
        "--host", default="127.0.0.1", help="where the ports are looked at (default: %(default)s)"
    )
    parser.add_argument(
        "--start",
        action="store_true",
        help="start a server on free ports, ask it once, stop it, and say how long each took",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of lines")


def run_doctor(args: argparse.Namespace) -> int:
    """Print one line per finding; return 1 when one of them keeps a server from serving, else 0."""
    from dspark.serving.contract import MODEL_NAME
    from dspark.serving.paths import default_model_repository

    repository = args.model_repository or default_model_repository()
    findings: list[Finding] = []
    for part in (
        machine_findings(),
        package_findings(),
        port_findings(args.host, _PORTS),
        model_findings(repository / MODEL_NAME / "1"),
        _start_findings(repository) if args.start else iter(()),
    ):
        for finding in part:
            findings.append(finding)
            if not args.json:
                print(f"{'BAD ' if finding.bad else 'ok  '} {finding.name:<14} {finding.text}", flush=True)
    if args.json:
        print(json.dumps([{"name": f.name, "text": f.text, "bad": f.bad} for f in findings], indent=1))
    bad = [finding for finding in findings if finding.bad]
    if bad and not args.json:
        print(f"{len(bad)} of {len(findings)} findings are bad: {', '.join(finding.name for finding in bad)}")
    return 1 if bad else 0


def _start_findings(repository: Path) -> Iterator[Finding]:
    """Start a server, ask it once, stop it; yield how long each took."""
    from dspark.serving.process import ServerOptions, ServerProcess

    options = ServerOptions(model_repository=repository, grpc_port=0, http_port=0, metrics_port=0)
    server = ServerProcess(options=options, settings={"record": "none"})  # its question is nobody's traffic
    started_s = time.monotonic()
    try:
        server.start()
        server.wait_ready()
        yield _timed("ready", time.monotonic() - started_s, _READY_S)
        asked_s = time.monotonic()
        _ask(f"{server.http_url}/v2/models/dspark/generate")
        yield Finding("first answer", f"after {time.monotonic() - asked_s:.4f} s")
        stopping_s = time.monotonic()
        server.stop()
        yield _timed("stopped", time.monotonic() - stopping_s, _STOPPED_S)
    except (DSparkError, OSError) as error:
        yield Finding("start", f"{error}", bad=True)
    finally:
        server.stop(drain_timeout_s=0.0)


def _timed(name: str, seconds: float, limit_s: float) -> Finding:
    slow = seconds > limit_s
    return Finding(name, f"after {seconds:.2f} s" + (f", wanted is {limit_s:g} s" if slow else ""), bad=slow)


def _ask(url: str) -> None:
    """Ask for one token."""
    body = json.dumps({"text_input": "Hello", "max_tokens": 1}).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, data=body), timeout=60.0) as response:
        response.read()
