"""`dspark-client`: generate, chat, demo and load against a running server."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dspark_client.chat import chat
from dspark_client.connection import Connection, Message, RequestFailedError, ServerUnavailableError
from dspark_client.demo import demo
from dspark_client.load import PROMPTS, load_test
from dspark_client.load_plan import parse_loads, parse_modes
from dspark_client.perf_analyzer import LoadFailedError
from dspark_client.simulate import CommandUnavailableError, add_simulate_command
from dspark_client.terminal import remark, show_stream, summary

__all__ = ["main"]

_SAMPLING = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop_words",
    "bad_words",
    "ignore_eos",
    "num_draft_tokens",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 done, 1 request refused, 2 no server, 130 Ctrl-C."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser(simulates=given[:1] == ["simulate"]).parse_args(given)
        if args.run_alone is not None:
            alone: int = args.run_alone(args)
            return alone
        with Connection(args.url, model=args.model, timeout_s=args.timeout) as connection:
            connection.check_ready()
            status: int = args.run(connection, args)
            return status
    except ServerUnavailableError as error:
        print(f"dspark-client: {error}", file=sys.stderr)
        return 2
    except (RequestFailedError, CommandUnavailableError) as error:
        print(f"dspark-client: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        remark("[stopped]")
        return 130


def _generate(connection: Connection, args: argparse.Namespace) -> int:
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    prompt: str | list[Message] = text
    if args.chat or args.system is not None:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        prompt = [*system, {"role": "user", "content": text}]
    generation = connection.generate(prompt, stream=args.stream, options=_sampling(args))
    if args.json:
        print(json.dumps(generation.run().as_dict(), ensure_ascii=False))
    else:
        show_stream(generation)
        remark(summary(generation.answer))
    return 0


def _chat(connection: Connection, args: argparse.Namespace) -> int:
    return chat(connection, system=args.system, options=_sampling(args))


def _demo(connection: Connection, args: argparse.Namespace) -> int:
    return demo(connection, out=args.out, rounds=args.rounds, max_tokens=args.max_tokens)


def _load(connection: Connection, args: argparse.Namespace) -> int:
    try:
        modes = parse_modes(args.mode or ["plain", "scheduled"], connection.url)
        return load_test(
            modes,
            parse_loads(
                concurrencies=args.concurrency,
                rates=args.rate,
                bursts=args.burst,
                requests_per_user=args.requests_per_user,
            ),
            model=args.model,
            prompts=PROMPTS if args.prompts is None else args.prompts.read_text().splitlines(),
            max_tokens=args.max_tokens,
            rounds=args.rounds,
            out=args.out,
            traces=args.traces,
            timeout_s=args.timeout,
            say=remark,
        )
    except (LoadFailedError, ValueError, OSError) as error:
        print(f"dspark-client: {error}", file=sys.stderr)
        return 2


def _sampling(args: argparse.Namespace) -> dict[str, object]:
    return {name: getattr(args, name) for name in _SAMPLING}


def _parser(*, simulates: bool) -> argparse.ArgumentParser:
    """Return the parser; the simulator's options are there only when it `simulates`, so that others start fast."""
    parser = argparse.ArgumentParser(
        prog="dspark-client", description="Talks to a dspark model on a Triton server."
    )
    parser.set_defaults(run_alone=None)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="answer one prompt")
    generate.add_argument("prompt", help="the prompt; - reads standard input")
    generate.add_argument("--chat", action="store_true", help="apply the model's chat template to the prompt")
    generate.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, default=True, help="show text as it comes"
    )
    generate.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    generate.set_defaults(run=_generate)

    talk = commands.add_parser("chat", help="a conversation in the terminal")
    talk.set_defaults(run=_chat)
    for command in (generate, talk):
        command.add_argument("--system", metavar="TEXT", help="system message (implies the chat template)")
        _add_sampling(command)

    show = commands.add_parser("demo", help="plain against speculative decoding, on two prompts")
    show.add_argument(
        "--out", type=Path, default=Path("out/demo.json"), metavar="FILE", help="default: %(default)s"
    )
    show.add_argument("--rounds", type=_at_least_one, default=3, metavar="N", help="default: %(default)s")
    show.add_argument(
        "--max-tokens", type=_at_least_one, default=128, metavar="N", help="default: %(default)s"
    )
    show.set_defaults(run=_demo)

    load = commands.add_parser("load", help="throughput and latency under load, with perf_analyzer")
    _add_load(load)
    load.set_defaults(run=_load)

    alone = commands.add_parser(
        "simulate", help="plan machines one does not have, with the server's own scheduler; needs no server"
    )
    if simulates:
        add_simulate_command(alone)

    for command in (generate, talk, show, load):
        command.add_argument(
            "--url",
            default=os.environ.get("DSPARK_URL", "127.0.0.1:8001"),
            help="gRPC address (default: %(default)s)",
        )
        command.add_argument("--model", default="dspark", help="default: %(default)s")
        command.add_argument(
            "--timeout",
            type=_seconds,
            default=600.0,
            metavar="SECONDS",
            help="longest answer (default: %(default)g)",
        )
    return parser


def _add_load(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Measures modes under loads, all of them in turn, and prints the medians. Example: dspark-client load "
        "--concurrency 1 4 16 --rate 2 --burst 8:3 --mode plain scheduled fixed=127.0.0.1:8011"
    )
    command.add_argument(
        "--mode",
        nargs="+",
        metavar="MODE",
        help="plain (no drafts), scheduled (the server's policy), NAME=HOST:PORT (a server of its own); "
        "default: plain scheduled",
    )
    command.add_argument(
        "--concurrency",
        type=_at_least_one,
        nargs="*",
        default=[1, 4],
        metavar="N",
        help="users who each wait for their answer (default: 1 4)",
    )
    command.add_argument(
        "--rate", type=float, nargs="*", default=[], metavar="R", help="requests per second, Poisson"
    )
    command.add_argument(
        "--burst",
        type=_burst,
        nargs="*",
        default=[],
        metavar="N:SECONDS",
        help="N requests at once, every so many seconds",
    )
    command.add_argument(
        "--requests-per-user",
        type=_at_least_one,
        default=4,
        metavar="N",
        help="default: %(default)s, at least 8 in all",
    )
    command.add_argument(
        "--prompts", type=Path, metavar="FILE", help="one prompt per line (default: a mix of our own)"
    )
    command.add_argument(
        "--max-tokens", type=_at_least_one, default=64, metavar="N", help="default: %(default)s"
    )
    command.add_argument("--rounds", type=_at_least_one, default=3, metavar="N", help="default: %(default)s")
    command.add_argument(
        "--out",
        type=Path,
        default=Path("out/load.json"),
        metavar="FILE",
        help="figures; the picture lies beside them (default: %(default)s)",
    )
    command.add_argument(
        "--traces",
        type=Path,
        metavar="FILE",
        help="also write every request: when sent, each response, tokens",
    )


def _burst(text: str) -> tuple[int, float]:
    size, _, gap = text.partition(":")
    try:
        burst = int(size), float(gap)
    except ValueError:
        burst = (0, 0.0)
    if burst[0] < 1 or not 0.0 < burst[1] < 3600.0:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed is N:SECONDS, such as 8:3")
    return burst


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (what is not given takes the server's default)")
    group.add_argument("--max-tokens", type=int, metavar="N")
    group.add_argument("--min-tokens", type=int, metavar="N")
    group.add_argument("--temperature", type=float, metavar="T", help="0 = greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="0 = off")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--seed", type=int, metavar="N")
    group.add_argument("--repetition-penalty", type=float, metavar="X")
    group.add_argument("--presence-penalty", type=float, metavar="X")
    group.add_argument("--frequency-penalty", type=float, metavar="X")
    group.add_argument("--stop", dest="stop_words", action="append", metavar="TEXT", help="may be repeated")
    group.add_argument(
        "--bad-word", dest="bad_words", action="append", metavar="TEXT", help="may be repeated"
    )
    group.add_argument("--ignore-eos", action="store_const", const=True)
    group.add_argument(
        "--num-draft-tokens", type=int, metavar="N", help="most drafts verified per step; 0 = no speculation"
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}, allowed is a number of seconds > 0")
    return seconds


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text}, allowed is a whole number >= 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
