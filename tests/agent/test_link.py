"""The agent's end of a join connection: events in order, faults that close it, and an end that always comes."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import CancelledError, Deferred, TimeoutError  # noqa: A004  Twisted's own

from flodl_tw.agent.link import HEARTBEAT_SECS, Event, JoinLink, LinkEnded, LinkFactory
from flodl_tw.core.messages import Abort, Accept, JoinMessage, RankExited, Reject, WorldFormed, encode_join
from flodl_tw.core.reports import RankError, report_payload
from flodl_tw.core.wire import JOIN_MAGIC, FrameKind, encode_frame
from flodl_tw.limits import CLOSE_GRACE, Limits
from flodl_tw.testing import ClockedController, FakeDial, make_hello
from tests.agent.links import AgentTestCase, LinkTransport, done, lost
from tests.pumped import TOKEN, PumpedTestCase, window

ACCEPT = Accept((0,), None, 600)
WORLD = WorldFormed("7b7d", None)
ABORT = Abort("over")
BOOM = RankError("ValueError", "boom", "")
REJECT = Reject("window-closed: late")


def frame(message: JoinMessage) -> bytes:
    """As a controller sends it."""
    return encode_join(TOKEN, 4, message)


class LinkTestCase(AgentTestCase):
    """A link whose controller is the test."""

    def setUp(self) -> None:
        super().setUp()
        self.hello = make_hello("gpu-a")
        self.link = JoinLink(self.reactor, Limits(), self.hello, TOKEN)
        self.transport = self.connect()

    def connect(self, *, reads: bool = True) -> LinkTransport:
        transport = LinkTransport(self.reactor, None, reads=reads)
        self.addCleanup(transport.handle.close)
        transport.protocol = self.link
        self.link.makeConnection(transport)
        return transport

    def receive(self, *messages: JoinMessage) -> None:
        """What the controller sent arrives, in one segment."""
        self.link.dataReceived(b"".join(map(frame, messages)))

    def taken(self, waiting: Deferred[Event]) -> Event:
        return self.successResultOf(waiting)

    def queued(self) -> list[Event]:
        """All that happened and was not taken."""
        events: list[Event] = []
        self.link.deliver_to(events.append)
        return events


class TestHello(LinkTestCase):
    """The first bytes."""

    def test_nothing_is_said_before_the_greeting(self) -> None:
        self.assertEqual(self.transport.value(), b"")
        self.link.greet()
        self.assertEqual(self.transport.value(), JOIN_MAGIC + frame(self.hello))

    def test_a_factory_makes_the_link_and_logs_nothing(self) -> None:
        factory = LinkFactory(lambda: self.link)
        self.assertIs(factory.buildProtocol(None), self.link)
        self.assertFalse(factory.noisy)


class TestEvents(LinkTestCase):
    """What happens, in order."""

    def test_what_came_before_it_was_asked_for_waits(self) -> None:
        self.receive(ACCEPT, WORLD)
        self.assertEqual(self.taken(self.link.next(30)), ACCEPT)
        self.assertEqual(self.taken(self.link.next(30)), WORLD)
        self.assertNoResult(waiting := self.link.next(30))
        self.receive(ABORT)
        self.assertEqual(self.taken(waiting), ABORT)
        self.assertEqual(self.timers(), [])

    def test_a_wait_has_its_deadline_and_what_comes_later_is_kept(self) -> None:
        waiting = self.link.next(30)
        self.reactor.advance(29.9)
        self.assertNoResult(waiting)
        self.reactor.advance(0.1)
        self.failureResultOf(waiting, TimeoutError)
        self.assertEqual(self.timers(), [])
        self.receive(ACCEPT)
        self.assertEqual(self.taken(self.link.next(30)), ACCEPT)

    def test_a_wait_that_is_given_up_takes_nothing_with_it(self) -> None:
        waiting = self.link.next(30)
        waiting.cancel()
        self.failureResultOf(waiting, CancelledError)
        self.assertEqual(self.timers(), [])
        self.receive(ACCEPT)
        self.assertEqual(self.queued(), [ACCEPT])

    def test_a_listener_gets_what_waits_first_and_then_each_at_once(self) -> None:
        self.receive(ACCEPT, WORLD)
        events = self.queued()
        self.assertEqual(events, [ACCEPT, WORLD])
        self.receive(ABORT)
        self.transport.lose(done())
        self.assertEqual(events, [ACCEPT, WORLD, ABORT, LinkEnded("closed")])

    def test_byte_by_byte_is_the_same_as_at_once(self) -> None:
        for byte in b"".join(map(frame, (ACCEPT, WORLD, ABORT))):
            self.link.dataReceived(bytes((byte,)))
        self.assertEqual(self.queued(), [ACCEPT, WORLD, ABORT])

    def test_a_reject_and_the_close_after_it_are_two_events(self) -> None:
        waiting = self.link.next(30)
        self.receive(REJECT)
        self.transport.lose(done())
        self.assertEqual(self.taken(waiting), REJECT)
        self.assertEqual(self.taken(self.link.next(30)), LinkEnded("closed"))
        self.assertTrue(self.link.ended)
        self.successResultOf(self.link.gone)

    def test_the_end_says_whether_the_peer_closed_it(self) -> None:
        self.transport.lose(lost())
        self.assertEqual(self.queued(), [LinkEnded("lost")])

    def test_an_end_wakes_who_waits(self) -> None:
        waiting = self.link.next(30)
        self.transport.lose(done())
        self.assertEqual(self.taken(waiting), LinkEnded("closed"))
        self.assertEqual(self.timers(), [])


class TestFaults(LinkTestCase):
    """A controller that sends what it may not."""

    FAULTS: tuple[tuple[bytes, str], ...] = (
        (b"HTTP", "closed by us, for frame magic is 48545450, not c4170df1"),
        (
            encode_join(bytes(16), 4, ACCEPT),
            "closed by us, for the Accept does not verify: its sender does not hold this run's key",
        ),
        (encode_join(TOKEN, 2, ACCEPT), "closed by us, for the Accept is in version 2, the hello in 4"),
        (
            encode_frame(TOKEN, 4, FrameKind.CONTROL, b""),
            "closed by us, for a frame of kind control came on the join link",
        ),
        (frame(ACCEPT) * 2, "closed by us, for the Accept came after an Accept"),
    )

    def test_a_fault_closes_the_link_and_is_named_at_its_end(self) -> None:
        for data, how in self.FAULTS:
            with self.subTest(how):
                self.setUp()
                waiting = self.link.next(30)
                self.link.dataReceived(data)
                self.assertTrue(self.transport.disconnecting)
                self.assertNoResult(waiting)
                self.reactor.advance(0)
                self.assertEqual(self.taken(waiting), LinkEnded(how, fault=True))
                self.assertEqual(self.timers(), [])

    def test_after_a_fault_nothing_is_believed(self) -> None:
        self.link.dataReceived(b"HTTP")
        self.receive(ACCEPT)
        self.reactor.advance(0)
        (event,) = self.queued()
        self.assertIsInstance(event, LinkEnded)

    def test_what_came_in_an_earlier_segment_was_believed(self) -> None:
        self.receive(ACCEPT)
        self.link.dataReceived(b"HTTP")
        self.reactor.advance(0)
        first, second = self.queued()
        self.assertEqual(first, ACCEPT)
        self.assertIs(getattr(second, "fault", None), True)


class TestEnd(LinkTestCase):
    """Closing, and reports."""

    def test_a_close_is_the_peer_s_to_answer_and_forced_after_the_grace(self) -> None:
        self.transport.handle.close()
        self.link = JoinLink(self.reactor, Limits(), self.hello, TOKEN)
        transport = self.connect(reads=False)
        self.link.close()
        self.link.close()
        self.assertEqual(self.timers(), [CLOSE_GRACE])
        self.reactor.advance(CLOSE_GRACE - 0.1)
        self.assertFalse(transport.aborted)
        self.reactor.advance(0.1)
        self.assertTrue(transport.aborted)
        self.successResultOf(self.link.gone)
        self.assertEqual(self.timers(), [])

    def test_a_close_that_is_answered_is_not_forced(self) -> None:
        self.link.close()
        self.reactor.advance(0)
        self.successResultOf(self.link.gone)
        self.assertEqual((self.timers(), self.transport.aborted), ([], False))
        self.link.close()
        self.assertEqual(self.timers(), [])

    def test_an_exit_is_reported_as_the_accept_named_the_rank(self) -> None:
        self.receive(ACCEPT)
        self.link.report(0, -15)
        self.assertEqual(self.transport.value(), frame(RankExited(0, -15)))

    def test_heartbeats_go_on_until_the_close_and_no_further(self) -> None:
        self.receive(ACCEPT)
        beat = encode_frame(TOKEN, 4, FrameKind.HEARTBEAT, b"")
        self.link.beat()
        self.link.beat()
        self.assertEqual(self.transport.value(), beat)
        self.reactor.advance(HEARTBEAT_SECS)
        self.assertEqual(self.transport.value(), 2 * beat)
        self.transport.lose(lost())
        self.assertEqual(self.timers(), [])
        self.link.beat()
        self.assertEqual(self.timers(), [])

    def test_a_link_that_is_closed_beats_no_more(self) -> None:
        self.receive(ACCEPT)
        self.link.beat()
        self.link.close()
        self.reactor.advance(0)
        self.assertEqual(self.timers(), [])

    def test_a_report_after_the_end_is_harmless(self) -> None:
        self.receive(ACCEPT)
        self.transport.lose(lost())
        self.link.report(0, 1)
        self.link.explain(0, BOOM)
        self.assertEqual(self.transport.value(), b"")

    def test_what_a_rank_died_of_is_a_frame_of_our_own(self) -> None:
        self.receive(ACCEPT)
        self.link.explain(0, BOOM)
        self.link.report(0, 1)
        explained = encode_frame(TOKEN, 4, FrameKind.REPORT, report_payload(0, BOOM))
        self.assertEqual(self.transport.value(), explained + frame(RankExited(0, 1)))

    def test_nobody_needs_to_wait_for_the_end(self) -> None:
        self.link.gone.cancel()
        self.failureResultOf(self.link.gone, CancelledError)
        self.transport.lose(done())
        self.assertTrue(self.link.ended)


class LinkedHost:
    """A link and a controller on one clock, joined in memory."""

    def __init__(self, test: PumpedTestCase, door: ClockedController, token: bytes | None, **hello: Any) -> None:
        self.door = door
        self.dial: FakeDial = door.dial()
        self.link = JoinLink(door.clock, Limits(), make_hello(**hello), token)
        self.transport = LinkTransport(door.clock, None)
        test.addCleanup(self.transport.handle.close)
        self.transport.protocol = self.link
        self.link.makeConnection(self.transport)
        self.link.greet()
        self.pump()

    def pump(self) -> None:
        """All that was written arrives, and each side's close."""
        for _ in range(4):
            sent = self.transport.value()
            self.transport.clear()
            if sent:
                self.dial.send(sent)
            self.door.turn()
            if answer := self.dial.received():
                self.link.dataReceived(answer)
            if self.dial.closed:
                self.transport.lose(done())


class TestAgainstOurController(PumpedTestCase):
    """The same talk with a whole controller at the other end."""

    def host(self, door: ClockedController, token: bytes | None = None, **hello: Any) -> LinkedHost:
        return LinkedHost(self, door, token, **hello)

    def heard(self, host: LinkedHost) -> list[Event]:
        seen: list[Event] = []
        host.link.deliver_to(seen.append)
        return seen

    def test_a_host_joins_lives_and_leaves(self) -> None:
        for token in (None, TOKEN):
            with self.subTest(token=token):
                door = ClockedController(window(target_ranks=2), token=token)
                host = self.host(door, token, host="gpu-a", devices=2)
                events = self.heard(host)
                host.pump()
                self.assertEqual([type(event) for event in events], [Accept, WorldFormed])
                self.assertEqual(host.link.talk.ranks, (0, 1))
                host.link.report(0, 0)
                host.link.report(1, 0)
                host.pump()
                host.link.close()
                host.dial.hang_up()
                host.pump()
                self.assertEqual(door.state()["phase"], "done")
                self.assertEqual(events[2:], [LinkEnded("closed")])

    def test_what_a_rank_died_of_reaches_the_operator(self) -> None:
        door = ClockedController(window(target_ranks=1), token=TOKEN)
        host = self.host(door, TOKEN, host="gpu-a")
        events = self.heard(host)
        host.pump()
        host.link.explain(0, BOOM)
        host.link.report(0, 3)
        host.pump()
        reason = "rank 0 of host 'gpu-a' exited with code 3 (ValueError: boom)"
        self.assertEqual(events[2:], [Abort(reason), LinkEnded("closed")])
        self.assertEqual(
            door.controller.run.why(),
            {
                "run_id": door.controller.run.run_id,
                "phase": "failed",
                "failure": reason,
                "exited_ranks": 1,
                "rank_errors": [{"rank": 0, "type": "ValueError", "message": "boom", "line": ""}],
            },
        )

    def test_a_refusal_is_read_before_the_close(self) -> None:
        door = ClockedController(window(min_rank_start=9))
        self.host(door, host="gpu-a")
        second = self.host(door, host="gpu-a")
        reject, ended = self.heard(second)
        assert isinstance(reject, Reject)
        self.assertTrue(reject.reason.startswith("duplicate-host: "), reject)
        self.assertEqual(ended, LinkEnded("closed"))

    def test_a_wrong_or_missing_token_is_a_close_without_a_word(self) -> None:
        door = ClockedController(window(min_rank_start=9), token=TOKEN)
        for token in (None, bytes(range(16))):
            with self.subTest(token=token):
                self.assertEqual(self.heard(self.host(door, token)), [LinkEnded("closed")])
