"""Hosts that said hello and hung up: their end waits in the kernel, and is read before a verdict is taken."""

from __future__ import annotations

import socket

from twisted.internet.interfaces import ISystemHandle
from twisted.internet.task import Clock
from zope.interface import directlyProvides

from flodl_tw import sockets
from flodl_tw.core.messages import Accept
from flodl_tw.testing import ClockedController, FakeDial
from tests.agent.links import LinkTransport
from tests.pumped import PumpedTestCase, window


class HungUpTests(PumpedTestCase):
    """Ends are read before a verdict is taken."""

    def hello_and_gone(self, door: ClockedController, host: str, address: str) -> FakeDial:
        """A host whose hello was read, and whose end is still in the kernel."""
        dial = door.dial(address)
        near, far = socket.socketpair()
        self.addCleanup(near.close)
        far.close()
        directlyProvides(dial.transport, ISystemHandle)
        dial.transport.getHandle = lambda: near
        self.assertIsInstance(dial.join(host=host), Accept)
        return dial

    def test_a_host_that_said_hello_and_hung_up_forms_no_world(self) -> None:
        door = ClockedController(window(target_ranks=1))
        self.hello_and_gone(door, "a", "10.0.0.1")
        door.turn()
        self.assertEqual((door.state()["phase"], door.state()["joined_ranks"]), ("waiting", 0))
        self.line("'a' left while the window is open (link closed)")

    def test_its_retry_is_no_duplicate_of_it(self) -> None:
        door = ClockedController(window(target_ranks=2))
        self.hello_and_gone(door, "a", "10.0.0.1")
        self.assertIsInstance(door.dial().join(host="a"), Accept)
        door.turn()
        self.assertEqual((door.state()["phase"], door.state()["joined_ranks"]), ("waiting", 1))

    def test_another_host_is_not_told_that_the_window_has_closed_with_it(self) -> None:
        door = ClockedController(window(target_ranks=1))
        self.hello_and_gone(door, "a", "10.0.0.1")
        self.assertIsInstance(door.dial("10.0.0.2").join(host="b"), Accept)
        door.turn()
        self.assertEqual([member["host"] for member in door.state()["members"]], ["b"])
        self.assertEqual(door.state()["phase"], "training")

    def test_who_is_there_has_not_hung_up(self) -> None:
        near, far = socket.socketpair()
        self.addCleanup(far.close)
        transport = LinkTransport(Clock(), None)
        transport.handle.close()
        transport.handle = near
        directlyProvides(transport, ISystemHandle)
        self.assertFalse(sockets.has_hung_up(transport))
        far.send(b"x")
        self.assertFalse(sockets.has_hung_up(transport))
        near.close()
        self.assertTrue(sockets.has_hung_up(transport))
