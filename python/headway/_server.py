"""The page that shows attention from a small server on this machine: sockets for the answers of the compiled part."""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, cast

from headway._arguments import whole_number
from headway._errors import os_error
from headway._headway import LiveView

_serving: set[ViewServer] = set()  # servers that nobody keeps, headway.view(..., serve=True).url, serve all the same


class ViewServer:
    """The page that headway.view(..., serve=True) shows, until close(), the end of a with block, or of the program.

    Only this machine can reach it: it listens on the loopback address. It refuses requests without the random part of
    the address, requests that name another host, and requests for anything but the page and its parts. To see the page
    from another machine, use port=8000 and ssh -L 8000:localhost:8000, and open http://localhost:8000/...

    >>> import numpy as np, headway
    >>> x = np.eye(4)
    >>> with headway.view(x, x, serve=True) as server:
    ...     server.url.startswith("http://127.0.0.1:")
    True
    >>> server.close()  # the with block has done it already
    >>> headway.view(x, x, serve=True).wait()  # doctest: +SKIP
    """

    def __init__(self, view: LiveView, port: int = 0) -> None:
        self._server = _Server(view, whole_number("view", "port", port))
        self.url: str = view.address(self._server.own_host)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="headway.view", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._server, self._thread)
        _serving.add(self)

    def close(self) -> None:
        """Stops the server: waits for answers that are being computed, and closes every connection. Safe to call twice.

        Open pages stay usable, and say that the server has stopped when they need more data.
        """
        _serving.discard(self)
        self._end()

    def wait(self) -> None:
        """Prints the page's address, serves until Ctrl-C, and closes: for the last line of a script."""
        try:
            print(f"{self.url}  Ctrl-C ends", flush=True)
            while self._thread.is_alive():
                self._thread.join(0.2)
        except KeyboardInterrupt:
            pass
        finally:
            self.close()

    def __enter__(self) -> ViewServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ViewServer: {self.url}>"

    def _repr_html_(self) -> str:
        """In a notebook, a link."""
        return f'<a href="{self.url}" target="_blank" rel="noopener">{self.url}</a>'


def _end(server: _Server, thread: threading.Thread) -> None:
    if threading.current_thread() in (thread, *server.open.values()):
        # The garbage collector came here on a thread that would wait for itself.
        threading.Thread(target=_end, args=(server, thread), daemon=True).start()
        return
    server.shutdown()
    thread.join()
    server.server_close()
    for connection, handler in list(server.open.items()):
        with contextlib.suppress(OSError):  # the browser was faster
            connection.shutdown(socket.SHUT_RDWR)
        handler.join()


class _Server(ThreadingHTTPServer):
    def __init__(self, view: LiveView, port: int) -> None:
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            number = error.errno if isinstance(error, OSError) else None
            raise os_error(number, f"view: cannot listen on port {port}: {error}") from None
        self.view = view
        self.open: dict[socket.socket, threading.Thread] = {}
        self.own_host = f"127.0.0.1:{self.server_address[1]}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a connection, which serves it until one side closes it."""
        work = threading.Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        self.open[request] = work
        work.start()

    def shutdown_request(self, request: Any) -> None:
        """Forgets a connection whose thread ends."""
        self.open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that leaves in the middle of an answer is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "headway", ""
    timeout = 60

    def do_GET(self) -> None:
        """The answer is the compiled part's."""
        server = cast(_Server, self.server)
        status, headers, body = server.view.answer(self.path, self.headers.get("Host", ""), server.own_host)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""
