"""The uvicorn server, which tells the clients when it gives their requests up at its end."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from fastapi import FastAPI

from inference.serving.openai.decoding import DecodingThread

GRACE_SECONDS = 10.0  # in which requests may end after SIGTERM or Ctrl-C
MAX_CONNECTIONS = 500


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
