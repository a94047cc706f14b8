"""What the kernel makes of a listening socket's options, and of bytes that are sent at once."""

from __future__ import annotations

import socket
import unittest
from typing import Any
from unittest import mock

from twisted.internet.error import ConnectionLost
from twisted.internet.protocol import Protocol

from flodl_tw import sockets
from flodl_tw.channels import dead_peer
from flodl_tw.limits import Limits


class ListenTests(unittest.TestCase):
    """What the listening socket is."""

    def test_without_ipv6_every_address_is_ipv4(self) -> None:
        with mock.patch("flodl_tw.sockets.has_ipv6", return_value=False):
            bound = sockets.listen("", 0, Limits())
        self.addCleanup(bound.close)
        self.assertEqual(bound.family, socket.AF_INET)
        self.assertIn("(IPv4 alone)", sockets.shown_binding(bound))
        self.assertFalse(sockets.bound_to_loopback(bound))

    def test_every_connection_inherits_what_the_listener_was_told(self) -> None:
        limits = Limits()
        bound = sockets.listen("127.0.0.1", 0, limits)
        self.addCleanup(bound.close)
        client = socket.create_connection(bound.getsockname())
        self.addCleanup(client.close)
        bound.setblocking(True)
        accepted, _ = bound.accept()
        self.addCleanup(accepted.close)
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limits.write_stall * 1000),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, limits.keepalive_idle),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, limits.keepalive_interval),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        ):
            with self.subTest(option=option):
                self.assertEqual(accepted.getsockopt(level, option), value)

    def test_an_absurd_scale_still_listens(self) -> None:
        bound = sockets.listen("127.0.0.1", 0, Limits.at(1.7976931348623157e308))
        self.addCleanup(bound.close)
        self.assertEqual(bound.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 32767)
        self.assertEqual(bound.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), (1 << 31) - 1)


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
        server: Any = dead_peer.WatchedServer
        self.transport = server(here, Protocol(), ("127.0.0.1", 1), None, 1, self.watcher)
        self.assertEqual(self.watcher.writers, [])

    def test_what_the_kernel_takes_is_gone_at_once(self) -> None:
        dead_peer.send(self.transport, b"one")
        dead_peer.send(self.transport, b"two")
        self.assertEqual(self.watcher.writers, [])
        self.assertEqual(self.peer.recv(100), b"onetwo")

    def test_what_it_does_not_take_waits_for_its_turn_and_nothing_overtakes_it(self) -> None:
        sent = [bytes((number,)) * 65536 for number in range(64)]
        for part in sent:
            dead_peer.send(self.transport, part)
        self.assertEqual(self.watcher.writers, [self.transport])
        got = b""
        while self.watcher.writers:
            got += self.peer.recv(65536)
            self.assertIsNone(self.transport.doWrite())
        dead_peer.send(self.transport, b"last")
        self.assertEqual(self.watcher.writers, [])
        whole = b"".join(sent) + b"last"
        while len(got) < len(whole):
            got += self.peer.recv(65536)
        self.assertTrue(got == whole)

    def test_what_is_written_before_it_leaves_before_it(self) -> None:
        self.transport.write(b"one")
        dead_peer.send(self.transport, b"two")
        self.transport.doWrite()
        self.assertEqual(self.peer.recv(100), b"onetwo")

    def test_a_peer_that_has_gone_is_left_to_the_reactor(self) -> None:
        self.peer.close()
        dead_peer.send(self.transport, b"one")
        self.assertEqual(self.watcher.writers, [self.transport])
        self.assertIsInstance(self.transport.doWrite(), ConnectionLost)
