"""The rendezvous channel, pumped: the ranks of a world meet through the front door."""

from __future__ import annotations

from typing import Any

from flodl_tw.core.messages import (
    Abort,
    RendezvousHello,
    RendezvousMessage,
    Role,
    RoleGiven,
    Uid,
    decode_rendezvous,
    encode_rendezvous,
)
from flodl_tw.core.run_settings import AfterRun, OnLoss
from flodl_tw.core.wire import RENDEZVOUS_MAGIC, FrameKind, FrameReader, encode_frame
from flodl_tw.testing import ClockedController, FakeDial
from tests.pumped import PumpedTestCase, window

UID = Uid(bytes(range(128)))
TOKEN = bytes(range(16))
OWNERS = {0: "a", 1: "a", 2: "b"}


class RankClient:
    """A rank's side of the rendezvous: messages to bytes and back, with no I/O.  ``salt`` is its envelope's."""

    def __init__(self, salt: bytes, version: int = 4) -> None:
        self.salt = salt
        self.version = version
        self._reader = FrameReader()

    def hello(self, rank: int, host: str, dataset_sig: bytes = bytes(32)) -> bytes:
        """The first bytes of a dial: the channel's magic and the Hello."""
        return RENDEZVOUS_MAGIC + self.frame(RendezvousHello(dataset_sig, rank, host))

    def frame(self, message: RendezvousMessage) -> bytes:
        """Any message as a frame."""
        return encode_rendezvous(self.salt, self.version, message)

    def feed(self, data: bytes) -> list[RendezvousMessage]:
        """The messages that ``data`` completes; each must verify."""
        self._reader.feed(data)
        messages = []
        while (frame := self._reader.next_frame()) is not None:
            if frame.version != self.version or not frame.verifies(self.salt):
                raise AssertionError(f"a frame does not verify, or is not in version {self.version}")
            messages.append(decode_rendezvous(frame.payload))
        return messages


class Rank:
    """A rank that dials the rendezvous."""

    def __init__(self, world: FormedWorld, rank: int, host: str | None = None, *, salt: bytes | None = None) -> None:
        self.talk = RankClient(world.salt if salt is None else salt, world.version)
        self.dial = world.controller.dial(f"10.0.1.{rank + 1}")
        self.dial.send(self.talk.hello(rank, OWNERS[rank] if host is None else host))

    def messages(self) -> list[Any]:
        """What it was sent since the last call."""
        return self.talk.feed(self.dial.received())


class FormedWorld:
    """A controller whose world of three ranks, on hosts a and b, has formed."""

    def __init__(self, version: int = 4, on_loss: OnLoss = OnLoss.ABORT, **options: Any) -> None:
        self.version = version
        settings = window(target_ranks=3, on_loss=on_loss)
        self.controller = ClockedController(settings, native_rendezvous=True, **options)
        self.form()

    def form(self) -> None:
        """Have the hosts join, and take their envelopes."""
        token = self.controller.controller.token
        self.hosts = {
            name: self.controller.dial(address, version=self.version, token=token)
            for name, address in (("a", "10.0.0.1"), ("b", "10.0.0.2"))
        }
        later = {} if self.version == 2 else {"nccl_version": (2, 27, 3)}
        self.hosts["a"].join(host="a", devices=2, **later)
        self.hosts["b"].join(host="b", devices=1, **later)
        self.controller.turn()
        for host in self.hosts.values():
            host.messages()
        envelope = self.hosts["a"].talk.envelope
        assert envelope is not None
        self.salt = bytes.fromhex(envelope["salt"])

    def abort_reason(self, host: str) -> str:
        """The reason of the Abort that the host has got."""
        self.controller.turn()
        (message,) = self.hosts[host].messages()
        assert isinstance(message, Abort)
        return message.reason


class RendezvousTestCase(PumpedTestCase):
    """With what most of these assert."""

    def assert_failed(self, world: FormedWorld, *parts: str) -> None:
        """Both hosts got an Abort with these parts, and the run is failed and over."""
        reason = world.abort_reason("a")
        self.assertEqual(world.abort_reason("b"), reason)
        for part in ("the rendezvous failed", *parts):
            self.assertIn(part, reason)
        self.assertEqual(world.controller.state()["phase"], "failed")
        world.controller.clock.advance(0)
        self.assertTrue(world.controller.controller.run.over)
        self.assertEqual(len(world.controller.front), 0)

    def assert_alone(self, world: FormedWorld, dial: FakeDial) -> None:
        """The dial was closed without a word, and the world goes on."""
        world.controller.turn()
        self.assertTrue(dial.closed)
        self.assertEqual(dial.received(), b"")
        self.assertEqual(world.controller.state()["phase"], "training")


class MeetingTests(RendezvousTestCase):
    """The way that it should go."""

    def test_every_waiting_rank_gets_the_generators_id_in_the_cohorts_version(self) -> None:
        for version in (2, 4):
            world = FormedWorld(version)
            ranks = [Rank(world, rank) for rank in (2, 0, 1)]
            self.assertEqual(ranks[0].messages(), [RoleGiven(Role.WAIT)])
            self.assertEqual(ranks[1].messages(), [RoleGiven(Role.GENERATE)])
            self.assertEqual(ranks[2].messages(), [RoleGiven(Role.WAIT)])
            ranks[1].dial.send(ranks[1].talk.frame(UID))
            self.assertEqual([rank.messages() for rank in ranks], [[UID], [], [UID]], version)
            world.controller.turn()
            self.assertEqual([rank.dial.closed for rank in ranks], [True] * 3, version)
            self.assertEqual(world.controller.state()["phase"], "training")

    def test_a_hello_may_come_in_any_pieces(self) -> None:
        world = FormedWorld()
        Rank(world, 0)
        Rank(world, 1)
        talk = RankClient(world.salt)
        dial = world.controller.dial()
        for byte in talk.hello(2, "b"):
            dial.send(bytes((byte,)))
        self.assertEqual(talk.feed(dial.received()), [RoleGiven(Role.WAIT)])

    def test_a_completed_rendezvous_leaves_no_deadline(self) -> None:
        world = FormedWorld()
        ranks = [Rank(world, rank) for rank in OWNERS]
        ranks[0].dial.send(ranks[0].talk.frame(UID))
        world.controller.clock.advance(1000)
        self.assertEqual(world.controller.state()["phase"], "training")
        self.assertEqual(world.controller.clock.getDelayedCalls(), [])

    def test_a_world_whose_ranks_never_dial_has_no_rendezvous_and_fails_nothing(self) -> None:
        world = FormedWorld()
        world.controller.clock.advance(10_000)
        self.assertEqual(world.controller.state()["phase"], "training")

    def test_a_late_dial_is_closed(self) -> None:
        world = FormedWorld()
        ranks = [Rank(world, rank) for rank in OWNERS]
        ranks[0].dial.send(ranks[0].talk.frame(UID))
        self.assert_alone(world, Rank(world, 1).dial)

    def test_a_waiting_rank_has_no_deadline_of_ours(self) -> None:
        world = FormedWorld()
        first = Rank(world, 0)
        world.controller.clock.advance(119)
        self.assertFalse(first.dial.closed)


class AloneTests(RendezvousTestCase):
    """What condemns one connection and nothing else."""

    def test_each_of_these_is_closed_without_a_word_and_with_one_line(self) -> None:
        world = FormedWorld()
        talk = RankClient(world.salt)
        table = (
            ("noise", RENDEZVOUS_MAGIC + b"\xff" * 40, "frame magic"),
            ("another salt", RENDEZVOUS_MAGIC + RankClient(bytes(16)).hello(0, "a")[4:], "does not verify"),
            ("another version", RankClient(world.salt, 2).hello(0, "a"), "version 2"),
            ("another kind", RENDEZVOUS_MAGIC + encode_frame(world.salt, 4, FrameKind.JOIN, b"\0"), "join frame"),
            ("no message", RENDEZVOUS_MAGIC + encode_frame(world.salt, 4, FrameKind.RENDEZVOUS, b"\x09"), "no rendez"),
            ("a Uid first", RENDEZVOUS_MAGIC + talk.frame(UID), "Uid out of its turn"),
            ("an endless frame", RENDEZVOUS_MAGIC + talk.hello(0, "a")[4:24] + b"\xff\xff\xff\xff", "over the limit"),
            ("a rank of another host", talk.hello(0, "b"), "'b' said it holds rank 0"),
        )
        for number, (what, data, said) in enumerate(table):
            dial = world.controller.dial(f"10.9.9.{number}")
            self.forget()
            dial.send(data)
            self.assert_alone(world, dial)
            lines = [line for line in self.lines() if f"10.9.9.{number}:" in line]
            self.assertEqual((what, len(lines), said in lines[0]), (what, 1, True), lines)
        for rank in OWNERS:
            Rank(world, rank)
        self.assertEqual(world.controller.state()["phase"], "training")

    def test_a_dial_before_a_world_has_formed_is_closed(self) -> None:
        controller = ClockedController(native_rendezvous=True)
        dial = controller.dial()
        dial.send(RankClient(TOKEN).hello(0, "a"))
        controller.turn()
        self.assertTrue(dial.closed)
        self.assertEqual(controller.ends()["rendezvous-early"], 1)

    def test_a_hello_has_thirty_seconds(self) -> None:
        world = FormedWorld()
        dial = world.controller.dial()
        dial.send(RENDEZVOUS_MAGIC + b"\xc4")
        world.controller.clock.advance(29)
        self.assertFalse(dial.closed)
        world.controller.clock.advance(1)
        self.assert_alone(world, dial)

    def test_a_rank_that_talks_out_of_turn_frees_its_slot(self) -> None:
        world = FormedWorld()
        first = Rank(world, 0)
        first.dial.send(first.talk.frame(RendezvousHello(bytes(32), 0, "a")))
        self.assert_alone(world, first.dial)
        for rank in OWNERS:
            Rank(world, rank)
        world.controller.turn()
        self.assertEqual(world.controller.state()["phase"], "training")

    def test_a_slotted_rank_that_vanishes_may_come_again(self) -> None:
        world = FormedWorld()
        for end in (FakeDial.reset, FakeDial.hang_up):
            end(Rank(world, 0).dial)
        others = [Rank(world, 1), Rank(world, 2)]
        self.assertEqual(others[0].messages(), [])
        again = Rank(world, 0)
        self.assertEqual(again.messages(), [RoleGiven(Role.GENERATE)])
        self.assertEqual(others[0].messages(), [RoleGiven(Role.WAIT)])

    def test_a_reconnect_replaces_the_old_connection(self) -> None:
        world = FormedWorld()
        old = Rank(world, 0)
        new = Rank(world, 0)
        world.controller.turn()
        self.assertEqual((old.dial.closed, new.dial.closed), (True, False))
        Rank(world, 1)
        Rank(world, 2)
        self.assertEqual((old.messages(), new.messages()), ([], [RoleGiven(Role.GENERATE)]))


class FailureTests(RendezvousTestCase):
    """What fails the run, with the reason in every host's Abort."""

    def test_a_rank_outside_the_world_fails_it(self) -> None:
        world = FormedWorld()
        Rank(world, 0)
        dial = world.controller.dial()
        dial.send(RankClient(world.salt).hello(3, "b"))
        self.assert_failed(world, "rank 3")

    def test_another_dataset_fails_it(self) -> None:
        world = FormedWorld()
        Rank(world, 0)
        dial = world.controller.dial()
        dial.send(RankClient(world.salt).hello(1, "a", b"\1" * 32))
        self.assert_failed(world, "dataset signature 01010101…", "00000000…")

    def test_a_generator_that_dies_after_its_role_fails_it(self) -> None:
        for end in (FakeDial.reset, FakeDial.half_close):
            world = FormedWorld()
            ranks = [Rank(world, rank) for rank in OWNERS]
            end(ranks[0].dial)
            self.assert_failed(world, "rank 0 of host 'a' left")

    def test_a_generator_that_sends_nothing_fails_it_after_thirty_seconds(self) -> None:
        world = FormedWorld()
        for rank in OWNERS:
            Rank(world, rank)
        world.controller.clock.advance(29)
        world.controller.turn()
        self.assertEqual(world.controller.state()["phase"], "training")
        world.controller.clock.advance(1)
        self.assert_failed(world, "did not in time")

    def test_nobody_new_for_two_minutes_fails_it(self) -> None:
        world = FormedWorld()
        Rank(world, 0)
        world.controller.clock.advance(100)
        Rank(world, 1)
        world.controller.clock.advance(119)
        world.controller.turn()
        self.assertEqual(world.controller.state()["phase"], "training")
        world.controller.clock.advance(1)
        self.assert_failed(world, "2 of 3 ranks", "missing: 2 of 'b'")

    def test_it_fails_the_run_under_continue_too(self) -> None:
        world = FormedWorld(on_loss=OnLoss.CONTINUE)
        dial = world.controller.dial()
        dial.send(RankClient(world.salt).hello(7, "b"))
        self.assert_failed(world, "rank 7")

    def test_a_failed_run_lets_go_of_the_ranks_that_wait(self) -> None:
        world = FormedWorld()
        waiting = Rank(world, 0)
        world.hosts["b"].reset()
        world.controller.turn()
        self.assertEqual(world.controller.state()["phase"], "failed")
        self.assertTrue(waiting.dial.closed)
        world.controller.clock.advance(1000)
        self.assertEqual(world.controller.clock.getDelayedCalls(), [])


class OverTests(RendezvousTestCase):
    """A run that is over has no rendezvous."""

    def test_a_dial_after_the_end_is_closed_and_given_nothing(self) -> None:
        for ending in ("failed", "done"):
            world = FormedWorld()
            if ending == "failed":
                world.hosts["b"].reset()
            for dial in world.hosts.values():
                if not dial.closed:
                    dial.send(b"".join(dial.talk.exited(rank) for rank in dial.talk.ranks))
                    dial.hang_up()
            world.controller.turn()
            self.assertEqual(world.controller.state()["phase"], ending if ending == "failed" else "done")
            for rank in OWNERS:
                late = Rank(world, rank)
                world.controller.turn()
                self.assertEqual((late.dial.closed, late.dial.received()), (True, b""), ending)

    def test_a_dial_without_its_hello_is_closed_when_the_run_ends(self) -> None:
        world = FormedWorld(token=TOKEN, after_run=AfterRun.REARM)
        gathering = Rank(world, 0)
        silent = world.controller.dial()
        silent.send(RENDEZVOUS_MAGIC + b"\xc4")
        world.hosts["b"].reset()
        world.controller.turn()
        self.assertEqual((gathering.dial.closed, silent.closed), (True, True))
        self.assertEqual(world.controller.front.pending.__len__(), 0)


class IsolationTests(RendezvousTestCase):
    """Nothing of one world reaches the next."""

    def rearmed(self) -> tuple[FormedWorld, bytes]:
        """A second world under the same token, and the salt of the first."""
        world = FormedWorld(token=TOKEN, after_run=AfterRun.REARM)
        old_salt = world.salt
        for dial in world.hosts.values():
            dial.send(b"".join(dial.talk.exited(rank) for rank in dial.talk.ranks))
            dial.hang_up()
        world.controller.turn()
        self.assertEqual(world.controller.state()["phase"], "waiting")
        world.form()
        return world, old_salt

    def test_a_rank_of_the_run_before_is_refused_under_the_same_token(self) -> None:
        world, old_salt = self.rearmed()
        self.assertNotEqual(old_salt, world.salt)
        self.assertNotEqual(TOKEN, world.salt)
        self.assert_alone(world, Rank(world, 0, salt=old_salt).dial)

    def test_the_token_itself_is_no_world_s_salt(self) -> None:
        world, _ = self.rearmed()
        self.assert_alone(world, Rank(world, 0, salt=TOKEN).dial)

    def test_a_connection_of_the_run_before_cannot_touch_this_one(self) -> None:
        world = FormedWorld(token=TOKEN, after_run=AfterRun.REARM)
        half = world.controller.dial()
        talk = RankClient(world.salt)
        half.send(talk.hello(0, "a")[:20])
        for dial in world.hosts.values():
            dial.send(b"".join(dial.talk.exited(rank) for rank in dial.talk.ranks))
            dial.hang_up()
        world.controller.turn()
        world.form()
        half.send(talk.hello(0, "a")[20:])
        world.controller.clock.advance(1000)
        world.controller.turn()
        self.assertEqual(world.controller.state()["phase"], "training")
        self.assertTrue(half.closed)
