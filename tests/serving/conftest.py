"""One server for all tests of this folder that do not kill it."""

import pytest
from support.server import command, make_repository, server_process, until_idle


@pytest.fixture(scope="session")
def repository(tmp_path_factory):
    return make_repository(tmp_path_factory.mktemp("serving"))


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """The folder where the shared server keeps what it answers."""
    return tmp_path_factory.mktemp("recorded") / "made" / "by the server"


@pytest.fixture(scope="session")
def running_server(repository, recorded):
    with server_process(repository, settings={"record": recorded}, drain_timeout_s=5.0) as server:
        yield server


@pytest.fixture
def server(running_server):
    """The shared server; every page and request must be gone when the test ends."""
    yield running_server
    command(running_server, "fast")
    until_idle(running_server)
