"""A world's store as people see it, and whom it is for."""

from __future__ import annotations

import unittest

from twisted.internet.task import Clock

from flodl_tw.core.addresses import classify
from flodl_tw.core.facts import Offer
from flodl_tw.core.ledger import Ledger
from flodl_tw.core.store.session import StoreSession
from flodl_tw.core.store.waits import WAIT_BYTES
from flodl_tw.core.store.wire import Opcode, StoreLimits
from flodl_tw.core.store.world import KEY_CHARS, SHOWN_WAITS, WorldStore
from flodl_tw.testing import make_hello
from tests.core.store.queries import HELLO, many, q


class Client:
    """A connection that may be given up."""

    def __init__(self) -> None:
        self.given_up = ""

    def give_up(self, why: str) -> None:
        self.given_up = why


class WorldStoreTestCase(unittest.TestCase):
    limits = StoreLimits()

    def store(self, *addresses: str) -> WorldStore:
        """The store of a world of one host of four ranks at each address."""
        ledger = Ledger()
        for number, address in enumerate(addresses or ("10.0.0.1",)):
            ledger.enter(Offer(make_hello(f"h{number}", 4), 4, address), 0.0)
        self.clock = Clock()
        members = [member for member, _ in ledger.roster()]
        return WorldStore(members, 4 * len(members), self.clock.seconds, self.limits)

    def client(self, store: WorldStore, data: bytes = b"") -> StoreSession:
        connection = StoreSession(store.keys)
        self.assertIsNone(connection.feed(HELLO + data).close)
        return connection


class TestAdmission(WorldStoreTestCase):
    """Addresses of the world's hosts alone."""

    def test_an_address_is_admitted_however_it_is_written(self) -> None:
        store = self.store("10.0.0.1", "fd00::1", "fe80::1%eth0")
        for address, right in (
            ("10.0.0.1", True),
            ("::ffff:10.0.0.1", True),
            ("fd00:0:0::1", True),
            ("fe80::1%eth0", True),
            ("fe80::1%eth1", False),
            ("fe80::1", False),
            ("10.0.0.2", False),
            ("fd00::2", False),
            ("127.0.0.1", False),
            ("::1", False),
        ):
            with self.subTest(address):
                self.assertIs(store.admits(classify(address)), right)

    def test_a_host_on_loopback_admits_all_of_loopback(self) -> None:
        for joined in ("127.0.0.1", "::1"):
            store = self.store("10.0.0.1", joined)
            for address, right in (("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("10.0.0.2", False)):
                with self.subTest(joined=joined, address=address):
                    self.assertIs(store.admits(classify(address)), right)


class TestReads(WorldStoreTestCase):
    """Long values that clients are being sent."""

    limits = StoreLimits(total_bytes=125)

    def test_each_value_counts_once_and_the_client_that_began_first_gives_way(self) -> None:
        store = self.store()
        a, b, c, d = (Client() for _ in range(4))
        old, new, newest = bytes(100), bytes([1]) * 100, bytes([2]) * 100
        for client, value in ((a, old), (b, old), (c, new)):
            store.reads(client, value)
        self.assertEqual(list(store.unread), [a, b, c])
        store.reads(d, newest)
        self.assertEqual(list(store.unread), [c, d])
        self.assertIn("does not read a long value", a.given_up)
        self.assertEqual([bool(client.given_up) for client in (a, b, c, d)], [True, True, False, False])

    def test_a_client_that_asks_for_the_next_has_read_the_one_before(self) -> None:
        store, client, other = self.store(), Client(), Client()
        store.reads(client, bytes(100))
        store.reads(other, bytes([1]) * 100)
        for number in range(3):
            store.reads(client, bytes([number]) * 100)
        self.assertEqual((client.given_up, other.given_up), ("", ""))
        self.assertEqual(list(store.unread), [other, client])


class TestView(WorldStoreTestCase):
    """What is shown."""

    def test_an_empty_store(self) -> None:
        store = self.store()
        self.assertEqual(
            store.view(),
            {
                "world_size": 4,
                "connected": 0,
                "workers": 0,
                "keys": 0,
                "queue_items": 0,
                "bytes": 0,
                "held_bytes": 0,
                "max_keys": 1_000_000,
                "max_bytes": 268_435_456,
                "waiting": [],
            },
        )
        self.assertEqual(store.told(), ["0 of 4 ranks came to the store; it has 0 connections, 0 keys and 0 bytes"])

    def test_ranks_that_wait_for_one_that_does_not_come(self) -> None:
        store = self.store("10.0.0.1", "10.0.0.2")
        store.clients.update(Client() for _ in range(4))
        for _ in range(4):
            self.client(store, q(Opcode.ADD, b"init/", 1) + many(Opcode.WAIT, b"/worker/0/ready"))
            self.clock.advance(10)
        self.client(store, q(Opcode.QUEUE_PUSH, b"/q", b"item") + many(Opcode.WAIT, b"/other"))
        view = store.view()
        self.assertEqual(
            (view["workers"], view["keys"], view["queue_items"], view["connected"]),
            (4, 1, 1, 4),
        )
        self.assertEqual(view["bytes"], len("init/4") + len("/qitem"))
        self.assertEqual(view["held_bytes"], len("/other") + 4 * len("/worker/0/ready") + 5 * WAIT_BYTES)
        self.assertEqual(
            view["waiting"],
            [
                {"key": "/worker/0/ready", "clients": 4, "seconds": 40},
                {"key": "/other", "clients": 1, "seconds": 0},
            ],
        )
        self.assertEqual(
            store.told(),
            [
                "4 of 8 ranks came to the store; it has 4 connections, 1 key and 12 bytes",
                "4 clients have been waiting for /worker/0/ready, the first for 40 s",
                "1 client has been waiting for /other, the first for 0 s",
            ],
        )

    def test_only_what_is_waited_for_longest_is_shown(self) -> None:
        store = self.store()
        for number in range(SHOWN_WAITS + 5):
            self.client(store, many(Opcode.WAIT, b"/%d" % number))
            self.clock.advance(1)
        self.assertEqual([each["key"] for each in store.view()["waiting"]], [f"/{n}" for n in range(SHOWN_WAITS)])

    def test_a_long_key_is_cut_for_people_and_whole_for_programs(self) -> None:
        store = self.store()
        self.client(store, many(Opcode.WAIT, b"/" + b"k" * 5000))
        self.assertEqual(store.view()["waiting"][0]["key"], "/" + "k" * 5000)
        self.assertIn(f"waiting for /{'k' * (KEY_CHARS - 2)}…, the first", store.told()[1])

    def test_a_key_that_is_no_text_is_shown_by_its_bytes(self) -> None:
        store = self.store()
        self.client(store, many(Opcode.WAIT, b"/\xff\x00"))
        self.assertEqual(store.view()["waiting"][0]["key"], "/\\xff\x00")
