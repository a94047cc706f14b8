"""The store under any order of queries, cuts and losses, beside a model that is plain dicts and lists."""

from __future__ import annotations

import unittest

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from flodl_tw.core.store.keys import KeySpace
from flodl_tw.core.store.session import MOST_WAITS, StoreSession
from flodl_tw.core.store.waits import WAIT_BYTES
from flodl_tw.core.store.wire import Opcode
from tests.core.store.queries import HELLO, i64, listed, many, q, sent, text

CLIENTS = st.integers(0, 3)
KEYS = st.sampled_from((b"/a", b"/bb", b"/ccc", b"/d"))
SOME = st.lists(KEYS, max_size=5)
NUMBERS = st.sampled_from((b"0", b"7", b"-3", b"41"))
VALUES = NUMBERS | st.sampled_from((b"", b"x", b"long value"))
CUTS = st.lists(st.integers(1, 20), max_size=3)


class Machine(RuleBasedStateMachine):
    """Four clients of one key space.

    ``waits`` is the model's, oldest first: who, which keys have not come, and what it counts toward the bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.space = KeySpace(lambda: 0.0)
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, list[bytes]] = {}
        self.waits: list[tuple[int, set[bytes], int]] = []
        self.clients = [self.connected() for _ in range(4)]
        # What the model says that each client is to get in this step.
        self.due = [b""] * 4

    def connected(self) -> StoreSession:
        client = StoreSession(self.space)
        client.feed(HELLO)
        return client

    def step(self, who: int, asked: bytes, cuts: list[int], answer: bytes = b"") -> None:
        """Ask in pieces, and compare what everybody got with what the model says."""
        self.due[who] += answer
        got = [b""] * 4
        for piece in pieces(asked, cuts):
            outcome = self.clients[who].feed(piece)
            assert (outcome.close, outcome.more) == (None, False)
            got[who] += sent(outcome)
            for client, what in outcome.wakeups:
                got[self.clients.index(client)] += what
        assert got == self.due
        self.due = [b""] * 4

    def there(self, key: bytes) -> bool:
        return key in self.values or key in self.queues

    def came(self, key: bytes, for_one: bool = False) -> None:
        for wait in [wait for wait in self.waits if key in wait[1]]:
            wait[1].remove(key)
            if not wait[1]:
                self.waits.remove(wait)
                self.due[wait[0]] += b"\0"
                if for_one:
                    return

    def store(self, key: bytes, value: bytes) -> None:
        self.values[key] = value
        self.came(key)

    def number(self, key: bytes) -> int | None:
        try:
            return int(self.values.get(key, b"0"))
        except ValueError:
            return None

    @rule(who=CLIENTS, key=KEYS, value=VALUES, cuts=CUTS)
    def sets(self, who: int, key: bytes, value: bytes, cuts: list[int]) -> None:
        self.store(key, value)
        self.step(who, q(Opcode.SET, key, value), cuts)

    @rule(who=CLIENTS, pairs=st.dictionaries(KEYS, VALUES), cuts=CUTS)
    def sets_many(self, who: int, pairs: dict[bytes, bytes], cuts: list[int]) -> None:
        for key, value in pairs.items():
            self.store(key, value)
        self.step(who, many(Opcode.MULTI_SET, *(part for pair in pairs.items() for part in pair)), cuts)

    @rule(who=CLIENTS, key=KEYS, expected=VALUES, desired=VALUES, cuts=CUTS)
    def compares(self, who: int, key: bytes, expected: bytes, desired: bytes, cuts: list[int]) -> None:
        answer = self.values.get(key, expected)
        if self.values.get(key, b"") == expected:
            answer = desired
            self.store(key, desired)
        self.step(who, q(Opcode.COMPARE_SET, key, expected, desired), cuts, text(answer))

    @rule(who=CLIENTS, key=KEYS, amount=st.integers(-50, 50), cuts=CUTS)
    def adds(self, who: int, key: bytes, amount: int, cuts: list[int]) -> None:
        number = self.number(key)
        if number is not None:
            self.store(key, b"%d" % (number + amount))
            self.step(who, q(Opcode.ADD, key, amount), cuts, i64(number + amount))

    @rule(who=CLIENTS, key=KEYS, value=VALUES, cuts=CUTS)
    def appends(self, who: int, key: bytes, value: bytes, cuts: list[int]) -> None:
        self.store(key, self.values.get(key, b"") + value)
        self.step(who, q(Opcode.APPEND, key, value), cuts)

    @rule(who=CLIENTS, key=KEYS, cuts=CUTS)
    def deletes(self, who: int, key: bytes, cuts: list[int]) -> None:
        self.step(who, q(Opcode.DELETE_KEY, key), cuts, i64(self.values.pop(key, None) is not None))

    @rule(who=CLIENTS, keys=SOME, cuts=CUTS)
    def gets(self, who: int, keys: list[bytes], cuts: list[int]) -> None:
        answer = b"".join(text(self.values.get(key, b"")) for key in keys)
        self.step(who, many(Opcode.MULTI_GET, *keys), cuts, answer)
        self.step(who, b"".join(q(Opcode.GET, key) for key in keys), cuts, answer)

    @rule(who=CLIENTS, keys=SOME, cuts=CUTS)
    def checks(self, who: int, keys: list[bytes], cuts: list[int]) -> None:
        self.step(who, many(Opcode.CHECK, *keys), cuts, b"\0" if all(map(self.there, keys)) else b"\1")

    def may_wait(self, who: int) -> bool:
        return sum(who == each for each, *_ in self.waits) < MOST_WAITS

    @rule(who=CLIENTS, keys=SOME, cuts=CUTS)
    def waits_for(self, who: int, keys: list[bytes], cuts: list[int]) -> None:
        if not self.may_wait(who):
            return
        missing = {key for key in keys if not self.there(key)}
        if missing:
            self.waits.append((who, missing, waited(*missing)))
        self.step(who, many(Opcode.WAIT, *keys), cuts, b"" if missing else b"\0")

    @rule(who=CLIENTS, key=KEYS, world=st.integers(0, 4), cuts=CUTS)
    def meets(self, who: int, key: bytes, world: int, cuts: list[int]) -> None:
        number = self.number(key)
        if number is None or not self.may_wait(who):
            return
        if number + 1 >= world:
            self.store(key, b"%d" % (number + 1))
            self.due[who] += b"\0"
        else:
            self.values[key] = b"%d" % (number + 1)
            self.waits.append((who, {key}, waited(key)))
        self.step(who, q(Opcode.BARRIER, key, world), cuts)

    @rule(who=CLIENTS)
    def cancels(self, who: int) -> None:
        self.waits = [wait for wait in self.waits if wait[0] != who]
        self.step(who, q(Opcode.CANCEL_WAIT), [], b"\1")

    @rule(who=CLIENTS, key=KEYS, item=VALUES, cuts=CUTS)
    def pushes(self, who: int, key: bytes, item: bytes, cuts: list[int]) -> None:
        self.queues.setdefault(key, []).append(item)
        self.came(key, for_one=True)
        self.step(who, q(Opcode.QUEUE_PUSH, key, item), cuts)

    @rule(who=CLIENTS, key=KEYS, cuts=CUTS)
    def pops(self, who: int, key: bytes, cuts: list[int]) -> None:
        queue = self.queues.get(key, [])
        length = i64(len(queue))
        answer = length + text(queue.pop(0)) if queue else length
        if not queue:
            self.queues.pop(key, None)
        self.step(who, q(Opcode.QUEUE_LEN, key) + q(Opcode.QUEUE_POP, key), cuts, length + answer)

    @rule(who=CLIENTS)
    def lists(self, who: int) -> None:
        assert listed(sent(self.clients[who].feed(q(Opcode.LIST_KEYS)))) == sorted(self.values)
        self.step(who, q(Opcode.GETNUMKEYS), [], i64(len(self.values)))

    @rule(who=CLIENTS, key=KEYS, bad=st.booleans())
    def leaves(self, who: int, key: bytes, bad: bool) -> None:
        """A connection ends within a query or is closed, and another one takes its place."""
        self.waits = [wait for wait in self.waits if wait[0] != who]
        left = self.clients[who].feed(b"\xff" if bad else q(Opcode.SET, key, b"never stored")[:-1])
        assert (left.close is not None) == bad
        self.clients[who].lost()
        self.clients[who] = self.connected()

    @invariant()
    def what_is_counted_is_what_is_there(self) -> None:
        queued = sum(len(key) + sum(map(len, items)) for key, items in self.queues.items())
        assert self.space.stored == queued + sum(len(key) + len(value) for key, value in self.values.items())
        assert self.space.items == sum(map(len, self.queues.values()))
        named = set[bytes]().union(*(missing for _, missing, _ in self.waits))
        assert self.space.held == sum(size for *_, size in self.waits)
        counted = {each.key: each.clients for each in self.space.waiting()}
        assert counted == {key.decode(): sum(key in missing for _, missing, _ in self.waits) for key in named}


def waited(*keys: bytes) -> int:
    """What a wait for these counts."""
    return sum(len(key) + WAIT_BYTES for key in keys)


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    """A stream in pieces of these sizes, and the rest."""
    found, at = [], 0
    for cut in cuts:
        found.append(stream[at : at + cut])
        at += cut
    return [*found, stream[at:]]


STREAMS = st.lists(
    st.one_of(
        st.builds(lambda key, value: q(Opcode.SET, key, value), KEYS, NUMBERS),
        st.builds(lambda key: q(Opcode.ADD, key, 1), KEYS),
        st.builds(lambda key: q(Opcode.GET, key), KEYS),
        st.builds(lambda key: q(Opcode.DELETE_KEY, key), KEYS),
        st.builds(lambda keys: many(Opcode.WAIT, *keys), SOME),
        st.builds(lambda key, value: q(Opcode.QUEUE_PUSH, key, value), KEYS, NUMBERS),
        st.builds(lambda key: q(Opcode.QUEUE_POP, key), KEYS),
        st.builds(lambda key: q(Opcode.BARRIER, key, 3), KEYS),
        st.just(q(Opcode.CANCEL_WAIT)),
    ),
    max_size=8,
)
TURNS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60)), max_size=40)


class TestStoreMachine(unittest.TestCase):
    """Trial finds a machine's promises through this; ``Machine.TestCase`` has no method that it looks for."""

    def test_any_order_of_queries_and_losses_keeps_the_promises(self) -> None:
        modest = settings(max_examples=50, stateful_step_count=25, deadline=None, database=None)
        run_state_machine_as_test(Machine, settings=modest)

    @given(st.lists(STREAMS, min_size=3, max_size=3), TURNS)
    @settings(max_examples=80, deadline=None, database=None)
    def test_interleaved_streams_are_answered_as_if_each_query_came_at_once(
        self, streams: list[list[bytes]], turns: list[tuple[int, int]]
    ) -> None:
        cut, whole = Crowd(len(streams)), Crowd(len(streams))
        unread = [b"".join(stream) for stream in streams]
        unfed = [list(stream) for stream in streams]
        passed = [0] * len(streams)
        for who, most in [*turns, *enumerate(map(len, unread))]:
            size = min(most, len(unread[who]))
            cut.feed(who, unread[who][:size])
            unread[who] = unread[who][size:]
            passed[who] += size
            while unfed[who] and passed[who] >= len(unfed[who][0]):
                passed[who] -= len(unfed[who][0])
                whole.feed(who, unfed[who].pop(0))
        self.assertEqual(cut.got, whole.got)


class Crowd:
    """Clients of one key space, and all that each has got."""

    def __init__(self, size: int) -> None:
        space = KeySpace(lambda: 0.0)
        self.clients = [StoreSession(space, who) for who in range(size)]
        self.got = [b""] * size
        for who in range(size):
            self.feed(who, HELLO)

    def feed(self, who: int, piece: bytes) -> None:
        outcome = self.clients[who].feed(piece)
        self.got[who] += sent(outcome)
        for client, what in outcome.wakeups:
            assert isinstance(client.peer, int)
            self.got[client.peer] += what
