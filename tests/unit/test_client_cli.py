"""The command line without a server: one clear line and the right exit status."""

import socket
import subprocess
import sys

import pytest
from dspark_client.cli import main
from dspark_client.connection import Connection, RequestFailedError


@pytest.fixture
def nobody():
    """Return an address at which nobody answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("command", [["generate", "hello"], ["chat"], ["demo"]])
def test_an_absent_server_is_one_line_and_status_2(command, nobody, capsys):
    assert main([*command, "--url", nobody]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        f"dspark-client: no server answers at {nobody}; start one with `dspark serve`, or name another with --url"
    ]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"seed": -1}, "seed"),
        ({"top_k": 2**40}, "top_k"),
        ({"top_p": "x"}, "top_p"),
    ],
)
def test_options_that_cannot_be_sent_are_refused_by_name(options, field, nobody):
    with Connection(nobody) as connection, pytest.raises(RequestFailedError, match=f"^{field}: "):
        connection.generate("hello", options=options)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["generate"],
        ["demo", "--rounds", "0"],
        ["generate", "x", "--top-k", "y"],
        ["chat", "--timeout", "-5"],
    ],
)
def test_wrong_usage_is_status_2(arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_the_client_imports_neither_torch_nor_the_engine():
    code = (
        "import sys, dspark_client.cli; print([m for m in ('torch', 'dspark', 'triton') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
