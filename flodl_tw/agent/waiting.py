"""While a host waits for its world: a line a minute, and heartbeats that keep a quiet link open through proxies.

Both come of ``GET /state.json`` on the address of the link.  The host gets
along without an answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from twisted.internet.defer import CancelledError, Deferred, TimeoutError  # noqa: A004  Twisted's own
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP6ClientEndpoint, connectProtocol
from twisted.internet.error import ConnectError, ConnectingCancelledError, ConnectionDone
from twisted.internet.interfaces import ITCPTransport
from twisted.internet.protocol import Protocol
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from flodl_tw.agent.link import JoinLink
from flodl_tw.core.addresses import show_endpoint
from flodl_tw.core.fields import Fields, ShapeError, decode_object
from flodl_tw.core.phrases import out_of
from flodl_tw.core.wire import HEARTBEAT_HEADER
from flodl_tw.reactor import IReactor

FIRST_SECS: Final = 4.0
"""Until the first question, on average: a world that forms sooner is asked nothing; proxies wait 10 s and more."""
EVERY_SECS: Final = 60.0
ANSWER_SECS: Final = 5.0
"""To connect, and to answer."""
MAX_HEAD: Final = 4096
_MEMBERS: Final = b'"members"'
"""The last key of the state, whose value may be megabytes."""


@dataclass(frozen=True, slots=True)
class WindowState:
    """What a controller says of its window; seconds that are None have passed.  ``heartbeats``: it takes them."""

    joined: int
    least: int
    target: int | None
    window_secs: int | None
    cap_secs: int | None
    heartbeats: bool

    @property
    def text(self) -> str:
        """For people."""
        if self.target is None:
            standing = f"ranks that are in: {self.joined}, needed: {self.least}"
        else:
            standing = f"{out_of(self.joined, self.target, 'rank')} are in"
        left = self.cap_secs if self.window_secs is None else self.window_secs
        return standing + ("" if left is None else f", {left} s left")


def read_state(data: bytes) -> WindowState | None:
    """The state in an answer of which the end may be missing; None where it is no controller's."""
    head, _, body = data.partition(b"\r\n\r\n")
    status, *headers = head.lower().split(b"\r\n")
    if not status.startswith(b"http/1.") or status.split()[1:2] != [b"200"]:
        return None
    names = [line.partition(b":")[0].strip() for line in headers]
    try:
        fields = Fields(decode_object(body.partition(_MEMBERS)[0].rstrip(b", \r\n\t") + b"}", "the state"))
        return WindowState(
            joined=fields.whole("joined_ranks"),
            least=fields.whole("min_rank_start"),
            target=fields.optional("target_ranks", fields.whole),
            window_secs=fields.optional("window_remaining_secs", fields.whole),
            cap_secs=fields.optional("cap_remaining_secs", fields.whole),
            heartbeats=HEARTBEAT_HEADER.lower() in names,
        )
    except ShapeError:
        return None


class _Question(Protocol):
    """One question on a connection of its own, given up as soon as the answer's members begin."""

    transport: ITCPTransport

    def __init__(self, host: str) -> None:
        self.answer: Deferred[WindowState | None] = Deferred()
        self._host = host
        self._data = b""

    def connectionMade(self) -> None:
        self.transport.write(f"GET /state.json HTTP/1.0\r\nHost: {self._host}\r\n\r\n".encode())

    def dataReceived(self, data: bytes) -> None:
        self._data += data
        if _MEMBERS in self._data or len(self._data) > MAX_HEAD:
            self._end()

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:  # noqa: B008  Twisted's signature
        self._end()

    def _end(self) -> None:
        if not self.answer.called:
            self.answer.callback(read_state(self._data))


async def ask(reactor: IReactor, host: str, port: int) -> WindowState | None:
    """The window's state, asked of the controller at a numeric address; None where nothing answers as one does."""
    kind = TCP6ClientEndpoint if ":" in host else TCP4ClientEndpoint
    question = _Question(show_endpoint(host.partition("%")[0], port))
    try:
        await connectProtocol(kind(reactor, host, port, timeout=ANSWER_SECS), question)
        return await question.answer.addTimeout(ANSWER_SECS, reactor)
    except ConnectingCancelledError:
        raise CancelledError from None
    except (ConnectError, TimeoutError, OSError):
        return None
    finally:
        if question.connected:
            question.transport.abortConnection()


class Waiting:
    """What goes on beside one host's wait, from its making until ``stop``."""

    def __init__(
        self, reactor: IReactor, link: JoinLink, say: Callable[[str], None], jitter: Callable[[], float] = random.random
    ) -> None:
        self._reactor = reactor
        self._link = link
        self._say = say
        self._running = Deferred.fromCoroutine(self._run(FIRST_SECS * (0.5 + jitter())))

    async def _run(self, first: float) -> None:
        with suppress(CancelledError):
            await deferLater(self._reactor, first)
            state = await self._ask()
            if state is not None and state.heartbeats:
                self._link.beat()
            while True:
                await deferLater(self._reactor, EVERY_SECS)
                state = await self._ask()
                self._say("still waiting for the world" + ("" if state is None else f": {state.text}"))

    async def _ask(self) -> WindowState | None:
        return await ask(self._reactor, *self._link.peer)

    def stop(self) -> None:
        """The wait is over."""
        self._running.cancel()
