"""Connections on which no request comes: they are closed after a while, or idle ones would use up the descriptors."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0  # for the head of a request to come whole, from the connection or from its first byte on


class TimedProtocol(H11Protocol):
    """uvicorn's protocol, with a limit to how long the head of a request may take, however slowly it drips in.

    uvicorn itself times a connection only between an answer and the next byte. Bodies have a limit of their own.
    """

    head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_head()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self.head_timer is None:
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
