"""`dspark`: generate without a server, serve with Triton, look at what a policy would do, look at the machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dspark import __version__
from dspark.errors import DSparkError

__all__ = ["main"]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; the commands' modules are imported without torch or models."""
    from dspark.doctor import add_doctor_arguments, run_doctor
    from dspark.generate import add_generate_arguments, run_generate
    from dspark.scheduling.command import add_schedule_arguments, run_schedule
    from dspark.serving.launcher import add_serve_arguments, run_serve

    parser = argparse.ArgumentParser(
        prog="dspark",
        description="Serve a large language model with DSpark speculative decoding.",
        epilog="Try: dspark generate --target models/SmolLM2-135M-Instruct.Q4_1.gguf --chat "
        "--prompt 'Why is the sky blue?' --temperature 0",
    )
    parser.add_argument("--version", action="version", version=f"dspark {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    generate = commands.add_parser("generate", help="generate offline, without a server")
    add_generate_arguments(generate)
    generate.set_defaults(command_main=run_generate)

    serve = commands.add_parser("serve", help="start Triton Inference Server with the dspark model")
    add_serve_arguments(serve)
    serve.set_defaults(command_main=run_serve)

    schedule = commands.add_parser("schedule", help="say what a policy would verify: JSON in, JSON out")
    add_schedule_arguments(schedule)
    schedule.set_defaults(command_main=lambda args: run_schedule(args, sys.stdin, sys.stdout))

    doctor = commands.add_parser("doctor", help="say what is installed, what will run here, what is missing")
    add_doctor_arguments(doctor)
    doctor.set_defaults(command_main=run_doctor)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code (0 good, 1 a request failed, 2 cannot start, 130 interrupted)."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.command_main(args))
    except DSparkError as error:
        print(f"dspark: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dspark: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 141


if __name__ == "__main__":
    sys.exit(main())
