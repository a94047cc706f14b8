"""Fakes that tests and demos share: a host's side of the talk, links in memory, a controller on a clock.

``SimulatedHost`` joins a controller over a real connection, as an agent does.
``ClockedController`` and ``FakeDial`` need no network and no waiting, and
``SimulatedClient`` is the talk alone, from messages to bytes and back.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from twisted.internet import tcp
from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.defer import Deferred, succeed
from twisted.internet.endpoints import connectProtocol
from twisted.internet.error import ConnectionAborted, ConnectionDone, ConnectionLost
from twisted.internet.interfaces import (
    IAddress,
    IDelayedCall,
    IListeningPort,
    IProtocolFactory,
    IReactorTime,
    IStreamClientEndpoint,
    IStreamServerEndpoint,
)
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from zope.interface import implementer

from flodl_tw.agent.assignment import Assignment, read_envelope
from flodl_tw.agent.link import Event, JoinLink, LinkEnded
from flodl_tw.agent.outcome import MAX_REASON_CHARS, aborted
from flodl_tw.core.join_client import JoinClient
from flodl_tw.core.log_text import shortened
from flodl_tw.core.messages import (
    Abort,
    Accept,
    Hello,
    JoinMessage,
    Reject,
    RendezvousHello,
    RendezvousMessage,
    WorldFormed,
    decode_rendezvous,
    encode_rendezvous,
)
from flodl_tw.core.run_settings import RunSettings
from flodl_tw.core.wire import RENDEZVOUS_MAGIC, FrameReader
from flodl_tw.limits import Limits
from flodl_tw.once import Once
from flodl_tw.server import ControllerServer
from flodl_tw.settings import ControllerSettings

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


class HostEndedError(Exception):
    """A simulated host ended before its ranks did.  ``event`` is what ended it; the text says it for people."""

    def __init__(self, text: str, event: Event) -> None:
        super().__init__(text)
        self.event = event


class SimulatedHost(JoinLink):
    """A host without GPUs and processes: it joins, "trains" for a while, reports its ranks' exits, and leaves.

    It joins a controller over any client endpoint::

        endpoint = clientFromString(reactor, "tcp:127.0.0.1:29500")
        host = await SimulatedHost(reactor, make_hello("gpu-a", devices=8)).join(endpoint)

    and goes on by itself from there.  It is an ordinary protocol, too:
    ``endpoint.connect(Factory.forProtocol(partial(SimulatedHost, reactor, hello)))``.

    The hello goes out with the connection.  ``train_secs`` after the world has
    formed every rank exits with ``code`` (-N for signal N), and the connection
    is closed; with None it trains until ``finish`` is called.  ``token`` (16
    bytes) is for a controller with credentialed admission.

    ``when_accepted``, ``when_formed`` and ``when_ended`` give each caller a
    Deferred of its own, before the fact or after it.  None of them has a
    deadline: use ``addTimeout``.  A host never dials again, and has no timer
    left once its connection is gone.
    """

    def __init__(
        self,
        clock: IReactorTime,
        hello: Hello,
        *,
        token: bytes | None = None,
        train_secs: float | None = 1.0,
        code: int = 0,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(clock, limits or Limits(), hello, token)
        self.world: Assignment | None = None
        """What it was told of the world; None before that has formed."""
        self.finished = False
        """Whether its ranks have exited."""
        self.failure: HostEndedError | None = None
        """What ended it, unless it finished."""
        self._devices = len(hello.local_devices)
        self._train_secs = train_secs
        self._code = code
        self._training: IDelayedCall | None = None
        self._accepted = Once[Accept]()
        self._formed = Once[Assignment]()
        self._ended = Once[HostEndedError | None]()
        self.deliver_to(self._heard)

    def join(self, endpoint: IStreamClientEndpoint) -> Deferred[SimulatedHost]:
        """Connect; fires with this host once it is accepted.

        Fails with the endpoint's error where there is no connection, and with
        HostEndedError where the controller refuses the host or closes.
        """
        return Deferred.fromCoroutine(self._join(endpoint))

    def when_accepted(self) -> Deferred[Accept]:
        """Fires with the Accept, whose ``ranks`` are this host's; HostEndedError where it ends before."""
        return self._accepted.wait()

    def when_formed(self) -> Deferred[Assignment]:
        """Fires with what it is told of the world; HostEndedError where it ends before."""
        return self._formed.wait()

    def when_ended(self) -> Deferred[HostEndedError | None]:
        """Fires with None once it has finished and its connection is gone, and else with what ended it; never fails."""
        return self._ended.wait()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its ranks, none before the Accept."""
        return self.talk.ranks

    def finish(self) -> None:
        """Have every rank exit now, and leave."""
        self._stop_training()
        if not self.finished:
            self.finished = True
            for rank in self.ranks:
                self.report(rank, self._code)
            self.close()

    async def _join(self, endpoint: IStreamClientEndpoint) -> SimulatedHost:
        await connectProtocol(endpoint, self)
        await self.when_accepted()
        return self

    def connectionMade(self) -> None:
        if isinstance(self.transport, tcp.Connection):
            super().connectionMade()
        self.greet()

    def _heard(self, event: Event) -> None:
        if self.failure is not None:
            return
        match event:
            case Accept() if len(event.ranks) == self._devices:
                self._accepted.happened(event)
            case WorldFormed() if self.ranks and self.world is None:
                self._told(event)
            case LinkEnded(fault=False) if self.finished:
                self._ended.happened(None)
            case _:
                self._over(HostEndedError(self._why(event), event))

    def _told(self, formed: WorldFormed) -> None:
        peer = None if self.transport is None else self.transport.getPeer()
        dialed = (peer.host, peer.port) if isinstance(peer, IPv4Address | IPv6Address) else ("", 0)
        try:
            self.world = read_envelope(
                formed.envelope_hex, devices=self._devices, dialed=dialed, data_path=None, gpu_ram_share=None
            )
        except ValueError as error:
            self._over(HostEndedError(f"the controller's world cannot be used: {error}", formed))
            return
        if self._train_secs is not None:
            self._training = self._clock.callLater(self._train_secs, self.finish)
        self._formed.happened(self.world)

    def _why(self, event: Event) -> str:
        host = self._hello.host
        step = "its ranks had ended" if self.world else "the world had formed" if self.ranks else "it was accepted"
        match event:
            case Accept():
                return f"the controller gave {host} {len(event.ranks)} ranks for {self._devices} devices"
            case Reject():
                return f"{host} was refused: {shortened(event.reason, MAX_REASON_CHARS)}"
            case Abort():
                return aborted(event.reason).text
            case LinkEnded(fault=True):
                return f"what {host} dialed does not answer as a controller does: {event.how}"
            case LinkEnded():
                cause = "" if self.ranks else "; most likely its token is not the run's"
                return f"the controller ended the link of {host} before {step} ({event.how}){cause}"
        return f"the controller sent {host} {type(event).__name__} before {step}, which is out of its turn"

    def _over(self, why: HostEndedError) -> None:
        self.failure = why
        self._stop_training()
        self.close()
        self._ended.happened(why)
        self._accepted.happened(Failure(why))
        self._formed.happened(Failure(why))

    def _stop_training(self) -> None:
        if self._training is not None and self._training.active():
            self._training.cancel()


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

    def __init__(
        self,
        settings: RunSettings | None = None,
        *,
        native_rendezvous: bool = False,
        **fields: Any,
    ) -> None:
        self.clock = Clock()
        self.endpoint = FakeEndpoint()
        run = settings or RunSettings()
        made = ControllerSettings(run=run, native_rendezvous=native_rendezvous, **fields)
        self.server = ControllerServer(self.clock, made, self.endpoint)
        self.controller = self.server.controller
        self.front = self.server.front
        self.server.startService()

    def dial(self, host: str = "10.0.0.1", **options: Any) -> FakeDial:
        """A new connection from ``host``."""
        return FakeDial(self, host, **options)

    def state(self) -> dict[str, Any]:
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
