"""Fakes that tests and demos share: a host's side of the talk, links in memory, a controller on a clock.

``SimulatedClient`` has no I/O and serves every other one.  ``SimulatedHost`` speaks
it over a real connection; ``ClockedController`` and ``FakeDial`` need no
network and no waiting.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.error import ConnectionAborted, ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IAddress, IReactorTime
from twisted.internet.protocol import Protocol
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure

from flodl_tw.channels.front_door import FrontDoor
from flodl_tw.controller import AfterRun, Controller
from flodl_tw.core.join_client import JoinClient
from flodl_tw.core.messages import (
    Accept,
    Hello,
    JoinMessage,
    RendezvousHello,
    RendezvousMessage,
    WorldFormed,
    decode_rendezvous,
    encode_rendezvous,
)
from flodl_tw.core.wire import RENDEZVOUS_MAGIC, FrameReader
from flodl_tw.limits import Limits
from flodl_tw.run import RunSettings

PORT = 29500


def make_hello(host: str = "gpu-a", devices: int = 1, **fields: Any) -> Hello:
    """A hello that a controller with default settings admits; ``fields`` replace any of its own."""
    base: dict[str, Any] = {
        "host": host,
        "local_devices": bytes(range(devices)),
        "gpus": ("NVIDIA H100 (80GB, sm_90)",) * devices,
        "libtorch": "precompiled/cu128",
        "dataset_sig": bytes(32),
    }
    return Hello(**{**base, **fields})


class SimulatedClient(JoinClient):
    """The agent's side of the join talk, which keeps the world's envelope (None before WorldFormed)."""

    def __init__(self, version: int = 4, token: bytes | None = None) -> None:
        super().__init__(version, token)
        self.envelope: dict[str, Any] | None = None

    def feed(self, data: bytes) -> list[JoinMessage]:
        messages = super().feed(data)
        for message in messages:
            if isinstance(message, WorldFormed):
                self.envelope = json.loads(bytes.fromhex(message.envelope_hex))
        return messages


class RankClient:
    """A rank's side of the rendezvous: messages to bytes and back, with no I/O.  ``salt`` is its envelope's."""

    def __init__(self, salt: bytes, version: int = 4) -> None:
        self.salt = salt
        self.version = version
        self._reader = FrameReader()

    def hello(self, rank: int, host: str, dataset_sig: bytes = bytes(32)) -> bytes:
        """The first bytes of a dial: the channel's magic and the Hello."""
        return RENDEZVOUS_MAGIC + self.frame(RendezvousHello(dataset_sig, rank, host))

    def frame(self, message: RendezvousMessage) -> bytes:
        """Any message as a frame."""
        return encode_rendezvous(self.salt, self.version, message)

    def feed(self, data: bytes) -> list[RendezvousMessage]:
        """The messages that ``data`` completes; each must verify."""
        self._reader.feed(data)
        messages = []
        while (frame := self._reader.next_frame()) is not None:
            if frame.version != self.version or not frame.verifies(self.salt):
                raise AssertionError(f"a frame does not verify, or is not in version {self.version}")
            messages.append(decode_rendezvous(frame.payload))
        return messages


class SimulatedHost(Protocol):
    """A host that joins over a real connection, "trains" for a while and reports its ranks' exits.

    ``say`` gets a line for people at each step; ``ended`` is called once the
    connection is gone.
    """

    def __init__(
        self,
        clock: IReactorTime,
        hello: Hello,
        *,
        token: bytes | None = None,
        train_secs: float = 1.0,
        code: int = 0,
        say: Callable[[str], None] = lambda line: None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.talk = SimulatedClient(token=token)
        self._clock = clock
        self._hello = hello
        self._train_secs = train_secs
        self._code = code
        self._say = say
        self._ended = ended

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(self.talk.hello(self._hello))

    def dataReceived(self, data: bytes) -> None:
        for message in self.talk.feed(data):
            match message:
                case Accept():
                    self._say(f"{self._hello.host}: accepted with ranks {list(message.ranks)}")
                case WorldFormed():
                    assert self.talk.envelope is not None
                    ranks = self.talk.envelope["worker"]["ranks"]
                    self._say(
                        f"{self._hello.host}: the world has {self.talk.envelope['world_size']} ranks, mine {ranks}"
                    )
                    self._clock.callLater(self._train_secs, self._finish)
                case _:
                    self._say(f"{self._hello.host}: {message}")

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:  # noqa: B008  Twisted's signature
        self._ended()

    def _finish(self) -> None:
        assert self.transport is not None
        for rank in self.talk.ranks:
            self.transport.write(self.talk.exited(rank, self._code))
        self.transport.loseConnection()


class FakeTransport(StringTransport):
    """A TCP transport in memory.  A peer that does not read keeps it open until it is aborted."""

    def __init__(self, clock: Clock, peer: IAddress, reads: bool) -> None:
        super().__init__(peerAddress=peer, hostAddress=IPv4Address("TCP", "10.0.0.100", PORT))
        self.clock = clock
        self.reads = reads
        self.protocol: Any = None
        self.lost = False
        self.aborted = False

    def getHandle(self) -> None:
        """There is no socket."""

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
        **talk: Any,
    ) -> None:
        self.talk = SimulatedClient(**talk)
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


class ClockedController:
    """A whole controller without a network: front door, join channel, status, on a clock that tests move."""

    def __init__(
        self,
        settings: RunSettings | None = None,
        *,
        token: bytes | None = None,
        after_run: AfterRun = AfterRun.HOLD,
        limits: Limits | None = None,
        allowed_hosts: tuple[str, ...] = (),
        native_rendezvous: bool = False,
        **door: Any,
    ) -> None:
        from flodl_tw.server import channels

        self.clock = Clock()
        self.finished: list[str] = []
        self.controller = Controller(
            self.clock,
            settings or RunSettings(),
            token=token,
            after_run=after_run,
            finished=lambda phase: self.finished.append(phase.value),
        )
        self.front = FrontDoor(self.clock, limits or Limits(), **door)
        self.front.routes = channels(
            self.front, self.controller, PORT, allowed_hosts=allowed_hosts, native_rendezvous=native_rendezvous
        )
        self.controller.startService()

    def dial(self, host: str = "10.0.0.1", **options: Any) -> FakeDial:
        """A new connection from ``host``."""
        return FakeDial(self, host, **options)

    def state(self) -> dict[str, Any]:
        """The state, as ``/state.json`` has it."""
        state: dict[str, Any] = json.loads(self.controller.run.state_json())
        return state

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
