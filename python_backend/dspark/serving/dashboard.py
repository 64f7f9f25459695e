"""The live page of `dspark serve`: two static files and the metrics, from one origin. Standard library only."""

from __future__ import annotations

import http.server
import threading
import urllib.error
import urllib.request
from importlib import resources
from typing import Final

__all__ = ["Dashboard"]

_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/figures.js": ("figures.js", "text/javascript; charset=utf-8"),
}


class Dashboard:
    """Serves the page from a thread of its own.

    Arguments:
        host, port: to listen on; port 0 takes a free one.
        metrics_url: of the server; asked anew for every look at `/metrics`.

    Raises:
        OSError: the port cannot be used.
    """

    def __init__(self, *, host: str, port: int, metrics_url: str) -> None:
        pages = {
            path: (resources.files("dspark.serving").joinpath("page", name).read_bytes(), kind)
            for path, (name, kind) in _FILES.items()
        }

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(*_metrics(metrics_url))
                elif path in pages:
                    body, kind = pages[path]
                    self._answer(200, body, kind)
                else:
                    self._answer(404, b"no such page\n", "text/plain")

            def _answer(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (its name)
                """Say nothing: a look every two seconds is no news."""

        self._server = http.server.ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._host = host
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="dspark-dashboard", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self._host == "0.0.0.0" else self._host
        return f"http://{host}:{self.port}/"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _metrics(url: str) -> tuple[int, bytes, str]:
    """Return status, body and type of what the server says now."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5.0) as response:
            return 200, response.read(), "text/plain; charset=utf-8"
    except (OSError, urllib.error.URLError) as error:
        return 503, f"the server gives no metrics: {error}\n".encode(), "text/plain; charset=utf-8"
