"""A connection in memory between a host's link and a controller on a clock."""

from __future__ import annotations

from collections.abc import Sequence

from twisted.internet.error import ConnectionDone

from flodl_tw.agent.link import JoinLink
from flodl_tw.testing import ClockedController, FakeDial
from tests.agent.links import LinkTransport


class Wire:
    """A connection in memory: a host's link, and what the controller's door made of it."""

    def __init__(self, door: ClockedController, link: JoinLink) -> None:
        self.link = link
        self.far: FakeDial = door.dial()
        self.near = LinkTransport(door.clock, None)
        self.near.protocol = link
        link.makeConnection(self.near)

    def pump(self) -> bool:
        """Carry what was written and what was closed to the other side; whether there was anything."""
        sent = self.near.value()
        self.near.clear()
        self.far.send(sent)
        if self.near.lost and not self.far.closed:
            self.far.hang_up()
            return True
        received = self.far.received()
        if not self.near.lost:
            self.link.dataReceived(received)
            if self.far.closed:
                self.near.lose(ConnectionDone())
                return True
        return bool(sent or received)


def pump(door: ClockedController, wires: Sequence[Wire]) -> None:
    """Let everything arrive that is under way, with no time passing."""
    door.turn()
    while sum(wire.pump() for wire in list(wires)):
        door.turn()
