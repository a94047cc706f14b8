"""torch's store: every recorded byte of real clients, every answer, every cap, and no trust in a length."""

from __future__ import annotations

import struct
import tracemalloc
import unittest

from hypothesis import given, settings
from hypothesis import strategies as st

from flodl_tw.core.errors import StoreError
from flodl_tw.core.store.keys import KeySpace, number_of
from flodl_tw.core.store.session import (
    JOIN_BYTES,
    MOST_WAITS,
    QUERIES_A_FEED,
    REPLY_BYTES,
    StoreEffects,
    StoreSession,
)
from flodl_tw.core.store.waits import WAIT_BYTES, Waiting
from flodl_tw.core.store.wire import GATHER_BYTES, Opcode, Query, QueryReader, StoreLimits
from tests.core.store.queries import (
    CAPTURES,
    HELLO,
    Call,
    answered,
    calls,
    conversations,
    i64,
    listed,
    many,
    q,
    same_answer,
    sent,
    text,
)

MIB = 1024 * 1024
SMALL = StoreLimits(key_bytes=16, value_bytes=64, keys_a_query=4, total_bytes=200, total_keys=6)


class StoreCase(unittest.TestCase):
    """One key space, whose clock the test turns."""

    limits = StoreLimits()

    def setUp(self) -> None:
        self.now = 100.0
        self.space = KeySpace(lambda: self.now, self.limits)

    def client(self, peer: object = None) -> StoreSession:
        client = StoreSession(self.space, peer)
        self.assertEqual(client.feed(HELLO), StoreEffects())
        return client

    def assert_answer(self, client: StoreSession, asked: bytes, answer: bytes) -> None:
        self.assertEqual(client.feed(asked), StoreEffects([answer] if answer else []))

    def assert_closed(self, client: StoreSession, asked: bytes, why: str) -> None:
        outcome = client.feed(asked)
        self.assertEqual(outcome.close, why)
        self.assertTrue(client.gone)
        self.assertEqual(client.feed(q(Opcode.GETNUMKEYS)), StoreEffects())


class TestCaptures(unittest.TestCase):
    """What real clients of five versions sent, and what torch's own server answered."""

    def test_there_is_a_capture_of_each_version(self) -> None:
        self.assertEqual([path.stem for path in CAPTURES], ["2.15.0", "2.2.2", "2.4.1", "2.5.1", "2.9.1"])

    def test_every_call_is_answered_byte_for_byte(self) -> None:
        for path in CAPTURES:
            space = KeySpace(lambda: 0.0)
            client = StoreSession(space)
            for call in calls(path):
                for up, down in call.turns:
                    with self.subTest(path.stem, call=call.name):
                        if up.startswith(HELLO):
                            client = StoreSession(space)
                        outcome = client.feed(up)
                        self.assertTrue(same_answer(call, sent(outcome), down), sent(outcome).hex())
                        self.assertEqual((outcome.close, outcome.more, outcome.wakeups), (None, False, []))

    def test_a_conversation_split_anywhere_is_answered_the_same(self) -> None:
        for path in CAPTURES:
            # The newest has every call of the others: they are split at every tenth byte.
            step = 1 if path.stem == "2.15.0" else 10
            before: list[bytes] = []
            for up, part in conversations(path):
                whole = self.replayed(before, [up])
                self.assertTrue(self.as_recorded(part, whole))
                for split in range(1, len(up), step):
                    self.assertEqual(self.replayed(before, [up[:split], up[split:]]), whole, (path.stem, split))
                self.assertEqual(self.replayed(before, [up[at : at + 1] for at in range(len(up))]), whole)
                before.append(up)

    def replayed(self, before: list[bytes], pieces: list[bytes]) -> bytes:
        space = KeySpace(lambda: 0.0)
        for up in before:
            answered(StoreSession(space), up)
        client = StoreSession(space)
        return b"".join(answered(client, piece) for piece in pieces)

    def as_recorded(self, part: list[Call], answered: bytes) -> bool:
        at = 0
        for call in part:
            recorded = b"".join(down for _, down in call.turns)
            if not same_answer(call, answered[at : at + len(recorded)], recorded):
                return False
            at += len(recorded)
        return at == len(answered)


class TestAnswers(StoreCase):
    """What each opcode says, beside what the captures hold."""

    def test_ping_says_the_same_number(self) -> None:
        self.assert_answer(self.client(), b"\x0d\xff\0\1\2", b"\xff\0\1\2")

    def test_a_value_that_is_not_there_is_empty(self) -> None:
        self.assert_answer(self.client(), q(Opcode.GET, b"/k"), text(b""))

    def test_add_counts_as_c_does(self) -> None:
        for before, amount, after in (
            (b"12abc", 1, 13),
            (b" \t\n\v\f\r7", 1, 8),
            (b"+5", 1, 6),
            (b"-5", 1, -4),
            (b"00000000000000000000000000000012", 1, 13),
            (b"-0", 0, 0),
            (b"9223372036854775807", 1, -(1 << 63)),
            (b"-9223372036854775808", -1, (1 << 63) - 1),
        ):
            with self.subTest(before):
                client = self.client()
                self.assert_answer(client, q(Opcode.SET, b"/n", before) + q(Opcode.ADD, b"/n", amount), i64(after))
                self.assert_answer(client, q(Opcode.GET, b"/n"), text(b"%d" % after))

    def test_add_to_what_is_no_number_ends_the_connection_and_changes_nothing(self) -> None:
        for value, why in (
            (b"", "the value of '/n' is no number to add to"),
            (b"x1", "the value of '/n' is no number to add to"),
            (b"- 1", "the value of '/n' is no number to add to"),
            (b" " * 5000, "the value of '/n' is no number to add to"),
            (b"9223372036854775808", "the value of '/n' is a number of more than 64 bits"),
            (b"-" + b"9" * 5000, "the value of '/n' is a number of more than 64 bits"),
        ):
            for asked in (q(Opcode.ADD, b"/n", 1), q(Opcode.BARRIER, b"/n", 1)):
                with self.subTest(value[:20], asked=asked[:1]):
                    client = self.client()
                    client.feed(q(Opcode.SET, b"/n", value))
                    self.assert_closed(client, asked, why)
                    self.assertEqual(self.space.get(b"/n"), value)

    def test_append_makes_what_is_not_there_and_goes_on_with_what_is(self) -> None:
        client = self.client()
        self.assert_answer(client, q(Opcode.APPEND, b"/k", b"ab") + q(Opcode.GET, b"/k"), text(b"ab"))
        client.feed(q(Opcode.APPEND, b"/k", b"c") + q(Opcode.APPEND, b"/k", b"d"))
        self.assert_answer(client, q(Opcode.COMPARE_SET, b"/k", b"x", b"y"), text(b"abcd"))
        client.feed(q(Opcode.APPEND, b"/k", b"e"))
        self.assert_answer(client, q(Opcode.COMPARE_SET, b"/k", b"abcde", b"y"), text(b"y"))
        self.assertEqual(self.space.stored, len(b"/ky"))

    def test_compare_set_with_an_empty_value(self) -> None:
        client = self.client()
        self.assert_answer(client, q(Opcode.COMPARE_SET, b"/k", b"", b""), text(b""))
        self.assert_answer(client, q(Opcode.COMPARE_SET, b"/k", b"", b"x"), text(b"x"))
        self.assert_answer(client, q(Opcode.COMPARE_SET, b"/k", b"", b"y"), text(b"x"))

    def test_queries_that_name_no_key_are_answered(self) -> None:
        asked = many(Opcode.CHECK) + many(Opcode.WAIT) + many(Opcode.MULTI_GET) + many(Opcode.MULTI_SET)
        self.assertEqual(sent(self.client().feed(asked)), b"\0\0")

    def test_a_key_set_twice_in_one_query_has_the_later_value(self) -> None:
        client = self.client()
        self.assert_answer(
            client, many(Opcode.MULTI_SET, b"/a", b"1", b"/a", b"22") + q(Opcode.GET, b"/a"), text(b"22")
        )
        self.assert_answer(client, many(Opcode.MULTI_SET, b"/a", b"") + q(Opcode.GETNUMKEYS), i64(1))
        self.assertEqual(self.space.stored, 2)

    def test_keys_are_bytes_and_may_be_empty(self) -> None:
        client = self.client()
        self.assert_answer(client, q(Opcode.SET, b"", b"\xff") + q(Opcode.GET, b""), text(b"\xff"))
        self.assertEqual(listed(sent(client.feed(q(Opcode.LIST_KEYS)))), [b""])

    def test_validate_may_be_said_again(self) -> None:
        self.assert_answer(self.client(), HELLO + q(Opcode.GETNUMKEYS), i64(0))

    def test_what_begins_otherwise_is_closed(self) -> None:
        old = "its first opcode is 0x03, not VALIDATE (0x00): torch 2.2 or newer is needed"
        for first, why in (
            (b"\x03", old),
            (b"\x7f", "opcode 0x7f is none of torch's store (0x00 to 0x12)"),
            (b"\x00\xce\xf7\x85\x3d", "VALIDATE carries 0x3d85f7ce, not 0x3c85f7ce"),
        ):
            with self.subTest(first):
                self.assert_closed(StoreSession(self.space), first, why)

    def test_an_opcode_that_is_none_closes_after_what_came_before_it_is_answered(self) -> None:
        outcome = self.client().feed(q(Opcode.GETNUMKEYS) + b"\x13")
        self.assertEqual(outcome, StoreEffects([i64(0)], [], "opcode 0x13 is none of torch's store (0x00 to 0x12)"))

    def test_two_key_spaces_see_nothing_of_each_other(self) -> None:
        self.client().feed(q(Opcode.SET, b"/k", b"old"))
        old, self.space = self.space, KeySpace(lambda: self.now)
        self.assert_answer(self.client(), q(Opcode.GET, b"/k"), text(b""))
        self.assertEqual(old.get(b"/k"), b"old")


class TestWaits(StoreCase):
    """Who is woken when."""

    def waiting_for(self, *keys: bytes) -> StoreSession:
        client = self.client()
        self.assert_answer(client, many(Opcode.WAIT, *keys), b"")
        return client

    def woken(self, outcome: StoreEffects) -> list[StoreSession]:
        self.assertEqual({what for _, what in outcome.wakeups} - {b"\0"}, set())
        return [client for client, _ in outcome.wakeups]

    def test_everything_that_makes_a_key_wakes_all_who_wait_for_it(self) -> None:
        for asked in (
            q(Opcode.SET, b"/k", b""),
            q(Opcode.ADD, b"/k", 1),
            q(Opcode.APPEND, b"/k", b"x"),
            q(Opcode.COMPARE_SET, b"/k", b"", b"x"),
            many(Opcode.MULTI_SET, b"/j", b"", b"/k", b""),
            q(Opcode.BARRIER, b"/k", 1),
        ):
            with self.subTest(asked[:1]):
                self.setUp()
                waiters = [self.waiting_for(b"/k") for _ in range(3)]
                self.assertEqual(self.woken(self.client().feed(asked)), waiters)
                self.assertEqual((self.space.held, self.space.waiting()), (0, []))

    def test_a_compare_set_that_sets_nothing_wakes_nobody(self) -> None:
        self.waiting_for(b"/k")
        self.assertEqual(self.woken(self.client().feed(q(Opcode.COMPARE_SET, b"/k", b"x", b"y"))), [])

    def test_a_wait_for_several_ends_with_the_last_of_them(self) -> None:
        setter, waiter = self.client(), self.waiting_for(b"/a", b"/b", b"/a")
        self.assertEqual(self.woken(setter.feed(q(Opcode.SET, b"/b", b""))), [])
        self.assertEqual(self.woken(setter.feed(q(Opcode.SET, b"/a", b""))), [waiter])

    def test_a_key_that_has_come_and_gone_is_not_waited_for_again(self) -> None:
        setter, waiter = self.client(), self.waiting_for(b"/a", b"/b")
        setter.feed(q(Opcode.SET, b"/a", b"") + q(Opcode.DELETE_KEY, b"/a"))
        self.assertEqual(self.woken(setter.feed(q(Opcode.SET, b"/b", b""))), [waiter])

    def test_a_wait_with_another_of_the_same_connection_ends_on_its_own(self) -> None:
        client, setter = self.waiting_for(b"/a"), self.client()
        self.assert_answer(client, many(Opcode.WAIT, b"/b") + q(Opcode.GETNUMKEYS), i64(0))
        self.assertEqual(self.woken(setter.feed(q(Opcode.SET, b"/b", b"") + q(Opcode.SET, b"/a", b""))), [client] * 2)

    def test_a_connection_that_wakes_itself_is_answered_in_order(self) -> None:
        asked = many(Opcode.WAIT, b"/k") + q(Opcode.GET, b"/k") + q(Opcode.ADD, b"/k", 1)
        self.assertEqual(self.client().feed(asked), StoreEffects([text(b""), b"\0", i64(1)]))

    def test_a_canceled_wait_is_never_answered(self) -> None:
        client = self.waiting_for(b"/a", b"/b")
        other = self.waiting_for(b"/a")
        self.assert_answer(client, q(Opcode.CANCEL_WAIT), b"\1")
        self.assertEqual(self.woken(self.client().feed(many(Opcode.MULTI_SET, b"/a", b"", b"/b", b""))), [other])
        self.assert_answer(client, q(Opcode.CANCEL_WAIT), b"\1")

    def test_a_wait_may_have_ended_before_it_is_canceled(self) -> None:
        client = self.waiting_for(b"/a")
        self.assertEqual(self.client().feed(q(Opcode.SET, b"/a", b"")), StoreEffects([], [(client, b"\0")]))
        self.assert_answer(client, q(Opcode.CANCEL_WAIT), b"\1")

    def test_a_lost_connection_waits_no_more(self) -> None:
        client = self.waiting_for(b"/a", b"/b")
        self.client().feed(q(Opcode.SET, b"/a", b""))
        client.lost()
        client.lost()
        self.assertEqual(self.woken(self.client().feed(q(Opcode.SET, b"/b", b""))), [])
        self.assertEqual((self.space.held, self.space.waiting()), (0, []))

    def test_a_line_that_began_anew_is_not_touched_by_an_old_wait(self) -> None:
        old = self.waiting_for(b"/a", b"/b")
        self.client().feed(q(Opcode.SET, b"/a", b"") + q(Opcode.DELETE_KEY, b"/a"))
        new = self.waiting_for(b"/a")
        old.lost()
        self.assertEqual(self.woken(self.client().feed(q(Opcode.SET, b"/a", b""))), [new])

    def test_a_barrier_opens_for_all_when_the_last_has_come(self) -> None:
        first, second, third = self.client(), self.client(), self.client()
        self.assert_answer(first, q(Opcode.BARRIER, b"/bar", 3), b"")
        self.assert_answer(second, q(Opcode.BARRIER, b"/bar", 3), b"")
        self.assert_answer(second, many(Opcode.CHECK, b"/bar"), b"\0")
        self.assertEqual(
            third.feed(q(Opcode.BARRIER, b"/bar", 3)), StoreEffects([b"\0"], [(first, b"\0"), (second, b"\0")])
        )
        self.assertEqual(sent(first.feed(q(Opcode.BARRIER, b"/bar", 3) + q(Opcode.GET, b"/bar"))), b"\0" + text(b"4"))

    def test_an_unfinished_barrier_ends_no_wait_and_a_set_opens_it(self) -> None:
        waiter, late = self.waiting_for(b"/bar"), self.client()
        self.assert_answer(late, q(Opcode.BARRIER, b"/bar", 9), b"")
        self.assertEqual(self.woken(self.client().feed(q(Opcode.SET, b"/bar", b"0"))), [waiter, late])

    def test_who_left_a_barrier_stays_counted(self) -> None:
        client = self.client()
        client.feed(q(Opcode.BARRIER, b"/bar", 2))
        client.lost()
        self.assert_answer(self.client(), q(Opcode.BARRIER, b"/bar", 2), b"\0")


class TestQueues(StoreCase):
    """First in, first out, and one woken for each that comes in."""

    def test_items_leave_in_the_order_in_which_they_came(self) -> None:
        client = self.client()
        client.feed(q(Opcode.QUEUE_PUSH, b"/q", b"1") + q(Opcode.QUEUE_PUSH, b"/q", b""))
        self.assertEqual(sent(client.feed(q(Opcode.QUEUE_LEN, b"/q"))), i64(2))
        self.assertEqual(sent(client.feed(q(Opcode.QUEUE_POP, b"/q"))), i64(2) + text(b"1"))
        self.assertEqual(sent(client.feed(q(Opcode.QUEUE_POP, b"/q"))), i64(1) + text(b""))
        self.assertEqual(sent(client.feed(q(Opcode.QUEUE_POP, b"/q") + q(Opcode.QUEUE_LEN, b"/q"))), i64(0) + i64(0))
        self.assertEqual((self.space.stored, self.space.items), (0, 0))

    def test_a_queue_is_no_key_but_is_found(self) -> None:
        client = self.client()
        client.feed(q(Opcode.QUEUE_PUSH, b"/q", b"1"))
        self.assert_answer(client, many(Opcode.CHECK, b"/q"), b"\0")
        self.assert_answer(client, many(Opcode.WAIT, b"/q"), b"\0")
        self.assert_answer(client, q(Opcode.GETNUMKEYS), i64(0))
        self.assertEqual(sent(client.feed(q(Opcode.LIST_KEYS))), i64(0))
        self.assert_answer(client, q(Opcode.DELETE_KEY, b"/q"), i64(0))
        client.feed(q(Opcode.QUEUE_POP, b"/q"))
        self.assert_answer(client, many(Opcode.CHECK, b"/q"), b"\1")

    def test_a_queue_that_is_there_is_not_waited_for_beside_a_key_that_is_not(self) -> None:
        client, setter = self.client(), self.client()
        client.feed(q(Opcode.QUEUE_PUSH, b"/q", b"1") + many(Opcode.WAIT, b"/q", b"/k"))
        self.assertEqual(setter.feed(q(Opcode.SET, b"/k", b"")), StoreEffects([], [(client, b"\0")]))

    def test_each_item_wakes_the_oldest_who_needs_nothing_else(self) -> None:
        both, first, second, pusher = (self.client() for _ in range(4))
        both.feed(many(Opcode.WAIT, b"/q", b"/k"))
        first.feed(many(Opcode.WAIT, b"/q"))
        second.feed(many(Opcode.WAIT, b"/q"))
        self.assertEqual(pusher.feed(q(Opcode.QUEUE_PUSH, b"/q", b"1")).wakeups, [(first, b"\0")])
        self.assertEqual(pusher.feed(q(Opcode.QUEUE_PUSH, b"/q", b"2")).wakeups, [(second, b"\0")])
        self.assertEqual(pusher.feed(q(Opcode.QUEUE_PUSH, b"/q", b"3")).wakeups, [])
        self.assertEqual(pusher.feed(q(Opcode.SET, b"/k", b"")).wakeups, [(both, b"\0")])

    def test_an_item_that_nobody_can_take_alone_wakes_nobody(self) -> None:
        client = self.client()
        client.feed(many(Opcode.WAIT, b"/q", b"/k"))
        self.assertEqual(self.client().feed(q(Opcode.QUEUE_PUSH, b"/q", b"1")).wakeups, [])
        self.assertEqual([each.key for each in self.space.waiting()], ["/k"])


class TestCaps(StoreCase):
    """A breach closes that client alone, and changes nothing."""

    limits = SMALL

    def test_a_length_over_its_cap_is_refused_before_anything_of_it_has_come(self) -> None:
        for asked, why in (
            (b"\x03" + struct.pack("<Q", 17), "a key of 17 bytes is over the limit of 16"),
            (b"\x01" + text(b"/k") + struct.pack("<Q", 65), "a value of 65 bytes is over the limit of 64"),
            (
                b"\x02" + text(b"/k") + text(b"") + struct.pack("<Q", 1 << 63),
                f"a value of {1 << 63} bytes is over the limit of 64",
            ),
            (many(Opcode.CHECK, count=5), "5 keys in one query are over the limit of 4"),
            (many(Opcode.WAIT, count=(1 << 64) - 1), f"{(1 << 64) - 1} keys in one query are over the limit of 4"),
            (many(Opcode.MULTI_SET, b"/k", b"x" * 65, count=1), "a value of 65 bytes is over the limit of 64"),
        ):
            with self.subTest(why):
                self.assert_closed(self.client(), asked, why)
        self.assertEqual((self.space.stored, self.space.held, self.space.key_count), (0, 0, 0))

    def test_what_is_just_under_every_cap_is_taken(self) -> None:
        client = self.client()
        self.assert_answer(client, q(Opcode.SET, b"k" * 16, b"v" * 64) + many(Opcode.CHECK, *[b"k" * 16] * 4), b"\0")

    def test_bytes_over_the_total_are_refused(self) -> None:
        self.client().feed(many(Opcode.MULTI_SET, b"/a", b"x" * 64, b"/b", b"x" * 64, b"/c", b"x" * 62))
        self.assertEqual(self.space.stored, 196)
        for asked, size in (
            (q(Opcode.SET, b"/d", b"xyz"), 5),
            (q(Opcode.APPEND, b"/d", b"xyz"), 5),
            (q(Opcode.ADD, b"/d", 100), 5),
            (q(Opcode.BARRIER, b"/long", -100), 6),
            (q(Opcode.BARRIER, b"/long", 2), WAIT_BYTES + 5 + 6),
            (q(Opcode.COMPARE_SET, b"/d", b"", b"xyz"), 5),
            (q(Opcode.QUEUE_PUSH, b"/d", b"xyz"), 5),
            (many(Opcode.MULTI_SET, b"/a", b"x" * 61, b"/d", b"x" * 20), 19),
            (many(Opcode.WAIT, b"/long"), WAIT_BYTES + 5),
        ):
            with self.subTest(asked[:1]):
                why = f"{size} bytes more, beside 196, are over the store's limit of 200 (--store-max-bytes)"
                self.assert_closed(self.client(), asked, why)
                self.assertEqual((self.space.stored, self.space.held, self.space.key_count), (196, 0, 3))

    def test_a_value_may_not_grow_over_the_total(self) -> None:
        self.client().feed(many(Opcode.MULTI_SET, b"/a", b"x" * 64, b"/b", b"x" * 64, b"/c", b"x" * 58))
        self.assertEqual(self.space.stored, 192)
        self.client().feed(q(Opcode.SET, b"/a", b"x" * 55) + q(Opcode.SET, b"/d", b"x" * 7))
        self.assertEqual(self.space.stored, 192)
        why = "9 bytes more, beside 192, are over the store's limit of 200 (--store-max-bytes)"
        self.assert_closed(self.client(), q(Opcode.APPEND, b"/a", b"123456789"), why)
        self.assertEqual(self.space.get(b"/a"), b"x" * 55)

    def test_what_makes_nothing_larger_is_taken_when_all_is_full(self) -> None:
        client = self.client()
        client.feed(many(Opcode.MULTI_SET, b"/a", b"x" * 64, b"/b", b"x" * 64, b"/c", b"x" * 63, b"/", b"10"))
        self.assertEqual(self.space.stored, 200)
        self.assert_answer(client, q(Opcode.SET, b"/a", b"y" * 64) + q(Opcode.ADD, b"/", -1), i64(9))
        self.assert_answer(client, many(Opcode.MULTI_SET, b"/b", b"", b"/c", b"") + q(Opcode.GETNUMKEYS), i64(4))

    def test_keys_over_the_total_are_refused(self) -> None:
        client = self.client()
        client.feed(q(Opcode.QUEUE_PUSH, b"/q", b"") * 3)
        client.feed(q(Opcode.SET, b"/a", b"") + q(Opcode.SET, b"/b", b"") + q(Opcode.SET, b"/c", b""))
        for asked in (
            q(Opcode.SET, b"/d", b""),
            q(Opcode.QUEUE_PUSH, b"/q", b""),
            many(Opcode.MULTI_SET, b"/a", b"1", b"/d", b""),
            q(Opcode.BARRIER, b"/d", -2),
        ):
            with self.subTest(asked[:1]):
                self.assert_closed(self.client(), asked, "the store holds all of the 6 keys it may (--store-max-keys)")
        self.assertEqual((self.space.key_count, self.space.items, self.space.get(b"/a")), (3, 3, b""))
        self.assertFalse(client.gone)
        self.assert_answer(self.client(), q(Opcode.SET, b"/c", b"new") + many(Opcode.WAIT, b"/c", b"/q"), b"\0")

    def test_a_value_may_not_grow_over_its_cap(self) -> None:
        client = self.client()
        client.feed(q(Opcode.SET, b"/k", b"x" * 60) + q(Opcode.APPEND, b"/k", b"1234"))
        self.assert_closed(
            client, q(Opcode.APPEND, b"/k", b"5"), "APPEND makes the value of '/k' 65 bytes, over the limit of 64"
        )
        self.assertEqual(self.space.get(b"/k"), b"x" * 60 + b"1234")

    def test_unfinished_queries_count_and_leave_with_their_connection(self) -> None:
        client, other = self.client(), self.client()
        pairs = many(Opcode.MULTI_SET, b"/a", b"x" * 64, b"/b", b"x" * 64, count=4)
        self.assertEqual(client.feed(pairs), StoreEffects())
        held = self.space.held
        self.assertEqual(held, len(pairs) - 1)
        self.assert_closed(
            other, pairs, f"{held} bytes more, beside {held}, are over the store's limit of 200 (--store-max-bytes)"
        )
        self.assertEqual(self.space.held, held)
        client.lost()
        self.assertEqual((self.space.held, self.space.stored), (0, 0))

    def test_a_client_has_few_waits_at_a_time(self) -> None:
        self.space = KeySpace(lambda: self.now, StoreLimits())
        for asked in (many(Opcode.WAIT, b"/z"), q(Opcode.BARRIER, b"/z", 2)):
            with self.subTest(asked[:1]):
                client = self.client()
                client.feed(many(Opcode.WAIT, b"/a") * MOST_WAITS)
                self.assertFalse(client.gone)
                self.assert_closed(client, asked, "8 queries of it wait, the limit is 8, and it has another")
                self.assertEqual((self.space.held, self.space.key_count), (0, 0))

    def test_waits_count_toward_the_bytes_until_they_end(self) -> None:
        one = WAIT_BYTES + 2
        self.space = KeySpace(lambda: self.now, StoreLimits(total_bytes=2 * one + 4))
        client, setter = self.client(), self.client()
        for _ in range(3):
            client.feed(many(Opcode.WAIT, b"/a", b"/b"))
            self.assertEqual(self.space.held, 2 * one)
            why = f"{one} bytes more, beside {2 * one}, are over the store's limit of {2 * one + 4} (--store-max-bytes)"
            self.assert_closed(self.client(), many(Opcode.WAIT, b"/a"), why)
            setter.feed(many(Opcode.MULTI_SET, b"/a", b"", b"/b", b""))
            setter.feed(q(Opcode.DELETE_KEY, b"/a") + q(Opcode.DELETE_KEY, b"/b"))
        self.assertFalse(client.gone)
        self.assertEqual((self.space.stored, self.space.held), (0, 0))

    def test_a_barrier_needs_room_for_its_wait_and_its_count_together(self) -> None:
        size = WAIT_BYTES + len("/d") + len("/d1")
        for total, waits in ((size, True), (size - 1, False)):
            self.space = KeySpace(lambda: self.now, StoreLimits(total_bytes=total))
            self.assertEqual(self.client().feed(q(Opcode.BARRIER, b"/d", 2)).close is None, waits)
            self.assertEqual((bool(self.space.held), self.space.key_count), (waits, int(waits)))

    def test_the_others_go_on_after_a_breach(self) -> None:
        self.space = KeySpace(lambda: self.now, StoreLimits())
        waiter = self.client()
        waiter.feed(many(Opcode.WAIT, b"/k"))
        outcome = self.client().feed(q(Opcode.SET, b"/k", b"1") + b"\xff")
        self.assertEqual(outcome.wakeups, [(waiter, b"\0")])
        self.assertIsNotNone(outcome.close)
        self.assert_answer(waiter, q(Opcode.GET, b"/k"), text(b"1"))


class TestBigValues(StoreCase):
    """Eight million bytes cost one copy, and nothing before they have come."""

    def test_a_value_in_segments_is_stored_whole(self) -> None:
        value = bytes(range(256)) * (8 * MIB // 256)
        asked = q(Opcode.SET, b"/k", value) + q(Opcode.GETNUMKEYS)
        for size in (65536, GATHER_BYTES - 1, 1000, len(asked) - 3):
            with self.subTest(size):
                client = self.client()
                answers = [sent(client.feed(asked[at : at + size])) for at in range(0, len(asked), size)]
                self.assertEqual(b"".join(answers), i64(1))
                self.assertTrue(self.space.get(b"/k") == value)

    def test_a_big_value_goes_out_as_the_object_that_is_stored(self) -> None:
        client = self.client()
        client.feed(q(Opcode.SET, b"/k", b"x" * (JOIN_BYTES + 1)))
        replies = client.feed(q(Opcode.GET, b"/k")).replies
        self.assertEqual(replies[0], struct.pack("<Q", JOIN_BYTES + 1))
        self.assertIs(replies[1], self.space.get(b"/k"))

    def test_memory_grows_with_what_has_come_and_not_with_what_was_announced(self) -> None:
        value = b"\x01" + text(b"/k") + struct.pack("<Q", 8 * MIB) + b"x" * 100
        keys = many(Opcode.WAIT, b"/k", count=128 * 1024)
        pairs = many(Opcode.MULTI_SET, b"/k", b"v", count=128 * 1024)
        for asked in (value, keys, pairs):
            client = self.client()
            tracemalloc.start()
            client.feed(asked)
            grown = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            self.assertLess(grown, 8 * 1024)

    def test_a_segment_is_not_copied_again_for_every_one_that_follows(self) -> None:
        client = self.client()
        segments = [bytes(65536) for _ in range(127)]
        client.feed(b"\x01" + text(b"/k") + struct.pack("<Q", 8 * MIB))
        tracemalloc.start()
        for segment in segments:
            client.feed(segment)
        grown = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        self.assertLess(grown, MIB)
        self.assertEqual(self.space.held, 127 * 65536 + len(b"/k") + 16)

    def test_a_value_that_trickles_in_is_not_kept_in_crumbs(self) -> None:
        client = self.client()
        client.feed(b"\x01" + text(b"/k") + struct.pack("<Q", MIB))
        tracemalloc.start()
        for at in range(20_000):
            client.feed(b"%03d" % (at % 1000))
        grown = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        self.assertLess(grown, 90_000)
        self.assertEqual(self.space.held, 60_000 + len(b"/k") + 16)

    def test_replies_stop_until_those_that_are_there_have_left(self) -> None:
        client = self.client()
        client.feed(q(Opcode.SET, b"/k", bytes(MIB)))
        outcome = client.feed(q(Opcode.GET, b"/k") * 3)
        seen = 0
        while outcome.more:
            seen += 1
            self.assertEqual(len(sent(outcome)), 8 + MIB)
            self.assertGreater(self.space.held, 0)
            outcome = client.feed(b"")
        self.assertEqual((seen, len(sent(outcome)), self.space.held), (2, 8 + MIB, 0))

    def test_a_last_query_that_asks_for_much_leaves_nothing_to_be_done(self) -> None:
        client = self.client()
        client.feed(q(Opcode.SET, b"/k", bytes(REPLY_BYTES)))
        self.assertFalse(client.feed(q(Opcode.GET, b"/k")).more)


class TestLists(StoreCase):
    """A list of keys is made as it goes out: a million of them hold nobody up."""

    def all_parts(self, client: StoreSession, asked: bytes) -> list[bytes]:
        """What each feed gave, until nothing is left to be done."""
        outcome = client.feed(asked)
        parts = [sent(outcome)]
        while outcome.more:
            outcome = client.feed(b"")
            parts.append(sent(outcome))
        return parts

    def test_a_long_list_has_the_keys_of_its_moment_in_parts(self) -> None:
        client, other = self.client(), self.client()
        keys = [b"/" + b"%090d" % number for number in range(25_000)]
        self.space.set_all(dict.fromkeys(keys, b""))
        outcome = client.feed(q(Opcode.LIST_KEYS))
        first = sent(outcome)
        self.assertTrue(outcome.more)
        self.assertLess(len(first), 2 * REPLY_BYTES)
        # The names that are still to be sent count, since they are kept for this client alone once they are deleted.
        self.assertGreater(self.space.held, 91 * len(keys))
        other.feed(q(Opcode.SET, b"/new", b"") + q(Opcode.DELETE_KEY, keys[-1]))
        rest = self.all_parts(client, b"")
        self.assertGreater(len(rest), 1)
        self.assertEqual(listed(first + b"".join(rest)), sorted(keys))
        self.assertEqual(self.space.held, 0)
        self.assertEqual(listed(b"".join(self.all_parts(client, q(Opcode.LIST_KEYS)))), sorted([*keys[:-1], b"/new"]))

    def test_what_is_asked_after_it_is_answered_after_it(self) -> None:
        client = self.client()
        self.space.set_all({b"/" + b"%090d" % number: b"" for number in range(4000)})
        parts = self.all_parts(client, q(Opcode.LIST_KEYS) + q(Opcode.GETNUMKEYS))
        self.assertEqual(parts[-1][-8:], i64(4000))
        self.assertEqual(len(b"".join(parts)), 8 + 4000 * 99 + 8)

    def test_more_keys_than_a_query_may_name_are_not_listed(self) -> None:
        self.space = KeySpace(lambda: self.now, StoreLimits(keys_a_query=4))
        self.space.set_all({b"/%d" % number: b"" for number in range(5)})
        why = "LIST_KEYS would name 5 keys, the limit of one query is 4"
        self.assert_closed(self.client(), q(Opcode.LIST_KEYS), why)

    def test_one_key_named_again_and_again_is_answered_as_there_is_room(self) -> None:
        for size in (2000, JOIN_BYTES + 1, 100_000):
            with self.subTest(size):
                client, value = self.client(), bytes(range(250)) * (size // 250) + bytes(size % 250)
                client.feed(q(Opcode.SET, b"/k", value))
                count = 40 * REPLY_BYTES // size
                tracemalloc.start()
                self.addCleanup(tracemalloc.stop)
                outcome = client.feed(many(Opcode.MULTI_GET, *[b"/k"] * count) + q(Opcode.GETNUMKEYS))
                self.assertTrue(outcome.more)
                self.assertGreaterEqual(self.space.held, 2 * count)
                answer = sent(outcome)
                while outcome.more:
                    self.assertLess(tracemalloc.get_traced_memory()[0] - len(answer), 4 * MIB)
                    outcome = client.feed(b"")
                    self.assertLess(len(sent(outcome)), REPLY_BYTES + 32 * JOIN_BYTES + 8)
                    answer += sent(outcome)
                tracemalloc.stop()
                self.assertTrue(answer == text(value) * count + i64(1))
                self.assertEqual(self.space.held, 0)

    def test_a_client_that_is_lost_amid_its_answer_holds_nothing(self) -> None:
        client = self.client()
        client.feed(q(Opcode.SET, b"/k", bytes(1000)))
        client.feed(many(Opcode.MULTI_GET, *[b"/k"] * 10_000))
        self.assertGreater(self.space.held, 20_000)
        client.lost()
        self.assertEqual(self.space.held, 0)


class TestTurns(StoreCase):
    """Many queries at once are answered some at a time, so that others have their turn."""

    def test_queries_of_a_byte_are_answered_some_at_a_time(self) -> None:
        client = self.client()
        outcome = client.feed(q(Opcode.GETNUMKEYS) * (2 * QUERIES_A_FEED + 1))
        for count, more in ((QUERIES_A_FEED, True), (QUERIES_A_FEED, True), (1, False)):
            self.assertEqual((sent(outcome), outcome.more), (i64(0) * count, more))
            outcome = client.feed(b"")
        self.assertEqual(outcome, StoreEffects())

    def test_as_many_as_are_taken_leave_nothing_to_be_done(self) -> None:
        self.assertFalse(self.client().feed(q(Opcode.GETNUMKEYS) * QUERIES_A_FEED).more)

    def test_what_is_left_of_an_unfinished_query_asks_for_no_turn(self) -> None:
        client = self.client()
        outcome = client.feed(q(Opcode.GETNUMKEYS) * QUERIES_A_FEED + q(Opcode.GET, b"/k")[:-1])
        self.assertTrue(outcome.more)
        self.assertEqual(client.feed(b""), StoreEffects())
        self.assert_answer(client, b"k", text(b""))


class TestForPeople(StoreCase):
    """What a page can say of a store."""

    def test_who_waits_for_what_and_since_when(self) -> None:
        for _ in range(4):
            self.client().feed(many(Opcode.WAIT, b"/worker/0/ready"))
            self.now += 10
        self.client().feed(many(Opcode.WAIT, b"/\xff", b"/worker/0/ready"))
        self.now += 1
        self.assertEqual(self.space.waiting(), [Waiting("/worker/0/ready", 5, 41.0), Waiting("/\\xff", 1, 1.0)])
        self.assertEqual(self.space.waiting(1), [Waiting("/worker/0/ready", 5, 41.0)])

    def test_where_the_first_has_given_up_the_next_is_the_first(self) -> None:
        first = self.client()
        first.feed(many(Opcode.WAIT, b"/x"))
        for key in (b"/y", b"/x"):
            self.now += 10
            self.client().feed(many(Opcode.WAIT, key))
        self.assertEqual(self.space.waiting(), [Waiting("/x", 2, 20.0), Waiting("/y", 1, 10.0)])
        first.lost()
        self.assertEqual(self.space.waiting(), [Waiting("/y", 1, 10.0), Waiting("/x", 1, 0.0)])

    def test_a_clock_that_went_back_is_no_negative_time(self) -> None:
        self.client().feed(many(Opcode.WAIT, b"/k"))
        self.now -= 5
        self.assertEqual(self.space.waiting(), [Waiting("/k", 1, 0.0)])

    def test_the_count_of_workers(self) -> None:
        self.assertEqual(self.space.workers, 0)
        for _ in range(3):
            self.client().feed(q(Opcode.ADD, b"init/", 1))
        self.assertEqual(self.space.workers, 3)
        self.client().feed(q(Opcode.SET, b"init/", b"many"))
        self.assertEqual(self.space.workers, 0)

    def test_peers_are_found_in_wakeups(self) -> None:
        client = self.client("the peer")
        client.feed(many(Opcode.WAIT, b"/k"))
        ((woken, _),) = self.client().feed(q(Opcode.SET, b"/k", b"")).wakeups
        self.assertEqual(woken.peer, "the peer")

    def test_a_long_key_is_cut_in_a_reason(self) -> None:
        with self.assertRaises(StoreError) as raised:
            number_of(b"/" + b"k" * 5000, b"x")
        self.assertLess(len(str(raised.exception)), 200)


PARTS = st.binary(max_size=12)
QUERIES = st.one_of(
    st.builds(lambda key, value: q(Opcode.SET, key, value), PARTS, st.binary(max_size=40)),
    st.builds(lambda *parts: q(Opcode.COMPARE_SET, *parts), PARTS, PARTS, PARTS),
    st.builds(lambda key, value: q(Opcode.BARRIER, key, value), PARTS, st.integers(-9, 9)),
    st.builds(lambda keys: many(Opcode.CHECK, *keys), st.lists(PARTS, max_size=6)),
    st.builds(lambda keys: many(Opcode.MULTI_SET, *keys, *keys), st.lists(PARTS, max_size=4)),
    st.just(q(Opcode.LIST_KEYS)),
    st.just(b"\x0dpid!"),
)


class TestReader(unittest.TestCase):
    """A stream is cut into the same queries however it is split."""

    @given(st.lists(QUERIES, max_size=12), st.lists(st.integers(1, 60), min_size=1, max_size=8))
    @settings(max_examples=150, deadline=None, database=None)
    def test_any_split_gives_the_same_queries(self, queries: list[bytes], sizes: list[int]) -> None:
        stream = HELLO + b"".join(queries)
        whole = QueryReader(StoreLimits())
        whole.feed(stream)
        wanted = list(iter(whole.next_query, None))
        self.assertEqual(len(wanted), len(queries) + 1)
        self.assertEqual(whole.held, 0)
        reader, at, turn = QueryReader(StoreLimits()), 0, 0
        found: list[Query] = []
        while at < len(stream):
            size = sizes[turn % len(sizes)]
            reader.feed(stream[at : at + size])
            found += iter(reader.next_query, None)
            self.assertLessEqual(reader.held, at + size)
            at, turn = at + size, turn + 1
        self.assertEqual((found, reader.held), (wanted, 0))

    def test_values_around_the_size_at_which_pieces_are_kept(self) -> None:
        for length in (GATHER_BYTES, GATHER_BYTES + 1):
            value = bytes(length)
            stream = HELLO + q(Opcode.COMPARE_SET, b"/k", value, value) + q(Opcode.QUEUE_PUSH, b"/k", value)
            for split in (14, 24, 25, 32, 33, 34, length, length + 33, length + 41, length + 42, len(stream) - 1):
                with self.subTest(length, split=split):
                    reader = QueryReader(StoreLimits())
                    found = []
                    for piece in (stream[:split], stream[split:]):
                        reader.feed(piece)
                        found += list(iter(reader.next_query, None))[-3:]
                    self.assertEqual([query[0] for query in found], [0, 2, 14])
                    self.assertEqual([len(part) for part in found[1][1]], [2, length, length])
                    self.assertTrue(found[2][1][1] == value)
