"""The watch of legs that nobody reads, on real sockets: a reset is noticed there."""

from __future__ import annotations

import select
import socket
import struct

from twisted.internet.error import ConnectionDone
from twisted.internet.testing import MemoryReactorClock
from twisted.python.failure import Failure

from flodl_tw.channels.dead_peer import DeathWatch
from flodl_tw.channels.forward import Leg
from tests.pumped import PumpedTestCase


class WatchTests(PumpedTestCase):
    """Legs that nobody reads, watched for their death."""

    def setUp(self) -> None:
        super().setUp()
        self.watch = DeathWatch(MemoryReactorClock())

    def leg(self) -> tuple[Leg, socket.socket, list[str]]:
        """A leg on a real socket, the far end of it, and a list that says so when the leg has died."""
        listener = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(listener.close)
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
        for end in (far, near):
            self.addCleanup(end.close)
        died: list[str] = []
        leg = Leg()
        leg.transport = near
        leg.died = lambda: died.append("died")  # type: ignore[method-assign]
        return leg, far, died

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
        leg = Leg()
        leg.transport = near
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
        old.transport.close()
        self.watch.remove(old)
        new, far, died = self.leg()
        self.watch.add(new)
        self.reset(far)
        self.watch.doRead()
        self.assertEqual((died_before, died), ([], ["died"]))

    def test_legs_may_come_to_be_removed_after_the_reactor_has_let_go_of_it(self) -> None:
        leg, _, _ = self.leg()
        late, _, _ = self.leg()
        self.watch.add(leg)
        self.watch.connectionLost(Failure(ConnectionDone()))
        self.watch.remove(leg)
        self.watch.add(late)
        self.watch.remove(late)
        self.assertEqual((leg.watched, late.watched), (None, None))
