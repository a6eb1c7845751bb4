"""The process around the application: the socket, the signals, and an orderly end."""

import asyncio
import math
import signal
import socket
from types import FrameType

import uvicorn

from caramba.errors import ConfigError
from caramba.runs.exit_codes import handled
from caramba.serve.app import build_app
from caramba.serve.connections import BACKLOG, protocol_class
from caramba.serve.service import Service

DRAIN_SECONDS = 10.0  # for requests in slots and in the queue to end when the server stops
CLOSING_SECONDS = 2.0  # after those are cancelled, for their last words
IDLE_SECONDS = 30
MAX_CONNECTIONS = 1024


def bind(host: str, port: int) -> socket.socket:
    """Return a socket of this address that does not listen yet; port 0 takes a free one.

    Raises:
        ConfigError: the address is taken or not this machine's.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(found[0], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found[4])
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"serve: cannot listen on {host} port {port} ({error}); name another --port or --host"
        ) from None
    listener.setblocking(False)
    return listener


class Server(uvicorn.Server):
    """uvicorn that ends with status 0 on SIGTERM and SIGINT.

    It stops accepting, lets requests in slots and in the queue finish for `drain_s`, then cancels the rest with an
    error that their clients read. A second SIGINT ends it at once. A connection above `max_connections` gets 503.
    """

    def __init__(
        self,
        service: Service,
        *,
        api_key: str | None = None,
        max_connections: int = MAX_CONNECTIONS,
        drain_s: float | None = None,
    ) -> None:
        self.service = service
        self.drain_s = drain_s = DRAIN_SECONDS if drain_s is None else drain_s
        super().__init__(
            uvicorn.Config(
                build_app(service, api_key=api_key),
                lifespan="off",
                http=protocol_class(max_connections, service.metrics),
                ws="none",
                backlog=BACKLOG,  # else it listens again with one of its own
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=IDLE_SECONDS,
                timeout_graceful_shutdown=math.ceil(drain_s + CLOSING_SECONDS),
            )
        )
        service.metrics.open_connections = lambda: len(self.server_state.connections)

    def serve_until_signalled(self, listener: socket.socket) -> None:
        """Answer requests that come in on a listening socket until a signal, with the engine running.

        Raises:
            EngineClosed: the engine has ended by itself, as it does when its device fails.
        """
        # uvicorn raises the signal again when it is done, for these to take: nothing is left to do then.
        with handled((signal.SIGTERM, signal.SIGINT), self._note):
            self.service.engine.start()
            try:
                self.run(sockets=[listener])
            finally:
                self.service.engine.close()
        if self.service.failure is not None:
            raise self.service.failure

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop, which is now also where the engine has failed."""
        self.should_exit = self.should_exit or self.service.failure is not None
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, then end as above."""
        self.service.is_stopping = True
        asyncio.get_running_loop().call_later(self.drain_s, self.service.cancel_all)
        await super().shutdown(sockets)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.should_exit = True
