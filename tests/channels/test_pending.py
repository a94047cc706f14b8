"""The caps on pending connections: who goes first, who is spared, and books that stay right."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from twisted.internet.task import Clock

from flodl_tw.channels.pending import PendingConnections
from flodl_tw.core.addresses import classify
from flodl_tw.core.wire import FRAME_MAGIC, JOIN_MAGIC
from flodl_tw.testing import ClockedController
from tests.pumped import PumpedTestCase


@dataclass(eq=False)
class Visitor:
    """A pending connection."""

    peer: str
    since: float = 0.0

    @property
    def from_loopback(self) -> bool:
        return classify(self.peer).loopback


class NaiveUndecided:
    """The rules once more, by looking at every connection each time."""

    def __init__(self, clock: Clock, most: int, most_per_host: int) -> None:
        self.clock = clock
        self.most = most
        self.most_per_host = most_per_host
        self.visitors: list[Visitor] = []

    def count(self, peer: str) -> int:
        return sum(visitor.peer == peer for visitor in self.visitors)

    def arrived(self, visitor: Visitor) -> set[Visitor | None]:
        """Those of whom one has to go; where several addresses have most, any of their oldest will do."""
        visitor.since = self.clock.seconds()
        self.visitors.append(visitor)
        own = self.count(visitor.peer)
        if not visitor.from_loopback and own > self.most_per_host:
            return {self.oldest(visitor.peer, own > 8 * self.most_per_host)}
        if len(self.visitors) > self.most:
            counts = Counter(visitor.peer for visitor in self.visitors)
            largest = max(counts.values())
            crowds = [peer for peer, count in counts.items() if count == largest]
            return {self.oldest(peer, len(self.visitors) > 8 * self.most) for peer in crowds}
        return {None}

    def oldest(self, peer: str, even_young: bool) -> Visitor | None:
        first = next(visitor for visitor in self.visitors if visitor.peer == peer)
        return first if even_young or self.clock.seconds() - first.since >= 1.0 else None

    def remove(self, visitor: Visitor) -> bool:
        if visitor not in self.visitors:
            return False
        self.visitors.remove(visitor)
        return True


class UndecidedTests(PumpedTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.clock = Clock()

    def make(self, most: int, most_per_host: int) -> PendingConnections:
        return PendingConnections(self.clock.seconds, most, most_per_host)

    def test_under_the_caps_nobody_goes(self) -> None:
        pending = self.make(4, 3)
        for peer in ("10.0.0.1", "10.0.0.1", "10.0.0.1", "10.0.0.2"):
            self.assertIsNone(pending.arrived(Visitor(peer)))
            self.clock.advance(10)
        self.assertEqual(len(pending), 4)

    def test_past_the_cap_of_an_address_its_own_oldest_goes(self) -> None:
        pending = self.make(100, 2)
        other, first, second, third = (Visitor(peer) for peer in ("10.0.0.9", "10.0.0.1", "10.0.0.1", "10.0.0.1"))
        for visitor in (other, first, second):
            self.assertIsNone(pending.arrived(visitor))
            self.clock.advance(1)
        self.assertIs(pending.arrived(third), first)

    def test_past_the_cap_in_all_the_oldest_of_the_largest_crowd_goes(self) -> None:
        pending = self.make(4, 100)
        eldest, first, second, third = (Visitor(peer) for peer in ("10.0.0.9", "10.0.0.1", "10.0.0.1", "10.0.0.1"))
        for visitor in (eldest, first, second, third):
            self.assertIsNone(pending.arrived(visitor))
            self.clock.advance(1)
        self.assertIs(pending.arrived(Visitor("10.0.0.7")), first)

    def test_none_younger_than_one_second_goes(self) -> None:
        pending = self.make(100, 2)
        first = Visitor("10.0.0.1")
        pending.arrived(first)
        pending.arrived(Visitor("10.0.0.1"))
        self.clock.advance(0.999)
        self.assertIsNone(pending.arrived(Visitor("10.0.0.1")))
        self.clock.advance(0.001)
        self.assertIs(pending.arrived(Visitor("10.0.0.1")), first)

    def test_past_eight_times_a_cap_even_the_young_go(self) -> None:
        for most, most_per_host, open_at_most in ((3, 100, 24), (100, 2, 16)):
            pending = self.make(most, most_per_host)
            visitors = [Visitor("10.0.0.1") for _ in range(open_at_most + 1)]
            for visitor in visitors[:-1]:
                self.assertIsNone(pending.arrived(visitor))
            self.assertIs(pending.arrived(visitors[-1]), visitors[0])

    def test_loopback_is_exempt_from_the_cap_of_an_address_alone(self) -> None:
        for peer in ("127.0.0.1", "127.9.9.9", "::1"):
            pending = self.make(6, 2)
            first = Visitor(peer)
            self.assertIsNone(pending.arrived(first))
            for _ in range(5):
                self.clock.advance(2)
                self.assertIsNone(pending.arrived(Visitor(peer)))
            self.assertIs(pending.arrived(Visitor(peer)), first)

    def test_settling_twice_or_a_stranger_is_no_settling(self) -> None:
        pending = self.make(4, 4)
        visitor = Visitor("10.0.0.1")
        pending.arrived(visitor)
        self.assertFalse(pending.remove(Visitor("10.0.0.1")))
        self.assertFalse(pending.remove(Visitor("10.0.0.2")))
        self.assertTrue(pending.remove(visitor))
        self.assertFalse(pending.remove(visitor))
        self.assertEqual(len(pending), 0)

    def test_iterating_survives_that_each_one_settles(self) -> None:
        pending = self.make(100, 100)
        for number in range(20):
            pending.arrived(Visitor(f"10.0.0.{number % 3}"))
        for visitor in pending:
            self.assertTrue(pending.remove(visitor))
        self.assertEqual(list(pending), [])

    def test_the_books_agree_with_counting_everybody_whoever_comes_and_goes(self) -> None:
        peers = ("10.0.0.1", "10.0.0.2", "10.0.0.3", "127.0.0.1")
        for seed in range(40):
            chance = random.Random(seed)
            caps = chance.randint(1, 12), chance.randint(1, 5)
            pending = self.make(*caps)
            naive = NaiveUndecided(self.clock, *caps)
            gone: list[Visitor] = []
            for step in range(200):
                context = f"seed {seed}, step {step}, caps {caps}"
                self.clock.advance(chance.choice((0, 0, 0.3, 1)))
                action = chance.random()
                if action < 0.6:
                    visitor = Visitor(chance.choice(peers))
                    leaves = pending.arrived(visitor)
                    self.assertIn(leaves, naive.arrived(visitor), context)
                else:
                    pool = naive.visitors if action < 0.95 else gone
                    leaves = chance.choice(pool) if pool else None
                if leaves is not None:
                    self.assertEqual(pending.remove(leaves), naive.remove(leaves), context)
                    gone.append(leaves)
                self.assertEqual(len(pending), len(naive.visitors), context)
            self.assertEqual(set(pending), set(naive.visitors))


class DoorCapTests(PumpedTestCase):
    """The caps at the front door itself."""

    def test_the_one_that_is_crowded_out_is_closed_with_one_line(self) -> None:
        door = ClockedController(max_pending_per_host=2)
        dials = [door.dial("10.0.0.1", port=port) for port in (41, 42)]
        door.clock.advance(1)
        dials.append(door.dial("10.0.0.1", port=43))
        door.turn()
        self.assertEqual([dial.closed for dial in dials], [True, False, False])
        self.assertEqual(door.ends(), {"crowded-out": 1})
        self.line("10.0.0.1:41", "not said what they want")

    def test_a_member_and_an_answered_request_no_longer_count(self) -> None:
        door = ClockedController(max_pending_per_host=1)
        member = door.dial("10.0.0.1")
        member.join()
        self.assertEqual(len(door.front.pending), 0)
        for _ in range(3):
            door.clock.advance(1)
            asking = door.dial("10.0.0.1")
            asking.send(b"GET /state.json HTTP/1.1\r\nHost: x\r\n\r\n")
            door.turn()
            self.assertTrue(asking.received().startswith(b"HTTP/1.1 200 OK\r\n"))
        self.assertFalse(member.closed)
        self.assertEqual(door.ends(), {})

    def test_half_a_hello_and_half_a_request_count(self) -> None:
        door = ClockedController()
        door.dial().send(JOIN_MAGIC + FRAME_MAGIC)
        door.dial().send(b"GET / HTTP/1.1\r\n")
        door.dial().send(b"GE")
        door.dial()
        self.assertEqual(len(door.front.pending), 4)

    def test_an_ipv4_mapped_peer_shares_the_cap_of_its_ipv4(self) -> None:
        door = ClockedController(max_pending_per_host=1)
        first = door.dial("::ffff:10.0.0.1")
        door.clock.advance(1)
        door.dial("10.0.0.1")
        door.turn()
        self.assertTrue(first.closed)

    def test_an_honest_batch_past_the_cap_is_served_whole(self) -> None:
        door = ClockedController(max_pending=8, max_pending_per_host=4)
        dials = [door.dial("10.0.0.1", port=1000 + number) for number in range(32)]
        for number, dial in enumerate(dials):
            self.assertEqual(dial.join(host=f"h{number}").ranks, (number,))
        self.assertEqual(door.ends(), {})
