"""What the kernel makes of a listening socket's options."""

from __future__ import annotations

import socket
import unittest
from unittest import mock

from flodl_tw import sockets
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
