"""The store channel: who is let in, one key space a world, caps, and clients that wait, do not read or go away."""

from __future__ import annotations

import contextlib
import gc
import json
import ssl
from dataclasses import replace
from typing import Any
from weakref import ref

from OpenSSL.crypto import X509, PKey
from twisted.internet.address import IPv4Address, UNIXAddress
from twisted.internet.ssl import CertificateOptions
from twisted.logger import LogLevel
from twisted.protocols.tls import TLSMemoryBIOFactory

from flodl_tw.channels.capacity import Capacity
from flodl_tw.channels.store import PART_BYTES, WOKEN_AT_ONCE
from flodl_tw.core.run_settings import AfterRun, RunSettings
from flodl_tw.core.store.session import QUERIES_A_FEED
from flodl_tw.core.store.wire import Opcode, StoreLimits
from flodl_tw.core.wire import STORE_MAGIC
from flodl_tw.testing import ClockedController, FakeDial, FakeTransport
from tests.certificates import self_signed
from tests.core.store.queries import HELLO, i64, listed, many, q, text
from tests.pumped import PumpedTestCase, turns, window

PING = b"\x0d\1\2\3\4"
PONG = b"\1\2\3\4"
OK = b"\0"
MIB = 1 << 20
SMALL = StoreLimits(total_bytes=MIB, total_keys=100)


def stored(limits: StoreLimits | None = SMALL, **fields: Any) -> RunSettings:
    """A run's settings with a store."""
    return replace(window(**fields), store=limits)


class StoringTestCase(PumpedTestCase):
    """A world of two hosts, at 10.0.0.1 and 10.0.0.2."""

    def formed(
        self, *addresses: str, limits: StoreLimits | None = SMALL, after_run: AfterRun = AfterRun.HOLD, **fields: Any
    ) -> ClockedController:
        addresses = addresses or ("10.0.0.1", "10.0.0.2")
        door = ClockedController(stored(limits, target_ranks=len(addresses), **fields), after_run=after_run)
        self.links = self.world(door, *addresses)
        return door

    def world(self, door: ClockedController, *addresses: str) -> list[FakeDial]:
        """A world forms of a host at each address; gives their links."""
        links = [door.dial(address) for address in addresses]
        for number, link in enumerate(links):
            link.join(host=f"h{number}")
        door.turn()
        for link in links:
            link.messages()
        self.assertEqual(door.state()["phase"], "training")
        self.forget()
        return links

    def client(self, door: ClockedController, address: str = "10.0.0.1", data: bytes = b"") -> FakeDial:
        """A client of the store, which has said who it is."""
        dial = door.dial(address, port=5000)
        dial.send(HELLO + data)
        return dial

    def waiting(self, door: ClockedController) -> list[Any]:
        return self.view(door)["waiting"]

    def view(self, door: ClockedController) -> dict[str, Any]:
        answer = door.http(b"GET /store.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        view: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])["store"]
        return view

    def assert_refused(self, door: ClockedController, address: str, *why: str) -> None:
        """The client is closed at once, and a line says so."""
        self.forget()
        before = door.ends()["store-refused"]
        client = self.client(door, address, PING)
        self.assertTrue(client.transport.aborted, address)
        self.assertEqual(client.received(), b"")
        door.turn()
        self.assertTrue(client.closed)
        self.line("dropped", address, "on the store channel", *why, level=LogLevel.info)
        self.assertEqual(door.ends()["store-refused"], before + 1)

    def assert_let_in(self, door: ClockedController, address: str) -> None:
        client = self.client(door, address, PING)
        self.assertEqual(client.received(), PONG, address)
        self.assertFalse(client.closed)
        client.reset()


class TestWhoGetsIn(StoringTestCase):
    """The addresses of the hosts in the formed world, from its formation until their last link has closed."""

    def test_the_hosts_of_the_world_are_let_in_and_nobody_else(self) -> None:
        door = self.formed()
        for address in ("10.0.0.1", "10.0.0.2", "::ffff:10.0.0.2"):
            self.assert_let_in(door, address)
        for address in ("10.0.0.3", "fd00::1", "127.0.0.1", "::1"):
            self.assert_refused(door, address, "it is no address of this world's hosts")

    def test_a_refusal_names_the_hosts_whose_other_address_it_may_be(self) -> None:
        door = self.formed()
        self.assert_let_in(door, "10.0.0.1")
        self.assert_refused(door, "fd00::2", "no rank has come from yet ('h1' at 10.0.0.2), whose ranks", "MASTER_ADDR")
        self.assert_let_in(door, "10.0.0.2")
        client = self.client(door, "fd00::3")
        self.assertTrue(client.transport.aborted)
        self.assertNotIn("may be another address", self.lines()[-1])

    def test_loopback_is_let_in_where_a_host_joined_over_loopback(self) -> None:
        door = self.formed("127.0.0.1", "10.0.0.2")
        for address in ("127.0.0.1", "127.0.0.2", "::1", "10.0.0.2"):
            self.assert_let_in(door, address)
        self.assert_refused(door, "10.0.0.1")

    def test_before_a_world_has_formed_nobody_is_let_in(self) -> None:
        door = ClockedController(stored(target_ranks=2))
        door.dial("10.0.0.1").join()
        door.turn()
        self.assert_refused(door, "10.0.0.1", "no world has formed yet")

    def test_a_window_that_failed_never_had_a_store(self) -> None:
        door = ClockedController(stored(target_ranks=2))
        door.dial("10.0.0.1").join()
        door.turn()
        door.controller.run.abort("enough", "127.0.0.1")
        door.turn()
        self.assertEqual(door.state()["phase"], "failed")
        self.assert_refused(door, "10.0.0.1")

    def test_a_host_that_left_the_window_is_a_stranger(self) -> None:
        door = ClockedController(stored(target_ranks=2))
        gone = door.dial("10.0.0.3")
        gone.join(host="gone")
        gone.hang_up()
        self.world(door, "10.0.0.1", "10.0.0.2")
        self.assert_refused(door, "10.0.0.3", "no address of this world's hosts")

    def test_it_is_open_until_the_last_link_has_closed(self) -> None:
        door = self.formed()
        for link in self.links:
            self.assert_let_in(door, "10.0.0.1")
            link.send(link.talk.exited(link.talk.ranks[0]))
            link.hang_up()
            door.turn()
        self.assertEqual(door.state()["phase"], "done")
        self.assert_refused(door, "10.0.0.1", "the world's hosts have all left")

    def test_a_failed_run_keeps_it_while_a_host_is_still_linked(self) -> None:
        door = ClockedController(stored(target_ranks=2))
        for number in (1, 2):
            door.dial(f"10.0.0.{number}", reads=False).join(host=f"h{number}")
        door.turn()
        door.controller.run.abort("enough", "127.0.0.1")
        door.turn()
        self.assertEqual(door.state()["phase"], "failed")
        self.assert_let_in(door, "10.0.0.2")
        door.clock.advance(2)
        door.turn()
        self.assert_refused(door, "10.0.0.2", "have all left")

    def test_off_is_a_channel_that_nothing_serves(self) -> None:
        door = self.formed(limits=None)
        client = self.client(door)
        door.turn()
        self.assertTrue(client.closed)
        self.line("dropped 10.0.0.1:5000: nothing serves the store channel in this run")
        self.assertEqual(dict(door.ends()), {"unserved-channel": 1})


class TestShares(StoringTestCase):
    """Connections of ranks leave room for hosts and the operator."""

    def test_900_connections_of_one_rank_leave_room_for_others(self) -> None:
        door = self.formed()
        door.front.capacity = Capacity(door.clock, 768)
        clients = [self.client(door, "10.0.0.1") for _ in range(900)]
        self.assertEqual(sum(client.transport.aborted for client in clients), 900 - 144)
        self.assertEqual(door.ends()["channel-full"], 900 - 144)
        self.line("on the store channel, as many as one may", level=LogLevel.info)
        self.assert_let_in(door, "10.0.0.2")
        for client in clients:
            client.reset()
        self.assert_let_in(door, "10.0.0.1")

    def test_all_ranks_together_leave_a_quarter_to_joins_and_the_operator(self) -> None:
        door = self.formed("127.0.0.1")
        door.front.capacity = Capacity(door.clock, 768)
        clients = [self.client(door, "127.0.0.1") for _ in range(700)]
        self.assertEqual(sum(not client.transport.aborted for client in clients), 576)
        self.line("ranks have 576 connections open")


class TestRefusedOften(StoringTestCase):
    """A torch client that is refused comes again and again."""

    def test_an_address_has_one_line_a_minute_and_is_counted_each_time(self) -> None:
        door = self.formed()
        for _ in range(60):
            self.client(door, "10.0.0.9")
            door.clock.advance(1 - 1e-6)
        self.assertEqual(len(self.lines()), 1)
        self.line("dropped 10.0.0.9:5000")
        self.assertEqual(door.ends()["store-refused"], 60)
        door.clock.advance(1)
        self.line("59 more from 10.0.0.9 within 60 s (store-refused)")
        self.client(door, "10.0.0.8")
        self.client(door, "10.0.0.9")
        self.assertEqual(len(self.lines()), 3)
        self.assertEqual(door.ends()["store-refused"], 62)

    def test_a_refused_client_leaves_nothing_behind(self) -> None:
        door = self.formed()
        client = self.client(door, "10.0.0.9", q(Opcode.SET, b"/k", b"v"))
        door.turn()
        self.assertTrue(client.closed)
        self.assertEqual(len(door.front.pending), 0)
        view = self.view(door)
        self.assertEqual((view["connected"], view["keys"]), (0, 0))
        door.clock.advance(60)
        self.assert_idle(door)


class TestKeySpace(StoringTestCase):
    """One key space a world."""

    def test_clients_of_one_world_share_its_keys(self) -> None:
        door = self.formed()
        self.client(door, "10.0.0.1", q(Opcode.SET, b"/k", b"v"))
        self.assertEqual(self.client(door, "10.0.0.2", q(Opcode.GET, b"/k")).received(), text(b"v"))

    def test_a_key_outlives_its_client(self) -> None:
        door = self.formed()
        self.client(door, "10.0.0.1", q(Opcode.SET, b"/k", b"v")).reset()
        self.assertEqual(self.client(door, "10.0.0.2", q(Opcode.GET, b"/k")).received(), text(b"v"))

    def test_the_next_world_sees_no_key_of_it_and_open_connections_keep_theirs(self) -> None:
        door = self.formed("10.0.0.1", after_run=AfterRun.REARM)
        old = self.client(door, "10.0.0.1", q(Opcode.SET, b"/old", b"1") + many(Opcode.WAIT, b"/both"))
        (link,) = self.links
        link.send(link.talk.exited(0))
        link.hang_up()
        door.turn()
        self.assertEqual(door.state()["phase"], "waiting")
        self.assert_refused(door, "10.0.0.1", "no world has formed yet")
        self.world(door, "10.0.0.1")
        new = self.client(door, "10.0.0.1", q(Opcode.GETNUMKEYS) + q(Opcode.GET, b"/old"))
        self.assertEqual(new.received(), i64(0) + text(b""))
        new.send(q(Opcode.SET, b"/both", b"new"))
        self.assertEqual(old.received(), b"")
        old.send(q(Opcode.GET, b"/old") + q(Opcode.SET, b"/both", b"old") + q(Opcode.GETNUMKEYS))
        self.assertEqual(old.received(), text(b"1") + OK + i64(2))
        new.send(q(Opcode.GET, b"/both"))
        self.assertEqual(new.received(), text(b"new"))
        view = self.view(door)
        self.assertEqual((view["connected"], view["keys"]), (1, 1))
        old.reset()
        self.assertEqual(self.view(door)["connected"], 1)

    def test_the_keys_of_a_world_go_with_its_last_connection(self) -> None:
        door = self.formed("10.0.0.1", after_run=AfterRun.REARM)
        client = self.client(door, "10.0.0.1", q(Opcode.SET, b"/k", b""))
        store = door.controller.run.store
        assert store is not None
        keys = ref(store.keys)
        del store
        (link,) = self.links
        link.send(link.talk.exited(0))
        link.hang_up()
        door.turn()
        gc.collect()
        self.assertIsNotNone(keys())
        client.reset()
        del client
        gc.collect()
        self.assertIsNone(keys())

    def test_the_keys_of_two_worlds_are_kept_and_no_more(self) -> None:
        door = self.formed("10.0.0.1", after_run=AfterRun.REARM)
        clients = []
        for _ in range(3):
            self.assertEqual([client.closed for client in clients], [False] * len(clients))
            clients.append(self.client(door, "10.0.0.1", q(Opcode.SET, b"/k", b"")))
            (link,) = self.links
            link.send(link.talk.exited(0))
            link.hang_up()
            door.turn()
            self.links = self.world(door, "10.0.0.1")
        self.assertEqual([client.closed for client in clients], [True, False, False])
        door.clock.advance(60)
        self.client(door, "10.0.0.1")
        door.turn()
        self.assertEqual([client.closed for client in clients], [True, True, False])
        self.line("dropped 10.0.0.1:5000: on the store channel: its world is over, and two more have used the store")


class TestWaits(StoringTestCase):
    """A client may wait for as long as it likes."""

    def test_who_waits_for_hours_is_left_alone(self) -> None:
        door = self.formed()
        client = self.client(door, data=many(Opcode.WAIT, b"/k"))
        self.assertEqual(len(door.front.pending), 0)
        door.clock.advance(100 * 3600)
        self.assertFalse(client.closed)
        self.assertFalse(client.transport.disconnecting)
        self.assertEqual(self.waiting(door), [{"key": "/k", "clients": 1, "seconds": 360000}])
        self.client(door, "10.0.0.2", q(Opcode.SET, b"/k", b"v"))
        self.assertEqual(client.received(), OK)
        self.assertEqual(self.waiting(door), [])

    def test_the_magic_alone_has_no_deadline_either(self) -> None:
        door = self.formed()
        client = door.dial("10.0.0.1")
        client.send(STORE_MAGIC)
        door.clock.advance(3600)
        client.send(HELLO[4:] + PING)
        self.assertEqual(client.received(), PONG)

    def test_all_who_wait_for_a_key_are_woken_once(self) -> None:
        door = self.formed()
        clients = [self.client(door, data=many(Opcode.WAIT, b"/k")) for _ in range(5)]
        setter = self.client(door, "10.0.0.2", q(Opcode.SET, b"/k", b"v") * 2 + PING)
        self.assertEqual([client.received() for client in clients], [OK] * 5)
        self.assertEqual(setter.received(), PONG)

    def test_bytes_may_come_in_any_pieces(self) -> None:
        door = self.formed()
        client = door.dial("10.0.0.1")
        for byte in HELLO + q(Opcode.SET, b"/k", b"v") + q(Opcode.GET, b"/k") + PING:
            client.send(bytes((byte,)))
        self.assertEqual(client.received(), text(b"v") + PONG)

    def test_who_is_gone_is_not_woken_and_waits_for_nothing(self) -> None:
        for name, end in (("half-close", FakeDial.half_close), ("reset", FakeDial.reset)):
            with self.subTest(name):
                door = self.formed()
                client = self.client(door, data=many(Opcode.WAIT, b"/k"))
                end(client)
                self.assertEqual(self.waiting(door), [])
                self.assertEqual(self.view(door)["connected"], 0)
                self.client(door, "10.0.0.2", q(Opcode.SET, b"/k", b"v"))
                door.turn()
                self.assertTrue(client.closed)
                self.assertEqual(client.received(), b"")
                self.assertEqual(self.lines(), [])
                self.assertEqual(self.view(door)["connected"], 1)

    def test_a_half_closed_client_still_gets_what_it_was_answered(self) -> None:
        door = self.formed()
        client = self.client(door, data=PING)
        client.half_close()
        self.assertTrue(client.transport.disconnecting)
        self.assertFalse(client.transport.aborted)
        door.turn()
        self.assertEqual(client.received(), PONG)
        self.assertTrue(client.closed)

    def test_a_half_closed_client_that_does_not_read_is_closed_by_force(self) -> None:
        door = self.formed()
        client = door.dial("10.0.0.1", reads=False)
        client.send(HELLO + PING)
        client.half_close()
        door.clock.advance(1.9)
        self.assertFalse(client.closed)
        door.clock.advance(0.1)
        door.turn()
        self.assertTrue(client.closed)
        self.assertEqual(self.view(door)["connected"], 0)


BREACHES = (
    ("a key over 8 KiB", b"\3" + i64(8193), "a key of 8193 bytes is over the limit of 8192"),
    ("a value over 8 MiB", b"\1" + text(b"/k") + i64((8 << 20) + 1), "8388609 bytes is over the limit of 8388608"),
    ("too many keys in a query", b"\6" + i64((128 << 10) + 1), "131073 keys in one query are over the limit of 131072"),
    ("more bytes in all", q(Opcode.SET, b"/k", bytes(MIB)), "over the store's limit of 1048576 (--store-max-bytes)"),
    (
        "more keys in all",
        b"".join(q(Opcode.SET, b"/%d" % number, b"") for number in range(101)),
        "the store holds all of the 100 keys it may (--store-max-keys)",
    ),
    ("an opcode of nobody", b"\x13", "opcode 0x13"),
    ("another VALIDATE", b"\0\1\2\3\4", "VALIDATE"),
    ("an ADD to no number", q(Opcode.SET, b"/k", b"x") + q(Opcode.ADD, b"/k", 1), "no number"),
)


class TestBreach(StoringTestCase):
    """Who breaks a cap is closed, and nobody else."""

    def test_each_breach_closes_that_client_alone_with_one_line(self) -> None:
        for name, sent, why in BREACHES:
            with self.subTest(name):
                door = self.formed()
                waiter = self.client(door, data=many(Opcode.WAIT, b"/later"))
                client = self.client(door, data=PING + sent + PING)
                self.assertEqual(client.received(), PONG)
                self.assertFalse(client.transport.aborted)
                self.line("dropped 10.0.0.1:5000: on the store channel: ", why, level=LogLevel.warn)
                client.send(PING + q(Opcode.SET, b"/later", b""))
                door.turn()
                self.assertTrue(client.closed)
                self.assertEqual(client.received(), b"")
                self.assertEqual(dict(door.ends()), {"store-closed": 1})
                self.assertEqual(len(self.lines()), 1)
                self.assertFalse(waiter.closed)
                waiter.send(PING)
                self.assertEqual(waiter.received(), PONG)
                self.assertEqual(self.view(door)["connected"], 1)

    def test_what_an_unfinished_query_held_is_given_back(self) -> None:
        for name, end in (("reset", b""), ("breach", bytes(MIB))):
            with self.subTest(name):
                door = self.formed(limits=StoreLimits(total_bytes=MIB))
                client = self.client(door, data=b"\1" + text(b"/k") + i64(2 * MIB) + bytes(1000))
                self.assertGreater(self.view(door)["held_bytes"], 1000)
                client.send(end)
                client.reset()
                self.assertEqual(self.view(door)["held_bytes"], 0)

    def test_who_waits_and_is_closed_is_not_woken(self) -> None:
        door = self.formed()
        client = self.client(door, data=many(Opcode.WAIT, b"/k") + b"\x13")
        self.client(door, "10.0.0.2", q(Opcode.SET, b"/k", b"v"))
        self.assertEqual(client.received(), b"")
        door.turn()
        self.assertTrue(client.closed)

    def test_a_closed_client_that_does_not_read_is_gone_after_the_grace(self) -> None:
        door = self.formed()
        client = door.dial("10.0.0.1", reads=False)
        client.send(HELLO + PING)
        client.transport.producer.pauseProducing()
        client.send(b"\x13")
        door.clock.advance(2)
        door.turn()
        self.assertTrue(client.closed)
        self.assertEqual(self.view(door)["connected"], 0)


class TestSlowReaders(StoringTestCase):
    """A client that does not read is not read from, and gets all of its answers in the end."""

    def slow(self, door: ClockedController, data: bytes = b"") -> tuple[FakeDial, Any]:
        """A client whose transport's buffer is full; and what the transport tells of that."""
        client = self.client(door, data=data)
        producer: Any = client.transport.producer
        producer.pauseProducing()
        self.assertEqual(client.transport.producerState, "paused")
        return client, producer

    def test_it_is_not_read_from_until_there_is_room_again(self) -> None:
        door = self.formed()
        client, producer = self.slow(door)
        door.clock.advance(3600)
        self.assertFalse(client.closed)
        self.assertEqual(client.transport.producerState, "paused")
        producer.resumeProducing()
        self.assertEqual(client.transport.producerState, "producing")
        client.send(PING)
        self.assertEqual(client.received(), PONG)

    def test_it_is_woken_all_the_same(self) -> None:
        door = self.formed()
        client, producer = self.slow(door, many(Opcode.WAIT, b"/k"))
        self.client(door, "10.0.0.2", q(Opcode.SET, b"/k", b"v"))
        self.assertEqual(client.received(), OK)
        self.assertEqual(client.transport.producerState, "paused")
        producer.resumeProducing()
        self.assertEqual(client.transport.producerState, "producing")

    def big(self) -> tuple[ClockedController, FakeDial, bytes]:
        """A client that has asked five times for a value of a MiB, and that value as an answer."""
        door = self.formed(limits=StoreLimits())
        value = bytes(range(256)) * 4096
        client = self.client(door, data=q(Opcode.SET, b"/k", value))
        return door, client, text(value)

    def test_a_long_answer_goes_out_in_parts_and_others_have_their_turn(self) -> None:
        door, client, answer = self.big()
        other = self.client(door)
        client.send(q(Opcode.GET, b"/k") * 5 + PING)
        parts = [client.received()]
        self.assertEqual(len(parts[0]), PART_BYTES)
        self.assertEqual(client.transport.producerState, "paused")

        def another_turn(turn: int) -> None:
            parts.append(client.received())
            other.send(PING)
            self.assertEqual(other.received(), PONG)

        turns(door, another_turn, 30)
        self.assertEqual(b"".join(parts), answer * 5 + PONG)
        # The end of an answer and the begin of the next may share a turn.
        self.assertLess(max(map(len, parts)), 2 * PART_BYTES)
        self.assertEqual(client.transport.producerState, "producing")

    def test_a_long_list_of_keys_goes_out_in_parts_and_others_have_their_turn(self) -> None:
        door = self.formed(limits=StoreLimits())
        keys = [b"/%05d" % number for number in range(50_000)]
        pairs = [part for key in keys for part in (key, b"")]
        client, other = self.client(door, data=many(Opcode.MULTI_SET, *pairs)), self.client(door)
        client.send(q(Opcode.LIST_KEYS) + PING)
        parts = [client.received()]

        def another_turn(turn: int) -> None:
            parts.append(client.received())
            other.send(PING)
            self.assertEqual(other.received(), PONG)

        turns(door, another_turn, 20)
        whole = b"".join(parts)
        self.assertEqual(listed(whole.removesuffix(PONG)), keys)
        self.assertLess(max(map(len, parts)), 2 * PART_BYTES)
        self.assertEqual(client.transport.producerState, "producing")

    def test_a_client_with_a_full_buffer_has_no_further_part_until_there_is_room(self) -> None:
        door, client, answer = self.big()
        producer: Any = client.transport.producer
        client.send(q(Opcode.GET, b"/k") * 3 + PING)
        producer.pauseProducing()
        self.assertEqual(client.received(), answer[:PART_BYTES])
        door.clock.advance(3600)
        door.turn()
        self.assertEqual(client.received(), b"")
        producer.resumeProducing()
        door.turn()
        self.assertEqual(client.received(), answer[PART_BYTES:] + answer * 2 + PONG)
        self.assertEqual(client.transport.producerState, "producing")

    def test_a_buffer_that_fills_with_a_part_holds_back_the_next(self) -> None:
        door, client, answer = self.big()
        transport: Any = client.transport
        producer, write = transport.producer, transport.write

        def fills(data: bytes) -> None:
            write(data)
            producer.pauseProducing()

        transport.write = fills
        client.send(q(Opcode.GET, b"/k") * 3 + PING)
        whole = b""
        for _ in range(100):
            door.clock.advance(60)
            part = client.received()
            self.assertLessEqual(len(part), PART_BYTES)
            whole += part
            if transport.producerState == "producing":
                break
            producer.resumeProducing()
        self.assertEqual(whole, answer * 3 + PONG)
        self.assertEqual((client.received(), transport.producerState), (b"", "producing"))

    def test_a_client_that_goes_amid_its_answer_is_gone(self) -> None:
        for name, end, most in (("half-close", FakeDial.half_close, MIB + 8), ("reset", FakeDial.reset, PART_BYTES)):
            with self.subTest(name):
                door, client, answer = self.big()
                client.send(q(Opcode.GET, b"/k") * 3)
                end(client)
                door.turn()
                self.assertEqual(client.received(), answer[:most])
                self.assertTrue(client.closed)
                self.assertEqual(self.view(door)["connected"], 0)

    def test_a_breach_in_a_later_part_closes_it(self) -> None:
        door, client, answer = self.big()
        client.send(q(Opcode.GET, b"/k") * 2 + b"\x13")
        door.turn()
        self.assertEqual(client.received(), answer * 2)
        self.assertTrue(client.closed)
        self.line("dropped 10.0.0.1:5000: on the store channel: opcode 0x13")


class TestManyAtOnce(StoringTestCase):
    """What many do, or one does many times, takes many turns."""

    def test_a_query_that_wakes_many_wakes_some_in_each_turn(self) -> None:
        door = self.formed(limits=StoreLimits())
        waiters = [self.client(door, data=many(Opcode.WAIT, b"/k")) for _ in range(WOKEN_AT_ONCE + 10)]
        self.client(door, data=q(Opcode.SET, b"/k", b""))
        woken = [waiter.received() for waiter in waiters]
        self.assertEqual(woken, [OK] * WOKEN_AT_ONCE + [b""] * 10)
        # Who asks meanwhile is answered after it has been woken.
        waiters[-1].send(PING)
        door.turn()
        self.assertEqual([waiter.received() for waiter in waiters[-10:]], [OK] * 9 + [OK + PONG])

    def test_many_small_queries_are_answered_in_several_turns(self) -> None:
        door = self.formed()
        client, other = self.client(door), self.client(door)
        client.send(PING * 1000)
        self.assertEqual(client.received(), PONG * QUERIES_A_FEED)
        self.assertEqual(client.transport.producerState, "paused")
        other.send(PING)
        self.assertEqual(other.received(), PONG)
        door.turn()
        self.assertEqual(client.received(), PONG * (1000 - QUERIES_A_FEED))
        self.assertEqual(client.transport.producerState, "producing")

    def test_who_reads_no_long_value_is_closed_when_others_need_the_room(self) -> None:
        door = self.formed(limits=StoreLimits(total_bytes=4 * MIB))
        setter = self.client(door)
        readers = []
        for number in range(9):
            setter.send(q(Opcode.SET, b"/k", bytes([number]) * MIB))
            reader = self.client(door)
            producer: Any = reader.transport.producer
            producer.pauseProducing()
            reader.send(q(Opcode.GET, b"/k"))
            readers.append(reader)
        self.assertEqual([reader.closed for reader in readers], [False] * 9)
        door.turn()
        self.assertEqual([reader.closed for reader in readers], [True] + [False] * 8)
        self.line("dropped 10.0.0.1:5000: on the store channel: it does not read a long value", level=LogLevel.warn)
        for number, reader in enumerate(readers[1:], 1):
            reader.transport.producer.resumeProducing()
            door.turn()
            self.assertEqual(reader.received(), text(bytes([number]) * MIB))


class TestClosingDoor(StoringTestCase):
    """The end of the process, with clients in every state."""

    def test_every_client_is_gone_and_nothing_is_left_on_the_clock(self) -> None:
        door = self.formed(limits=StoreLimits())
        value = bytes(MIB)
        clients = [
            self.client(door, data=PING),
            self.client(door, data=many(Opcode.WAIT, b"/k")),
            self.client(door, data=q(Opcode.SET, b"/big", value)),
            door.dial("10.0.0.1", reads=False),
        ]
        clients[2].send(q(Opcode.GET, b"/big") * 5)
        clients[3].send(HELLO + many(Opcode.WAIT, b"/k"))
        clients[3].transport.producer.pauseProducing()
        store = door.controller.run.store
        assert store is not None
        self.assertEqual(len(store.clients), 4)
        gone = door.server.stopService()
        door.turn()
        self.assertNoResult(gone)
        self.assertEqual([client.closed for client in clients], [True, True, True, False])
        door.clock.advance(2)
        door.turn()
        self.successResultOf(gone)
        self.assertTrue(clients[3].closed)
        self.assertEqual(len(store.clients), 0)
        self.assert_idle(door)

    def test_a_paused_client_that_reads_on_is_let_go_without_the_grace(self) -> None:
        door = self.formed()
        client = door.dial("10.0.0.1", reads=False)
        client.send(HELLO + PING)
        producer: Any = client.transport.producer
        producer.pauseProducing()
        client.transport.loseConnection()
        producer.resumeProducing()
        self.assertIsNone(client.transport.producer)
        self.assertEqual(self.view(door)["connected"], 0)


class TLSDial:
    """A connection to a door behind TLS, seen from the dialing side; ``raw`` is what TLS wraps."""

    def __init__(self, door: ClockedController) -> None:
        self.door = door
        peer = IPv4Address("TCP", "10.0.0.1", 5000)
        key, certificate = self_signed()
        options = CertificateOptions(
            privateKey=PKey.from_cryptography_key(key), certificate=X509.from_cryptography(certificate)
        )
        self.raw = FakeTransport(door.clock, peer, reads=True)
        self.raw.protocol = TLSMemoryBIOFactory(options, False, door.front, door.clock).buildProtocol(peer)
        self.raw.protocol.makeConnection(self.raw)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self._up, self._down = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._down, self._up)
        for _ in range(3):
            with contextlib.suppress(ssl.SSLWantReadError):
                self._tls.do_handshake()
            self._exchange()

    def _exchange(self) -> None:
        if sent := self._up.read():
            self.raw.protocol.dataReceived(sent)
        self.door.turn()
        self._down.write(self.raw.value())
        self.raw.clear()

    def ask(self, data: bytes = b"") -> bytes:
        """Send it; gives what has come down by the end of some turns."""
        if data:
            self._tls.write(data)
        self._exchange()
        got = b""
        with contextlib.suppress(ssl.SSLWantReadError):
            while part := self._tls.read(MIB):
                got += part
        return got

    def answer_the_close(self) -> None:
        """Take what came before the end of the stream, and end this side, too."""
        self.ask()
        self._tls.unwrap()
        self._exchange()


class TestTransports(StoringTestCase):
    """What is no TCP socket: a Unix socket, and TLS, where every byte goes through what wraps the transport."""

    def test_a_unix_socket_counts_as_loopback(self) -> None:
        for address, answer in (("127.0.0.1", PONG), ("10.0.0.2", b"")):
            door = self.formed("10.0.0.1", address)
            peer = UNIXAddress(None)
            transport = FakeTransport(door.clock, peer, reads=True)
            transport.protocol = door.front.buildProtocol(peer)
            transport.protocol.makeConnection(transport)
            transport.protocol.dataReceived(HELLO + PING)
            self.assertEqual((transport.value(), transport.aborted), (answer, not answer))
        self.line("dropped a Unix socket's peer: on the store channel: it is no address of this world's hosts")

    def test_waits_and_long_answers_behind_tls(self) -> None:
        door = self.formed(limits=StoreLimits())
        client, value = TLSDial(door), bytes(range(256)) * 4096
        self.assertEqual(client.ask(HELLO + many(Opcode.WAIT, b"/k") + PING), PONG)
        self.client(door, data=q(Opcode.SET, b"/k", value))
        self.assertEqual(client.ask(), OK)
        raw_producer: Any = client.raw.producer
        raw_producer.pauseProducing()
        self.assertEqual(client.ask(q(Opcode.GET, b"/k")), b"")
        self.assertEqual(client.raw.producerState, "paused")
        raw_producer.resumeProducing()
        self.assertEqual(client.ask(), text(value))
        self.assertEqual(client.raw.producerState, "producing")
        self.assertEqual(client.ask(PING + b"\x7f"), PONG)
        client.answer_the_close()
        self.assertTrue(client.raw.lost)

    def test_a_closing_door_lets_a_client_behind_tls_go_amid_its_answer(self) -> None:
        door = self.formed(limits=StoreLimits())
        client = TLSDial(door)
        client.ask(HELLO + q(Opcode.SET, b"/k", bytes(MIB)))
        raw_producer: Any = client.raw.producer
        raw_producer.pauseProducing()
        client.ask(q(Opcode.GET, b"/k"))
        gone = door.front.close_all()
        door.turn()
        self.assertNoResult(gone)
        raw_producer.resumeProducing()
        client.answer_the_close()
        self.successResultOf(gone)
