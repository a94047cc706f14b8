"""The connecting half of a forward, on a clock: what waits, what is given up, what is said about it."""

from __future__ import annotations

import gc
import socket
from typing import Any

from twisted.internet.address import IPv4Address
from twisted.internet.error import ConnectError, ConnectionDone, ConnectionLost
from twisted.internet.interfaces import ISystemHandle
from twisted.internet.testing import MemoryReactorClock
from twisted.logger import LogLevel
from twisted.python.failure import Failure
from zope.interface import implementer

from flodl_tw.channels.capacity import Capacity
from flodl_tw.channels.forward import LOG_EVERY_SECS, ForwardFactory
from flodl_tw.channels.front_door import FrontDoor
from flodl_tw.core.ends import ConnectionEnd
from flodl_tw.core.wire import DATA_MAGIC
from flodl_tw.limits import Limits
from flodl_tw.testing import FakePort, FakeTransport
from tests.pumped import PumpedTestCase

DIALER = IPv4Address("TCP", "10.0.0.1", 40000)
BACKEND = IPv4Address("TCP", "10.0.0.9", 7001)


@implementer(ISystemHandle)
class LegTransport(FakeTransport):
    """With what a forward asks of a real one: half-close, a socket, and producers that may be gone already."""

    connected = True

    def __init__(self, clock: Any, peer: IPv4Address) -> None:
        super().__init__(clock, peer, reads=True)
        self.handle = socket.socket()
        self.shut = False

    def getHandle(self) -> Any:
        return self.handle

    def unregisterProducer(self) -> None:  # noqa: N802  Twisted's name
        self.producer = None

    def loseWriteConnection(self) -> None:
        self.shut = True

    def lose(self, why: Exception) -> None:
        self.connected = False
        super().lose(why)

    @property
    def paused(self) -> bool:
        """Whether nothing is read from it."""
        return bool(self.producerState == "paused")


class ForwardTestCase(PumpedTestCase):
    """A door whose data channel has a backend that answers when the test says so."""

    def setUp(self) -> None:
        super().setUp()
        self.reactor = MemoryReactorClock()
        self.build()

    def build(self, capacity: int = 1000) -> None:
        """A door, and a port that it listens on."""
        self.front = FrontDoor(self.reactor, Limits(), capacity=Capacity(self.reactor, capacity))
        self.front.routes = {DATA_MAGIC: ForwardFactory(self.front, self.reactor, "data", "tcp:10.0.0.9:7001")}
        self.port = FakePort()
        self.front.listening(self.port)

    def dial(self, *parts: bytes) -> LegTransport:
        """A dial that has sent these parts."""
        transport = LegTransport(self.reactor, DIALER)
        self.addCleanup(transport.handle.close)
        transport.protocol = self.front.buildProtocol(DIALER)
        transport.protocol.makeConnection(transport)
        for part in parts:
            transport.protocol.dataReceived(part)
        return transport

    def answer(self, attempt: int = -1) -> LegTransport:
        """The backend takes a connection."""
        transport = LegTransport(self.reactor, BACKEND)
        self.addCleanup(transport.handle.close)
        transport.protocol = self.reactor.tcpClients[attempt][2].buildProtocol(BACKEND)
        transport.protocol.makeConnection(transport)
        return transport

    def refuse(self, attempt: int = -1) -> None:
        """The backend refuses one."""
        factory = self.reactor.tcpClients[attempt][2]
        factory.clientConnectionFailed(self.reactor.connectors[attempt], Failure(ConnectError()))

    def stopped(self, attempt: int = -1) -> bool:
        """Whether the attempt to connect was given up."""
        return bool(self.reactor.connectors[attempt].stoppedConnecting)

    def assert_silent(self) -> None:
        """Nothing is logged, not even by a Deferred whose failure nobody took: it says so when it is collected."""
        self.reactor.tcpClients.clear()
        self.reactor.connectors.clear()
        gc.collect()
        self.assertEqual([failure.type for failure in self.flushLoggedErrors()], [])
        self.assertEqual(self.lines(), [])

    def assert_nothing_waits(self) -> None:
        """The deadlines of the peeks apart, which look at an empty queue once more."""
        self.front.close_all()
        self.assertEqual([str(call) for call in self.reactor.getDelayedCalls()], [])


class Connecting(ForwardTestCase):
    """Until the backend is there."""

    def test_it_is_dialed_once_the_magic_is_whole_and_not_before(self) -> None:
        dialer = self.dial(DATA_MAGIC[:3])
        self.assertEqual(self.reactor.tcpClients, [])
        dialer.protocol.dataReceived(DATA_MAGIC[3:])
        self.assertEqual([client[:2] for client in self.reactor.tcpClients], [("10.0.0.9", 7001)])

    def test_the_first_bytes_wait_and_no_more_are_read(self) -> None:
        dialer = self.dial(DATA_MAGIC[:2], DATA_MAGIC[2:] + b"first")
        self.assertTrue(dialer.paused)
        backend = self.answer()
        self.assertEqual(backend.value(), DATA_MAGIC + b"first")
        self.assertFalse(dialer.paused)
        dialer.protocol.dataReceived(b" second")
        self.assertEqual(backend.value(), DATA_MAGIC + b"first second")
        backend.protocol.dataReceived(b"answer")
        self.assertEqual(dialer.value(), b"answer")
        self.assertFalse(dialer.disconnecting or backend.disconnecting)

    def test_each_leg_is_the_others_producer(self) -> None:
        dialer = self.dial(DATA_MAGIC)
        backend = self.answer()
        self.assertIs(dialer.producer.transport, backend)
        self.assertIs(backend.producer.transport, dialer)
        self.assertTrue(dialer.streaming and backend.streaming)

    def test_the_backends_leg_is_tuned(self) -> None:
        self.dial(DATA_MAGIC)
        handle = self.answer().handle
        self.assertEqual(handle.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_USER_TIMEOUT, 30_000),
            (socket.TCP_KEEPIDLE, 10),
            (socket.TCP_KEEPINTVL, 5),
            (socket.TCP_KEEPCNT, 3),
        ):
            self.assertEqual(handle.getsockopt(socket.IPPROTO_TCP, option), value, option)

    def test_a_decided_dial_has_no_deadline_of_the_door(self) -> None:
        dialer = self.dial(DATA_MAGIC)
        self.answer()
        self.reactor.advance(299)
        self.assertFalse(dialer.lost)
        self.assertEqual(len(self.front.pending), 0)

    def test_the_deadline_resets_the_dialer_and_gives_the_attempt_up(self) -> None:
        dialer = self.dial(DATA_MAGIC)
        self.reactor.advance(4.9)
        self.assertFalse(dialer.aborted)
        self.reactor.advance(0.2)
        self.reactor.advance(0)
        self.assertTrue(dialer.aborted)
        self.assertTrue(self.stopped())
        self.assertEqual(self.front.ended[ConnectionEnd.BACKEND_UNREACHABLE], 1)
        line = self.line("data channel's backend tcp:10.0.0.9:7001", level=LogLevel.warn)
        self.assertIn("5 s", line)
        self.assertNotIn("IPv4Address", line)
        self.assert_nothing_waits()

    def test_a_refusal_resets_the_dialer(self) -> None:
        dialer = self.dial(DATA_MAGIC + b"x")
        self.refuse()
        self.reactor.advance(0)
        self.assertTrue(dialer.aborted)
        self.assertEqual(self.front.ended[ConnectionEnd.BACKEND_UNREACHABLE], 1)
        self.assertEqual(len(self.front), 0)
        self.assert_nothing_waits()

    def test_a_line_a_minute_with_the_count(self) -> None:
        for _ in range(3):
            self.dial(DATA_MAGIC)
            self.refuse()
        self.assertIn(" 1 dial", self.line("cannot be reached"))
        self.forget()
        self.reactor.advance(LOG_EVERY_SECS - 1)
        self.dial(DATA_MAGIC)
        self.refuse()
        self.assertEqual(self.lines(LogLevel.warn), [])
        self.reactor.advance(1)
        self.dial(DATA_MAGIC)
        self.refuse()
        self.assertIn(" 4 dials", self.line("cannot be reached"))
        self.assertEqual(self.front.ended[ConnectionEnd.BACKEND_UNREACHABLE], 5)

    def test_a_dialer_that_leaves_takes_the_attempt_with_it_in_silence(self) -> None:
        for why in (ConnectionDone(), ConnectionLost()):
            dialer = self.dial(DATA_MAGIC)
            dialer.lose(why)
            self.assertTrue(self.stopped())
            del dialer
        self.reactor.advance(10)
        self.assert_silent()
        self.assertEqual(self.front.ended[ConnectionEnd.BACKEND_UNREACHABLE], 0)
        self.assertEqual(len(self.front), 0)
        self.assert_nothing_waits()

    def test_a_stop_takes_the_attempts_with_it_in_silence(self) -> None:
        dialer = self.dial(DATA_MAGIC)
        done = self.front.close_all()
        self.reactor.advance(0)
        self.assertTrue(dialer.lost)
        self.assertTrue(self.stopped())
        self.assertTrue(done.called)
        del dialer
        self.assert_silent()


class Descriptors(ForwardTestCase):
    """A forward holds two descriptors, and the door counts both."""

    def setUp(self) -> None:
        super().setUp()
        self.build(capacity=4)

    def test_both_legs_count_and_both_are_given_back(self) -> None:
        first = self.dial(DATA_MAGIC)
        backend = self.answer()
        self.assertTrue(self.port.accepting)
        second = self.dial(DATA_MAGIC)
        self.answer()
        self.assertFalse(self.port.accepting)
        backend.lose(ConnectionDone())
        self.reactor.advance(0)
        self.assertTrue(first.lost)
        self.assertTrue(self.port.accepting)
        second.lose(ConnectionDone())
        self.reactor.advance(0)
        # Nothing is left of either: two more fit, and the fourth descriptor is the last.
        self.dial(DATA_MAGIC)
        self.answer()
        self.assertTrue(self.port.accepting)
        self.dial()
        self.assertTrue(self.port.accepting)
        self.dial()
        self.assertFalse(self.port.accepting)

    def test_an_attempt_holds_its_descriptor_from_the_start(self) -> None:
        for _ in range(2):
            self.dial(DATA_MAGIC)
        self.assertFalse(self.port.accepting)

    def test_a_failed_attempt_gives_it_back(self) -> None:
        for _ in range(2):
            self.dial(DATA_MAGIC)
        for attempt in range(2):
            self.refuse(attempt)
        self.reactor.advance(0)
        for _ in range(3):
            self.dial()
        self.assertTrue(self.port.accepting)
        self.dial()
        self.assertFalse(self.port.accepting)


class ClosingTests(ForwardTestCase):
    """A door that has closed holds nothing of the reactor."""

    def test_the_watch_lets_go_once_every_connection_is_gone(self) -> None:
        self.assertEqual(len(self.reactor.getReaders()), 1)
        self.dial(DATA_MAGIC)
        self.answer()
        self.front.close_all()
        self.reactor.advance(3)
        self.assertEqual(len(self.reactor.getReaders()), 0)


class IdleTests(ForwardTestCase):
    """A forward on which nobody says anything does not stay for ever."""

    def test_a_dial_that_sends_its_magic_alone_is_reset_after_300_s(self) -> None:
        dialer = self.dial(DATA_MAGIC)
        backend = self.answer()
        self.reactor.advance(299)
        self.assertFalse(dialer.aborted)
        self.reactor.advance(1)
        self.reactor.advance(0)
        self.assertTrue(dialer.aborted and backend.aborted)
        self.line("nothing followed its first four bytes within 300 s")
        self.assertEqual(self.front.ended[ConnectionEnd.IDLE_FORWARD], 1)

    def test_one_byte_of_either_end_is_enough(self) -> None:
        for early, late, answered in ((b"x", b"", b""), (b"", b"x", b""), (b"", b"", b"x")):
            dialer = self.dial(DATA_MAGIC + early)
            backend = self.answer()
            if late:
                dialer.protocol.dataReceived(late)
            if answered:
                backend.protocol.dataReceived(answered)
            self.reactor.advance(10_000)
            self.reactor.advance(0)
            self.assertFalse(dialer.aborted or backend.aborted)


class ShareTests(ForwardTestCase):
    """Dials of ranks leave room for hosts and operators."""

    def test_1024_idle_dials_of_one_address_leave_the_rest_to_others(self) -> None:
        self.build(capacity=768)
        dials = [self.dial(DATA_MAGIC) for _ in range(1024)]
        self.reactor.advance(0)
        self.assertEqual(sum(dial.aborted for dial in dials), 1024 - 72)
        self.assertEqual(self.front.ended[ConnectionEnd.CHANNEL_FULL], 1024 - 72)
        self.line("its address has 144 connections on the data channel, as many as one may")
        for dial in dials:
            if not dial.lost:
                dial.lose(ConnectionDone())
        self.assertFalse(self.dial(DATA_MAGIC).aborted)
