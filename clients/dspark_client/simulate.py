"""`dspark-client simulate`: hands over to the simulator of the `dspark` package, which runs the real scheduler.

The client itself knows nothing of scheduling and imports nothing of the server; the simulator announces
itself as an entry point of the group `dspark_client.commands`, as any other package could.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Protocol, cast

__all__ = ["GROUP", "CommandUnavailableError", "add_simulate_command"]

GROUP = "dspark_client.commands"


class CommandUnavailableError(Exception):
    """A command that lives in a package which is not installed here."""


class _Command(Protocol):
    """What an entry point of the group gives."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_simulate_command(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options and set `run_alone` [args -> exit status], which needs no server.

    Raises:
        CommandUnavailableError: the simulator is not installed; says what is missing.
    """
    found = entry_points(group=GROUP, name="simulate")
    if not found:
        raise CommandUnavailableError(
            "simulate runs the server's own scheduler, which is not installed here: pip install 'dspark-triton' with"
            " its server side (the dspark package)"
        )
    command = cast(_Command, next(iter(found)).load())
    command.add_arguments(parser)
    parser.set_defaults(run_alone=command.run)
