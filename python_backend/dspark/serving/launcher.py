"""`dspark serve`: start a server, say where it listens, keep it serving, stop it cleanly on SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final

from dspark.errors import ConfigError, DSparkError
from dspark.serving.dashboard import Dashboard
from dspark.serving.gateway_process import GatewayProcess
from dspark.serving.options import add_serve_arguments, checked_settings, server_options
from dspark.serving.process import ServerProcess, choose_ports
from dspark.serving.supervisor import Child, Supervisor

__all__ = ["add_serve_arguments", "run_serve"]

_DASHBOARD_PORT: Final = 8003


def run_serve(args: argparse.Namespace) -> int:
    """Serve until a signal comes; return 0 stopped as asked, 1 failed, 2 cannot be started so."""
    stop = _StopSignals()
    try:
        _check_ports(args)
        server = ServerProcess(options=server_options(args), settings=checked_settings(args), progress=_say)
    except DSparkError as error:
        _say(f"error: {error}")
        return 2
    gateway: GatewayProcess | None = None
    dashboard: Dashboard | None = None
    try:
        with stop.installed():
            started_s = time.monotonic()
            server.start()
            gateway = _gateway(args, server)
            with stop.interrupting():
                server.wait_ready()
                if gateway is not None:
                    gateway.start()
            dashboard = _dashboard(args, server)
            _announce(server, gateway, dashboard)
            _say(f"it took {time.monotonic() - started_s:.1f} s to start")
            if args.run is not None:
                return _run_command(args.run, server, gateway, stop)
            children: list[Child] = [server] if gateway is None else [server, gateway]
            _supervise(Supervisor(children, max_restarts=args.max_restarts, say=_say), stop)
            return _stop(server, gateway, stop)
    except _Stopped:
        _say("stopped while loading")
        return 0
    except DSparkError as error:
        _say(f"error: {error}; the log: {server.log_path}")
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        if dashboard is not None:
            dashboard.close()
        if gateway is not None:
            gateway.stop(drain=False)
        server.stop(drain_timeout_s=0.0)


def _check_ports(args: argparse.Namespace) -> None:
    """Refuse a port that is taken or given twice, before a model is loaded for nothing.

    Raises:
        ConfigError: naming the port.
    """
    names = ["grpc", "http", "metrics"]
    names += ["openai"] if args.openai_port is not None else []
    names += ["dashboard"] if args.dashboard_port is not None and not args.no_dashboard else []
    choose_ports(args.host, {f"{name}-port": getattr(args, f"{name}_port") for name in names})


def _gateway(args: argparse.Namespace, server: ServerProcess) -> GatewayProcess | None:
    """Return the gateway that was asked for, not yet started.

    Raises:
        ConfigError: its port is taken, or its packages are not there.
    """
    if args.openai_port is None:
        return None
    return GatewayProcess(
        grpc_url=server.grpc_url,
        host=args.host,
        port=choose_ports(args.host, {"openai-port": args.openai_port})[0],
        model_name=args.served_model_name,
        log_file=server.log_path.with_name(server.log_path.name + ".gateway"),
        drain_timeout_s=args.drain_timeout,
    )


class _Stopped(BaseException):
    """A signal came while the server was loading."""


class _StopSignals:
    """SIGINT and SIGTERM as an event. A second signal means: do not wait for running requests."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.count = 0
        self._interrupts = False

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.asked.set()
        if self._interrupts:
            self._interrupts = False
            raise _Stopped

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Catch the signals for the length of a `with` block."""
        before = {number: signal.signal(number, self.handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise _Stopped when a signal comes in this `with` block, or came before it."""
        self._interrupts = True
        try:
            if self.asked.is_set():
                raise _Stopped
            yield
        finally:
            self._interrupts = False


def _dashboard(args: argparse.Namespace, server: ServerProcess) -> Dashboard | None:
    """Return the live page, served: where it was asked for, else on its usual port or on a free one.

    Raises:
        ConfigError: the port that was asked for has been taken since the start.
    """
    if args.no_dashboard:
        return None
    wanted = (_DASHBOARD_PORT, 0) if args.dashboard_port is None else (args.dashboard_port,)
    for port in wanted:
        try:
            return Dashboard(host=args.host, port=port, metrics_url=server.metrics_url)
        except (OSError, OverflowError) as error:
            reason = error
    raise ConfigError(
        f"dashboard-port: got {wanted[-1]} on {args.host}, which cannot be used ({reason}); allowed is a free port, "
        "or 0 to let one be chosen"
    )


def _supervise(supervisor: Supervisor, stop: _StopSignals) -> None:
    """Keep everything serving until a signal comes, be it amid a look: what runs may end then, too.

    Raises:
        EngineError: it dies again and again, or cannot be started any more.
    """
    with contextlib.suppress(_Stopped):
        while not stop.asked.wait(0.5):
            with stop.interrupting():
                supervisor.look()


def _run_command(
    command: str, server: ServerProcess, gateway: GatewayProcess | None, stop: _StopSignals
) -> int:
    """Run a command beside the server; return its exit status once both have ended."""
    environment = {**os.environ, "DSPARK_URL": server.grpc_url}
    if gateway is not None:
        environment["OPENAI_BASE_URL"] = gateway.url
    with subprocess.Popen(shlex.split(command), env=environment) as process:
        while process.poll() is None:
            if stop.asked.wait(0.1):
                process.terminate()
                break
        status = process.wait()
    _stop(server, gateway, stop)
    return status


def _stop(server: ServerProcess, gateway: GatewayProcess | None, stop: _StopSignals) -> int:
    _say("stopping: running requests may end (once more Ctrl-C: at once)")
    if gateway is not None:
        gateway.end()  # it takes nothing new; its running answers end with the server's
    started_s = time.monotonic()
    drained = threading.Thread(target=server.stop, name="dspark-stop")
    drained.start()
    while drained.is_alive():
        drained.join(0.1)
        if stop.count > 1:
            server.hurry()
    _say(f"stopped after {time.monotonic() - started_s:.1f} s")
    return 0


def _announce(server: ServerProcess, gateway: GatewayProcess | None, dashboard: Dashboard | None) -> None:
    openai = "" if gateway is None else f", openai {gateway.url}"
    _say(f"ready: grpc {server.grpc_url}, http {server.http_url}, metrics {server.metrics_url}{openai}")
    if dashboard is not None:
        _say(f"live page: {dashboard.url}")
    _say(f'try: dspark-client generate --url {server.grpc_url} "Once upon a time"')


def _say(message: str) -> None:
    print(f"dspark serve: {message}", file=sys.stderr, flush=True)
