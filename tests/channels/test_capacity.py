"""Accepting pauses while the descriptors are used up, and resumes."""

from __future__ import annotations

from twisted.internet.interfaces import IListeningPort
from twisted.internet.task import Clock
from twisted.logger import LogLevel
from zope.interface import implementer

from flodl_tw.channels.capacity import Capacity
from flodl_tw.limits import SPARE_DESCRIPTORS
from flodl_tw.testing import FakePort
from tests.pumped import PumpedTestCase


@implementer(IListeningPort)
class OtherPort:
    """A port of some other kind, which says nothing of pausing."""

    def getHost(self) -> None:
        """It has no address."""


class CapacityTests(PumpedTestCase):
    """Three connections at most, on a port that is told."""

    def setUp(self) -> None:
        super().setUp()
        self.clock = Clock()
        self.capacity = Capacity(self.clock, 3, accepts=30)
        self.port = FakePort()
        self.capacity.listening(self.port)

    def opened(self, count: int) -> None:
        for _ in range(count):
            self.capacity.opened()

    def closed(self, count: int) -> None:
        for _ in range(count):
            self.capacity.closed()

    def test_it_pauses_once_with_a_line_and_resumes_when_one_closes(self) -> None:
        self.opened(2)
        self.assertEqual(self.port.asked, [])
        self.opened(3)
        self.assertEqual(self.port.asked, ["stop"])
        self.line("3 connections are open", "accepting pauses", "LimitNOFILE", level=LogLevel.warn)
        self.closed(2)
        self.assertEqual(self.port.asked, ["stop"])
        self.closed(1)
        self.assertEqual(self.port.asked, ["stop", "start"])
        self.opened(1)
        self.assertEqual(self.port.asked, ["stop", "start", "stop"])

    def test_a_line_a_minute_says_it(self) -> None:
        self.opened(2)
        for _ in range(50):
            self.opened(1)
            self.closed(1)
        self.assertEqual(len(self.lines()), 1)
        self.clock.advance(60)
        self.opened(1)
        self.assertEqual(len(self.lines()), 2)

    def test_a_batch_of_accepts_does_not_outgrow_the_spare_descriptors(self) -> None:
        self.assertEqual(self.port.numberAccepts, 30)
        # Twisted doubles its batch, or so, with each one that was full.
        self.port.numberAccepts = 60
        self.opened(1)
        self.assertEqual(self.port.numberAccepts, 30)

    def test_a_port_that_is_being_closed_does_not_start_accepting_again(self) -> None:
        self.opened(3)
        self.capacity.closing()
        self.closed(3)
        self.assertEqual(self.port.asked, ["stop"])

    def test_a_port_that_cannot_pause_is_left_alone(self) -> None:
        capacity = Capacity(self.clock, 1)
        capacity.listening(OtherPort())  # type: ignore[arg-type]
        capacity.opened()
        self.assertEqual(self.lines(), [])

    def test_the_spare_descriptors_are_kept(self) -> None:
        for descriptors, most in ((20_000, 20_000 - SPARE_DESCRIPTORS), (300, 150), (64, 32)):
            self.assertEqual(Capacity.of_descriptors(self.clock, descriptors).most, most)
