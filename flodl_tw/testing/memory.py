"""A controller without a network: connections, a port and an endpoint in memory, on a clock that tests move."""

from __future__ import annotations

from collections import Counter
from typing import Any

from twisted.internet import tcp
from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.defer import Deferred, succeed
from twisted.internet.error import ConnectionAborted, ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IAddress, IListeningPort, IProtocolFactory, IStreamServerEndpoint
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from zope.interface import implementer

from flodl_tw.channels.peeker import Channel
from flodl_tw.core.messages import Hello, JoinMessage
from flodl_tw.core.run_settings import RunSettings
from flodl_tw.server import ControllerServer
from flodl_tw.settings import ControllerSettings
from flodl_tw.testing.hosts import SimulatedClient, make_hello

PORT = 29500


class FakeTransport(StringTransport):
    """A TCP transport in memory.  A peer that does not read keeps it open until it is aborted."""

    protocol: Channel

    def __init__(self, clock: Clock, peer: IAddress, reads: bool) -> None:
        super().__init__(peerAddress=peer, hostAddress=IPv4Address("TCP", "10.0.0.100", PORT))
        self.clock = clock
        self.reads = reads
        self.lost = False
        self.aborted = False

    def loseConnection(self) -> None:
        self.disconnecting = True
        if self.reads:
            self.clock.callLater(0, self.lose, ConnectionDone())

    def abortConnection(self) -> None:
        self.aborted = True
        self.clock.callLater(0, self.lose, ConnectionAborted())

    def lose(self, why: Exception) -> None:
        """The connection is gone, once."""
        if not self.lost:
            self.lost = True
            self.protocol.connectionLost(Failure(why))


class FakeDial:
    """A connection to a front door, seen from the dialing side."""

    def __init__(
        self,
        controller: ClockedController,
        host: str = "10.0.0.1",
        port: int = 40000,
        *,
        reads: bool = True,
        version: int = 4,
        token: bytes | None = None,
    ) -> None:
        self.talk = SimulatedClient(version, token)
        self.clock = controller.clock
        kind = IPv6Address if ":" in host else IPv4Address
        peer = kind("TCP", host, port)
        self.transport = FakeTransport(self.clock, peer, reads)
        self.transport.protocol = controller.front.buildProtocol(peer)
        self.transport.protocol.makeConnection(self.transport)

    @property
    def closed(self) -> bool:
        """Whether the connection is gone."""
        return self.transport.lost

    def send(self, data: bytes) -> None:
        """Bytes arrive at the door, unless it has closed the connection."""
        if not self.transport.lost and not self.transport.aborted:
            self.transport.protocol.dataReceived(data)

    def received(self) -> bytes:
        """The bytes that were written to this peer since the last call."""
        data: bytes = self.transport.value()
        self.transport.clear()
        return data

    def messages(self) -> list[JoinMessage]:
        """The join messages that were written to this peer since the last call."""
        return self.talk.feed(self.received())

    def join(self, hello: Hello | None = None, **fields: Any) -> JoinMessage:
        """Send a hello; gives the answer."""
        self.send(self.talk.hello(hello or make_hello(**fields)))
        (answer,) = self.messages()
        return answer

    def half_close(self) -> None:
        """This peer shuts its sending side."""
        self.transport.protocol.readConnectionLost()

    def hang_up(self) -> None:
        """This peer closes: a door with half-close hears of the end of its sending side first."""
        self.half_close()
        self.clock.advance(0)

    def reset(self) -> None:
        """This peer resets the connection."""
        self.transport.lose(ConnectionLost())

    def vanish(self) -> None:
        """This peer stops answering, and the kernel has noticed."""
        self.transport.went_silent = True  # type: ignore[attr-defined]
        self.transport.lose(ConnectionLost())


class FakePort(tcp.Port):
    """A port that notes when it is told to pause; it has no socket."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def getHost(self) -> IPv4Address:
        return IPv4Address("TCP", "10.0.0.100", PORT)

    @property
    def accepting(self) -> bool:
        """Whether it was not told to pause, or has been told to go on since."""
        return self.asked[-1:] != ["stop"]

    def startReading(self) -> None:
        self.asked.append("start")

    def stopReading(self) -> None:
        self.asked.append("stop")

    def loseConnection(self, connDone: object = None) -> Deferred[None]:  # noqa: N803  Twisted's name
        """What ``stopListening`` does."""
        self.asked.append("close")
        return succeed(None)

    stopListening = loseConnection  # noqa: N815  Twisted's name


@implementer(IStreamServerEndpoint)
class FakeEndpoint:
    """Listens on nothing: whoever wants a connection asks ``factory`` for its protocol."""

    def __init__(self) -> None:
        self.port = FakePort()
        self.factory: IProtocolFactory | None = None

    def listen(self, protocolFactory: IProtocolFactory) -> Deferred[IListeningPort]:  # noqa: N803  Twisted's name
        self.factory = protocolFactory
        return succeed(self.port)


class ClockedController:
    """A whole controller without a network: front door, join channel, status, on a clock that tests move.

    ``fields`` are those of ``ControllerSettings``.
    """

    def __init__(self, settings: RunSettings | None = None, **fields: Any) -> None:
        self.clock = Clock()
        self.endpoint = FakeEndpoint()
        made = ControllerSettings(**{"run": settings or RunSettings(), "native_rendezvous": False, **fields})
        self.server = ControllerServer(self.clock, made, self.endpoint)
        self.controller = self.server.controller
        self.front = self.server.front
        self.server.startService()

    def dial(self, host: str = "10.0.0.1", **options: Any) -> FakeDial:
        """A new connection from ``host``."""
        return FakeDial(self, host, **options)

    def state(self) -> dict[str, object]:
        """The state, as ``/state.json`` has it."""
        return self.server.state()

    def ends(self) -> Counter[str]:
        """How many connections got nowhere, by how they ended."""
        return Counter({end.value: count for end, count in self.front.ended.items()})

    def turn(self) -> None:
        """Let the reactor's turn end, and the turns that it leads to, with no time passing."""
        for _ in range(4):
            self.clock.advance(0)

    def http(self, request: bytes, host: str = "127.0.0.1") -> bytes:
        """The whole answer to an HTTP request."""
        dial = self.dial(host)
        dial.send(request)
        self.turn()
        return dial.received()
