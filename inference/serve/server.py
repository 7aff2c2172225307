"""The uvicorn server, which tells the clients when it gives their requests up at its end."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from inference.serve.decoding import DecodingThread

GRACE_SECONDS = 10.0  # in which requests may end after SIGTERM or Ctrl-C
MAX_CONNECTIONS = 500
HEADER_SECONDS = 30.0  # in which the first line and the headers of a request must have arrived
READ_SECONDS = 30.0  # in which a client must read something of its reply


class Connection(H11Protocol):
    """A connection that is closed if its client neither sends a request nor reads the reply.

    Otherwise such clients would hold all places of `MAX_CONNECTIONS`. A closed connection gives its request up.
    """

    _header_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` tells of every reply that is not read
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_headers()

    def _expect_headers(self) -> None:
        """Start the clock, unless it runs already; stop it while a request is answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            _cancel(self._header_timer)
            self._header_timer = None
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # the limit for idle connections, which is uvicorn's own, begins
        _cancel(self._header_timer)
        self._header_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        _cancel(self._read_timer)
        self._read_timer = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._read_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        _cancel(self._header_timer)
        _cancel(self._read_timer)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer:
        timer.cancel()


class GracefulServer(uvicorn.Server):
    """Serves an application until a signal arrives, then lets its requests end for a while.

    Without it, uvicorn cancels what still runs after that time, which the clients see as a lost connection and the log
    as a traceback.

    Args:
        app: The application.
        thread: Its decoding thread, which is stopped after the time.
        grace_seconds: How long requests may run on.
    """

    def __init__(self, app: FastAPI, thread: DecodingThread, grace_seconds: float = GRACE_SECONDS) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=2 * round(grace_seconds) + 5,  # for connections that do not read their reply
        )
        super().__init__(config)
        self._thread, self._grace_seconds = thread, grace_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and wait for the requests."""
        giving_up = asyncio.create_task(self._give_up())
        await super().shutdown(sockets)
        giving_up.cancel()

    async def _give_up(self) -> None:
        await asyncio.sleep(self._grace_seconds)
        await asyncio.to_thread(self._thread.stop)
