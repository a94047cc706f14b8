"""Dead peers: bytes that leave at once and those that wait, and deaths that nobody reads of."""

from __future__ import annotations

import select
import socket
import struct
import unittest
from typing import Any

from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IFileDescriptor
from twisted.internet.protocol import Protocol
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from flodl_tw.channels.dead_peer import DeathWatch, WatchedServer, send


class Watcher:
    """What a transport asks of a reactor: which sockets it is to be told of."""

    def __init__(self) -> None:
        self.writers: list[object] = []

    def addReader(self, reader: object) -> None:
        """It may be read from."""

    def removeReader(self, reader: object) -> None:
        """It may not."""

    def addWriter(self, writer: object) -> None:
        if writer not in self.writers:
            self.writers.append(writer)

    def removeWriter(self, writer: object) -> None:
        if writer in self.writers:
            self.writers.remove(writer)


class SendTests(unittest.TestCase):
    """An accepted connection that sends at once what it can."""

    def setUp(self) -> None:
        here, self.peer = socket.socketpair()
        here.setblocking(False)
        self.addCleanup(here.close)
        self.addCleanup(self.peer.close)
        self.watcher = Watcher()
        server: Any = WatchedServer
        self.transport = server(here, Protocol(), ("127.0.0.1", 1), None, 1, self.watcher)
        self.assertEqual(self.watcher.writers, [])

    def test_what_the_kernel_takes_is_gone_at_once(self) -> None:
        send(self.transport, b"one")
        send(self.transport, b"two")
        self.assertEqual(self.watcher.writers, [])
        self.assertEqual(self.peer.recv(100), b"onetwo")

    def test_what_it_does_not_take_waits_for_its_turn_and_nothing_overtakes_it(self) -> None:
        sent = [bytes((number,)) * 65536 for number in range(64)]
        for part in sent:
            send(self.transport, part)
        self.assertEqual(self.watcher.writers, [self.transport])
        got = b""
        while self.watcher.writers:
            got += self.peer.recv(65536)
            self.assertIsNone(self.transport.doWrite())
        send(self.transport, b"last")
        self.assertEqual(self.watcher.writers, [])
        whole = b"".join(sent) + b"last"
        while len(got) < len(whole):
            got += self.peer.recv(65536)
        self.assertTrue(got == whole)

    def test_what_is_written_before_it_leaves_before_it(self) -> None:
        self.transport.write(b"one")
        send(self.transport, b"two")
        self.transport.doWrite()
        self.assertEqual(self.peer.recv(100), b"onetwo")

    def test_a_peer_that_has_gone_is_left_to_the_reactor(self) -> None:
        self.peer.close()
        send(self.transport, b"one")
        self.assertEqual(self.watcher.writers, [self.transport])
        self.assertIsInstance(self.transport.doWrite(), ConnectionLost)

    def test_another_kind_of_transport_is_written_to_plainly(self) -> None:
        transport = StringTransport()
        send(transport, b"one")
        self.assertEqual(transport.value(), b"one")


@implementer(IFileDescriptor)
class Descriptor:
    """A socket as a transport has it."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def fileno(self) -> int:
        return self.socket.fileno()


class FakeLeg:
    """A connection that counts its deaths."""

    def __init__(self, sock: socket.socket) -> None:
        self.transport: Any = Descriptor(sock)
        self.watched: int | None = None
        self.deaths: list[str] = []

    def abort(self) -> None:
        """The watch says that it is dead."""
        self.deaths.append("died")


class WatchTests(SynchronousTestCase):
    """Legs that nobody reads, watched for their death."""

    def setUp(self) -> None:
        self.watch = DeathWatch(MemoryReactorClock())

    def leg(self) -> tuple[FakeLeg, socket.socket, list[str]]:
        """A leg on a real socket, the far end of it, and a list that says so when the leg has died."""
        listener = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(listener.close)
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
        for end in (far, near):
            self.addCleanup(end.close)
        leg = FakeLeg(near)
        return leg, far, leg.deaths

    def reset(self, end: socket.socket) -> None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.close()

    def test_a_reset_is_noticed_and_an_end_of_stream_is_none(self) -> None:
        for end, expected in ((self.reset, ["died"]), (socket.socket.close, [])):
            leg, far, died = self.leg()
            self.watch.add(leg)
            end(far)
            self.watch.doRead()
            self.assertEqual(died, expected)

    def test_a_hang_up_wakes_nobody_twice(self) -> None:
        near, far = socket.socketpair()
        self.addCleanup(near.close)
        leg = FakeLeg(near)
        self.watch.add(leg)
        far.close()
        poll = select.poll()
        poll.register(self.watch.fileno(), select.POLLIN)
        self.assertNotEqual(poll.poll(1000), [])
        self.watch.doRead()
        self.assertEqual(poll.poll(0), [])

    def test_a_leg_that_is_read_again_is_left_to_its_reader(self) -> None:
        leg, far, died = self.leg()
        self.watch.add(leg)
        self.watch.remove(leg)
        self.reset(far)
        self.watch.doRead()
        self.assertEqual(died, [])

    def test_a_descriptor_that_another_connection_has_now_is_watched_for_that_one(self) -> None:
        old, _, died_before = self.leg()
        self.watch.add(old)
        old.transport.socket.close()
        self.watch.remove(old)
        new, far, died = self.leg()
        self.watch.add(new)
        self.reset(far)
        self.watch.doRead()
        self.assertEqual((died_before, died), ([], ["died"]))

    def test_a_transport_without_a_descriptor_is_not_watched(self) -> None:
        leg, _, _ = self.leg()
        leg.transport = StringTransport()
        self.watch.add(leg)
        self.assertIsNone(leg.watched)

    def test_legs_may_come_to_be_removed_after_the_reactor_has_let_go_of_it(self) -> None:
        leg, _, _ = self.leg()
        late, _, _ = self.leg()
        self.watch.add(leg)
        self.watch.connectionLost(Failure(ConnectionDone()))
        self.watch.remove(leg)
        self.watch.add(late)
        self.watch.remove(late)
        self.assertEqual((leg.watched, late.watched), (None, None))
