"""The rendezvous as events and effects: who gets the communicator's id, and what fails it."""

from __future__ import annotations

import unittest
from itertools import permutations

from flodl_tw.core.facts import Offer
from flodl_tw.core.ledger import Ledger, Member
from flodl_tw.core.messages import Hello, RendezvousHello, Role, RoleGiven, Uid
from flodl_tw.core.rendezvous import (
    Close,
    Complete,
    Effect,
    Fail,
    Rendezvous,
    RendezvousState,
    Send,
    StartTimer,
    Timer,
)

SIG = bytes(range(32))
UID = Uid(bytes(range(128)))


def world(*hosts: tuple[str, int]) -> list[tuple[Member, range]]:
    """Members with their ranks, in the order of admission."""
    ledger = Ledger(nccl=False)
    for name, devices in hosts:
        ledger.enter(Offer(Hello(name, bytes(range(devices)), (), "", SIG), 4, "10.0.0.1"), 0.0)
    return list(ledger.roster())


def hello(rank: int, host: str, sig: bytes = SIG) -> RendezvousHello:
    return RendezvousHello(sig, rank, host)


THREE = (("a", 2), ("b", 1))
OWNERS = {0: "a", 1: "a", 2: "b"}


def gathered(own_host: str = "elsewhere") -> Rendezvous:
    """A rendezvous of three ranks that have all dialed; a rank's peer is its number."""
    meeting = Rendezvous(world(*THREE), own_host)
    for rank, host in OWNERS.items():
        meeting.hello(rank, hello(rank, host))
    assert meeting.state is RendezvousState.GENERATING
    return meeting


class RendezvousTestCase(unittest.TestCase):
    """With the assertion that most of these need."""

    def failed(self, effects: list[Effect], *parts: str) -> None:
        """The last effect fails the run, and its reason has these parts."""
        self.assertIsInstance(effects[-1], Fail)
        assert isinstance(effects[-1], Fail)
        for part in ("the rendezvous failed: ", *parts):
            self.assertIn(part, effects[-1].why)


class MeetingTests(RendezvousTestCase):
    """The way that it should go."""

    def test_three_ranks_meet_in_every_order(self) -> None:
        for order in permutations(OWNERS):
            with self.subTest(order=order):
                meeting = Rendezvous(world(*THREE), "elsewhere")
                first, second, third = order
                self.assertEqual(meeting.hello(first, hello(first, OWNERS[first])), [StartTimer(Timer.QUIET)])
                self.assertEqual(meeting.hello(second, hello(second, OWNERS[second])), [StartTimer(Timer.QUIET)])
                self.assertEqual(meeting.missing, [third])
                self.assertEqual(
                    meeting.hello(third, hello(third, OWNERS[third])),
                    [
                        *(Send(rank, RoleGiven(Role.GENERATE if rank == 0 else Role.WAIT)) for rank in order),
                        StartTimer(Timer.UID),
                    ],
                )
                effects = meeting.uid(0, UID)
                self.assertEqual(effects[-1], Complete())
                self.assertCountEqual(effects[:-1], [Send(1, UID), Send(2, UID), Close(0), Close(1), Close(2)])
                for rank in (1, 2):
                    self.assertLess(effects.index(Send(rank, UID)), effects.index(Close(rank)))
                self.assertEqual(meeting.state, RendezvousState.COMPLETE)

    def test_the_first_rank_of_this_machine_generates_if_it_is_a_member(self) -> None:
        for own_host, generator in (("a", 0), ("b", 2), ("c", 0), ("A", 0)):
            with self.subTest(own_host):
                meeting = Rendezvous(world(*THREE), own_host)
                effects = [effect for rank, host in OWNERS.items() for effect in meeting.hello(rank, hello(rank, host))]
                roles = [effect for effect in effects if isinstance(effect, Send)]
                self.assertEqual([role.peer for role in roles if role.message == RoleGiven(Role.GENERATE)], [generator])
                self.assertEqual(len(roles), 3)

    def test_a_world_of_one_rank_generates_for_itself(self) -> None:
        meeting = Rendezvous(world(("a", 1)), "a")
        self.assertIn(Send("peer", RoleGiven(Role.GENERATE)), meeting.hello("peer", hello(0, "a")))
        self.assertEqual(meeting.uid("peer", UID), [Close("peer"), Complete()])

    def test_the_peers_may_leave_once_it_is_complete(self) -> None:
        meeting = gathered()
        meeting.uid(0, UID)
        for rank in OWNERS:
            self.assertEqual(meeting.ended(rank), [])
        self.assertEqual(meeting.state, RendezvousState.COMPLETE)


class ReconnectTests(RendezvousTestCase):
    """Until roles go out, a rank may come again."""

    def test_a_second_hello_of_a_rank_replaces_its_connection(self) -> None:
        meeting = Rendezvous(world(*THREE), "elsewhere")
        meeting.hello("old", hello(0, "a"))
        (close,) = meeting.hello("new", hello(0, "a"))
        self.assertIsInstance(close, Close)
        self.assertEqual((close.peer, "dialed again" in (close.why or "")), ("old", True))
        self.assertEqual(meeting.ended("old"), [], "the old connection's end frees nothing")
        meeting.hello(1, hello(1, "a"))
        effects = meeting.hello(2, hello(2, "b"))
        self.assertIn(Send("new", RoleGiven(Role.GENERATE)), effects)
        self.assertNotIn(Send("old", RoleGiven(Role.GENERATE)), effects)

    def test_a_slotted_rank_that_vanishes_frees_its_slot(self) -> None:
        meeting = Rendezvous(world(*THREE), "elsewhere")
        meeting.hello(0, hello(0, "a"))
        meeting.hello(1, hello(1, "a"))
        self.assertEqual(meeting.ended(1), [])
        self.assertEqual(meeting.missing, [1, 2])
        meeting.hello(2, hello(2, "b"))
        self.assertEqual(meeting.state, RendezvousState.GATHERING, "a vanished rank must not be given a role")
        effects = meeting.hello("again", hello(1, "a"))
        self.assertIn(Send("again", RoleGiven(Role.WAIT)), effects)

    def test_a_rank_that_comes_and_goes_buys_no_time(self) -> None:
        meeting = Rendezvous(world(*THREE), "elsewhere")
        self.assertEqual(meeting.hello("x", hello(0, "a")), [StartTimer(Timer.QUIET)])
        meeting.ended("x")
        self.assertEqual(meeting.hello("y", hello(0, "a")), [])

    def test_a_stranger_s_end_is_nothing(self) -> None:
        self.assertEqual(Rendezvous(world(*THREE), "").ended("stranger"), [])
        self.assertEqual(gathered().ended("stranger"), [])


class FailureTests(RendezvousTestCase):
    """What fails the run, and what condemns one connection alone."""

    def test_a_rank_outside_the_world_fails_it(self) -> None:
        meeting = Rendezvous(world(*THREE), "")
        meeting.hello(0, hello(0, "a"))
        effects = meeting.hello("bad", hello(3, "b"))
        self.failed(effects, "rank 3", "3 ranks")
        self.assertEqual([effect for effect in effects if isinstance(effect, Close)], [Close(0), Close("bad")])
        self.assertEqual(meeting.state, RendezvousState.FAILED)

    def test_another_dataset_than_the_first_one_s_fails_it(self) -> None:
        meeting = Rendezvous(world(*THREE), "")
        meeting.hello(2, hello(2, "b", bytes(32)))
        self.failed(meeting.hello(0, hello(0, "a")), "rank 0", "'a'", "00010203…", "rank 2", "00000000…")

    def test_a_host_that_does_not_own_the_rank_is_refused_alone(self) -> None:
        meeting = Rendezvous(world(*THREE), "")
        for host in ("b", "A", "", "c"):
            with self.subTest(host):
                (close,) = meeting.hello("bad", hello(0, host))
                self.assertEqual(close.peer, "bad")
                self.assertIn(repr(host), close.why or "")
                self.assertIn("'a'", close.why or "")
        self.assertEqual(meeting.missing, [0, 1, 2])
        self.assertEqual(meeting.state, RendezvousState.GATHERING)

    def test_a_refused_host_does_not_set_the_dataset(self) -> None:
        meeting = Rendezvous(world(*THREE), "")
        meeting.hello("bad", hello(0, "b", bytes(32)))
        self.assertEqual(meeting.hello(0, hello(0, "a")), [StartTimer(Timer.QUIET)])

    def test_a_rank_that_leaves_between_its_role_and_its_id_fails_it(self) -> None:
        for rank, host in OWNERS.items():
            with self.subTest(rank=rank):
                meeting = gathered()
                effects = meeting.ended(rank)
                self.failed(effects, f"rank {rank} of host {host!r} left before it had the communicator's id")
                self.assertNotIn(Close(rank), effects)

    def test_a_generator_that_sends_nothing_fails_it(self) -> None:
        self.failed(gathered().timed_out(), "rank 0 of host 'a'", "did not in time")

    def test_nobody_new_for_too_long_fails_it_with_who_is_missing(self) -> None:
        meeting = Rendezvous(world(*THREE), "")
        meeting.hello(1, hello(1, "a"))
        self.failed(meeting.timed_out(), "1 of 3 ranks", "missing: 0 of 'a', 2 of 'b'")

    def test_many_missing_ranks_are_counted_beyond_the_first_eight(self) -> None:
        meeting = Rendezvous(world(("a", 12)), "")
        meeting.hello(0, hello(0, "a"))
        self.failed(meeting.timed_out(), "8 of 'a' and 3 more")

    def test_an_id_from_another_than_the_generator_breaks_the_rule(self) -> None:
        meeting = gathered()
        effects = meeting.uid(1, UID)
        self.assertEqual((effects[0].peer, "nobody asked" in (effects[0].why or "")), (1, True))
        self.failed(effects, "rank 1 of host 'a'")

    def test_an_id_before_the_roles_costs_its_sender_its_slot(self) -> None:
        meeting = Rendezvous(world(*THREE), "")
        meeting.hello(0, hello(0, "a"))
        (close,) = meeting.uid(0, UID)
        self.assertEqual(close.peer, 0)
        self.assertEqual(meeting.missing, [0, 1, 2])
        self.assertEqual(meeting.state, RendezvousState.GATHERING)

    def test_a_shown_name_is_cut(self) -> None:
        (close,) = Rendezvous(world(*THREE), "").hello("bad", hello(0, "\x01" * 60000))
        self.assertLess(len(close.why or ""), 1000)

    def test_a_later_dial_is_closed(self) -> None:
        generating, complete, failed, over = gathered(), gathered(), gathered(), Rendezvous(world(*THREE), "")
        complete.uid(0, UID)
        failed.ended(1)
        over.hello(0, hello(0, "a"))
        over.end()
        for meeting in (generating, complete, failed, over):
            before = meeting.state
            with self.subTest(before):
                (close,) = meeting.hello("late", hello(0, "a"))
                self.assertEqual(close.peer, "late")
                self.assertIn(before.value, close.why or "")
                self.assertIs(meeting.state, before)
