"""One host's agent on a clock, up to where ranks would start: what each answer leads to, and how it is stopped."""

from __future__ import annotations

import errno
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionRefusedError  # noqa: A004  Twisted's own

from flodl_tw.agent.agent import CHECK, ORPHAN_SECS, REPLY_SECS, Agent
from flodl_tw.agent.devices import without_gpus
from flodl_tw.agent.link import HEARTBEAT_SECS
from flodl_tw.agent.outcome import Outcome, permanent, rank_failed, transient
from flodl_tw.agent.settings import AgentSettings
from flodl_tw.agent.spawn import Guardian
from flodl_tw.agent.waiting import EVERY_SECS, FIRST_SECS
from flodl_tw.core.messages import Abort, Accept, Hello, JoinMessage, RankExited, Reject, WorldFormed, encode_join
from flodl_tw.core.wire import JOIN_MAGIC, FrameKind, encode_frame
from flodl_tw.limits import CLOSE_GRACE
from flodl_tw.resolver import ThreadResolver
from tests.agent.links import AgentTestCase, LinkTransport, done, entries
from tests.pumped import TOKEN

HELLO = Hello("gpu-a", b"\0\1", (), "cpu", bytes(32))
GREETING = JOIN_MAGIC + encode_join(TOKEN, 4, HELLO)
ACCEPT = Accept((4, 5), None, 600)
REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
AT = "gpu-head:29500"
STATE = (
    b"HTTP/1.1 200 OK\r\nFlodl-Tw-Heartbeats: 1\r\n\r\n"
    b'{"phase":"waiting","joined_ranks":6,"min_rank_start":4,"target_ranks":8,"window_remaining_secs":239,'
    b'"cap_remaining_secs":539,"members":[{"host":"gp'
)
BEAT = encode_frame(TOKEN, 4, FrameKind.HEARTBEAT, b"")


class Lines:
    """Keeps what the agent says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def write(self, number: int, data: bytes) -> None:
        assert number == 2
        self.said.append(data.decode().removesuffix("\n").removeprefix("flodl-tw: gpu-a: "))


class NoProcess(Guardian):
    """A guardian that is counted and not started."""

    starts = 0
    left: list[int] = []

    def orphans(self) -> list[int]:
        return self.left

    def start(self) -> None:
        self.starts += 1


class PumpedAgentTestCase(AgentTestCase):
    """An agent whose dials and controller are the test's."""

    kind: Any = Agent

    def setUp(self) -> None:
        super().setUp()
        self.begin()

    def begin(self, **fields: Any) -> None:
        """A new agent, which has begun."""
        settings = AgentSettings(("gpu-head", 29500), "gpu-a", ("/bin/true",), **{"token": TOKEN, **fields})
        self.sink = Lines()
        self.guardian = NoProcess(self.reactor, 30, {})
        sink: Any = self.sink
        self.agent = self.kind(
            self.reactor,
            settings,
            without_gpus(2),
            {},
            sink=sink,
            guardian=self.guardian,
            jitter=lambda: 0.5,
            resolver=ThreadResolver(self.reactor, lambda *_, **__: entries("127.0.0.1")),
        )
        self.ran: Deferred[Outcome] = Deferred.fromCoroutine(self.agent.run())
        # None may be left in the middle of its story.
        self.addCleanup(self.agent.signalled, SIGTERM)

    def greeted(self) -> LinkTransport:
        """The controller takes the dial, and has the hello."""
        self.reactor.thread_answers()
        transport = self.reactor.take()
        self.addCleanup(transport.handle.close)
        self.assertEqual(transport.value(), GREETING)
        transport.clear()
        return transport

    def answers(self, data: bytes) -> None:
        """The question over HTTP is taken, answered and closed."""
        transport = self.reactor.take()
        self.addCleanup(transport.handle.close)
        self.assertIn(b"GET /state.json HTTP/1.0\r\n", transport.value())
        transport.protocol.dataReceived(data)
        if not transport.aborted:
            transport.lose(done())

    def send(self, transport: LinkTransport, *messages: JoinMessage) -> None:
        transport.protocol.dataReceived(b"".join(encode_join(TOKEN, 4, message) for message in messages))

    def ended(self) -> Outcome:
        """How it ended; it leaves no timer and no dial."""
        self.reactor.advance(0)
        outcome: Outcome = self.successResultOf(self.ran)
        self.assert_idle()
        return outcome

    def ended_with(self, status: int, text: str) -> None:
        outcome = self.ended()
        self.assertEqual((outcome.status, outcome.text), (status, text))
        self.assertEqual(self.sink.said[-1], f"{text} (status {status})")


class TestAnswers(PumpedAgentTestCase):
    """What the controller says, and what comes of it."""

    def test_a_reject_ends_it_by_its_word(self) -> None:
        for reason, status in (("no-devices: bring one", 2), ("window-closed: late", 1), ("come back later", 1)):
            with self.subTest(reason):
                self.setUp()
                transport = self.greeted()
                self.send(transport, Reject(reason))
                self.assertTrue(transport.disconnecting)
                self.ended_with(status, f"the controller refuses this host: {reason}")

    def test_three_hellos_that_are_closed_without_a_word_blame_the_token(self) -> None:
        for time in range(3):
            self.greeted().lose(done())
            if time < 2:
                self.assertEqual(self.sink.said[-1], f"{AT} closed the hello without a reply; trying again")
                self.assertEqual(self.timers(), [0.5])
                self.reactor.advance(0.5)
        self.answers(STATE)
        outcome = self.ended()
        self.assertEqual((outcome.status, outcome.retry), (2, False))
        self.assertIn("closed 3 hellos in a row without a reply: most likely the token", outcome.text)

    def test_three_silent_closes_of_what_is_no_controller_blame_no_token(self) -> None:
        for answer in (b"", b"\x15\x03\x01\0\2\2\x46", b"HTTP/1.1 200 OK\r\n\r\n<html>", b"HTTP/1.0 404 -\r\n\r\n{}"):
            with self.subTest(answer=answer):
                self.setUp()
                for _ in range(3):
                    self.greeted().lose(done())
                    self.reactor.advance(0.5)
                self.answers(answer)
                outcome = self.ended()
                self.assertEqual((outcome.status, outcome.retry), (1, True))
                self.assertIn("what is in front of it speaks TLS or HTTP/2, or sends PROXY", outcome.text)

    def test_an_answer_to_a_later_hello_forgets_the_silent_ones(self) -> None:
        for _ in range(2):
            self.greeted().lose(done())
            self.reactor.advance(0.5)
        self.send(self.greeted(), Reject("window-closed: late"))
        self.assertEqual(self.ended().status, 1)

    def test_a_controller_that_says_nothing_is_given_up(self) -> None:
        self.greeted()
        self.assertEqual(self.timers(), [REPLY_SECS])
        self.reactor.advance(REPLY_SECS)
        self.ended_with(1, f"{AT} said nothing in time, though it holds the connection")

    def test_the_deadline_for_a_reply_is_scaled(self) -> None:
        self.send(self.greeted(), Reject("window-closed: late"))
        self.ended()
        self.begin(scale=2.0)
        self.greeted()
        self.assertEqual(self.timers(), [2 * REPLY_SECS])

    def test_what_is_no_controller_is_named(self) -> None:
        transport = self.greeted()
        transport.protocol.dataReceived(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        self.ended_with(
            1,
            f"{AT} does not answer as a controller does: "
            "closed by us, for it speaks HTTP: a web server or a web proxy is there",
        )

    def test_a_message_that_is_no_answer_is_named(self) -> None:
        self.send(self.greeted(), Abort("over"))
        self.ended_with(1, f"{AT} answered a hello with Abort")

    def test_ranks_of_another_count_are_no_place(self) -> None:
        self.send(self.greeted(), Accept((4,), None, 600))
        self.ended_with(1, "the controller gave 1 ranks for 2 devices")
        self.assertEqual(self.guardian.starts, 0)

    def test_a_controller_that_never_answers_a_dial_is_transient(self) -> None:
        self.reactor.thread_answers()
        for _ in range(59):
            self.reactor.refuse(REFUSED)
            self.reactor.advance(0.5)
            self.reactor.thread_answers()
        self.reactor.refuse(REFUSED)
        self.ended_with(1, f"{AT} did not answer in 60 attempts (127.0.0.1: connection refused): {CHECK}")


class TestMember(PumpedAgentTestCase):
    """A host that is in waits for its world."""

    def setUp(self) -> None:
        super().setUp()
        self.transport = self.greeted()
        self.send(self.transport, ACCEPT)

    def test_it_says_so_and_waits_as_long_as_the_accept_says(self) -> None:
        self.assertEqual(self.sink.said, [f"joined {AT} with ranks 4-5; waiting for the world, 600 s at most"])
        self.assertEqual(self.guardian.starts, 1)
        self.assertEqual(self.timers(), [FIRST_SECS, 600 + REPLY_SECS])
        self.reactor.advance(600 + REPLY_SECS)
        self.ended_with(1, f"{AT} said nothing in time, though it holds the connection")

    def test_it_says_once_a_minute_who_is_in_and_keeps_a_quiet_link_alive(self) -> None:
        self.transport.clear()
        self.reactor.advance(FIRST_SECS)
        self.answers(STATE)
        self.assertEqual(self.transport.value(), BEAT)
        for _ in range(2):
            for _ in range(12):
                self.reactor.advance(HEARTBEAT_SECS)
            self.answers(STATE)
        self.assertEqual(self.transport.value(), 25 * BEAT)
        self.assertEqual(self.sink.said[1:], ["still waiting for the world: 6 of 8 ranks are in, 239 s left"] * 2)

    def test_a_controller_that_knows_no_heartbeat_gets_none(self) -> None:
        self.transport.clear()
        self.reactor.advance(FIRST_SECS)
        self.answers(
            STATE.replace(b"Flodl-Tw-Heartbeats", b"Server").replace(b'"target_ranks":8', b'"target_ranks":null')
        )
        self.reactor.advance(EVERY_SECS)
        self.answers(b"")
        self.reactor.advance(EVERY_SECS)
        self.answers(STATE.replace(b'"target_ranks":8', b'"target_ranks":null').replace(b"239", b"null"))
        self.assertEqual(self.transport.value(), b"")
        still = "still waiting for the world"
        self.assertEqual(self.sink.said[1:], [still, f"{still}: ranks that are in: 6, needed: 4, 539 s left"])

    def test_a_question_under_way_is_given_up_with_the_wait(self) -> None:
        self.reactor.advance(FIRST_SECS)
        question = self.reactor.take()
        self.send(self.transport, Abort("x"))
        self.assertTrue(question.aborted)
        self.ended_with(1, "the run was aborted: x")

    def test_an_abort_is_transient(self) -> None:
        self.send(self.transport, Abort("quorum not met"))
        self.ended_with(1, "the run was aborted: quorum not met")

    def test_an_abort_and_the_close_in_one_are_an_abort(self) -> None:
        self.send(self.transport, Abort("quorum not met"))
        self.transport.lose(done())
        self.ended_with(1, "the run was aborted: quorum not met")

    def test_the_end_of_the_link_is_transient(self) -> None:
        self.transport.lose(done())
        self.ended_with(1, "the controller ended the link before the world formed (closed)")

    def test_a_world_that_cannot_be_used_is_transient(self) -> None:
        self.send(self.transport, WorldFormed("7b7d"))
        outcome = self.ended()
        self.assertEqual(outcome.status, 1)
        self.assertTrue(outcome.text.startswith("the controller's world cannot be used: "), outcome.text)

    def test_another_message_is_transient(self) -> None:
        self.send(self.transport, RankExited(4, 0))
        self.ended_with(1, "the controller sent RankExited where the world was due")

    def test_a_wait_of_any_length_can_be_counted(self) -> None:
        self.send(self.transport, Abort("x"))
        self.ended()
        self.begin()
        self.send(self.greeted(), Accept((4, 5), None, (1 << 64) - 1))
        self.assertEqual(self.timers(), [FIRST_SECS, (1 << 31) + REPLY_SECS])


class TestStop(PumpedAgentTestCase):
    """SIGTERM, whatever it waits for."""

    def stopped(self, number: int = SIGTERM, status: int = 143, name: str = "SIGTERM") -> None:
        self.agent.signalled(number)
        self.ended_with(status, f"stopped by {name}")

    def test_while_the_name_is_looked_up(self) -> None:
        self.stopped()
        self.reactor.thread_answers()
        self.assert_idle()

    def test_while_it_dials(self) -> None:
        self.reactor.thread_answers()
        self.stopped()

    def test_between_two_dials(self) -> None:
        self.reactor.thread_answers()
        self.reactor.refuse(REFUSED)
        self.stopped()

    def test_while_it_waits_for_the_reply(self) -> None:
        transport = self.greeted()
        self.stopped()
        self.assertTrue(transport.disconnecting)

    def test_between_two_hellos(self) -> None:
        self.greeted().lose(done())
        self.stopped()

    def test_while_it_waits_for_the_world(self) -> None:
        transport = self.greeted()
        self.send(transport, ACCEPT)
        self.stopped()
        self.assertTrue(transport.disconnecting)

    def test_while_the_controller_does_not_take_the_close(self) -> None:
        self.reactor.thread_answers()
        transport = self.reactor.take(reads=False)
        self.send(transport, Reject("window-closed: late"))
        self.assertNoResult(self.ran)
        self.agent.signalled(SIGTERM)
        outcome = self.successResultOf(self.ran)
        self.assertEqual(outcome.status, 143)
        self.reactor.advance(CLOSE_GRACE)
        self.reactor.advance(0)
        self.assertTrue(transport.aborted)
        self.assert_idle()

    def test_between_two_attempts(self) -> None:
        self.stopped()
        self.reactor.thread_answers()
        self.begin(persist=True)
        self.send(self.greeted(), Reject("window-closed: late"))
        self.reactor.advance(0)
        self.assertEqual(self.timers(), [5])
        self.agent.signalled(SIGTERM)
        self.assertEqual(self.ended().status, 143)

    def test_under_persist_in_the_middle_of_an_attempt(self) -> None:
        self.stopped()
        self.reactor.thread_answers()
        self.begin(persist=True)
        self.greeted()
        self.stopped()

    def test_interrupt_and_hang_up_have_statuses_of_their_own(self) -> None:
        self.stopped(SIGINT, 130, "SIGINT")
        self.reactor.thread_answers()
        self.begin()
        self.stopped(SIGHUP, 129, "SIGHUP")

    def test_a_second_signal_changes_nothing(self) -> None:
        self.agent.signalled(SIGTERM)
        self.agent.signalled(SIGINT)
        self.assertEqual(self.ended().status, 143)

    def test_a_user_s_signal_is_the_ranks_and_without_any_it_is_nothing(self) -> None:
        self.agent.signalled(SIGUSR1)
        self.assertNoResult(self.ran)
        self.stopped()


class TestOrphans(PumpedAgentTestCase):
    """An agent of this host was killed, and its guardian still ends its ranks."""

    def setUp(self) -> None:
        AgentTestCase.setUp(self)
        self.patch(NoProcess, "left", [4711])
        self.begin()

    def test_nobody_is_dialed_before_they_are_gone(self) -> None:
        self.reactor.advance(ORPHAN_SECS)
        self.assertEqual(self.timers(), [ORPHAN_SECS])
        self.assertEqual(
            self.sink.said,
            ["ranks of an agent that was killed here still have their grace; joining once they are gone"],
        )
        NoProcess.left = []
        self.reactor.advance(ORPHAN_SECS)
        self.greeted()

    def test_a_signal_ends_that_wait_too(self) -> None:
        self.agent.signalled(SIGTERM)
        self.assertEqual(self.ended().status, 143)
        self.assertEqual(self.reactor.dialed(), [])


class ScriptedAgent(Agent):
    """Its attempts end as a test says: how long ranks ran, and the outcome."""

    script: list[tuple[float, Outcome]]

    async def _attempt(self) -> Outcome:
        self._ran_secs, outcome = self.script.pop(0)
        return outcome


class TestPersist(PumpedAgentTestCase):
    """Attempt after attempt."""

    kind = ScriptedAgent

    def setUp(self) -> None:
        AgentTestCase.setUp(self)

    def delays(self, *script: tuple[float, Outcome]) -> list[float]:
        """The pauses between the attempts of a script."""
        ScriptedAgent.script = [*script, (0.0, permanent("enough"))]
        self.begin(persist=True)
        delays = []
        while self.timers():
            (delay,) = self.timers()
            delays.append(delay)
            self.assertEqual(self.sink.said[-1], f"dialing again in {delay:g} s (--persist)")
            self.reactor.advance(delay)
        self.assertEqual(self.ended().status, 2)
        self.assertEqual(ScriptedAgent.script, [])
        return delays

    def test_the_pause_doubles_from_5_to_60_seconds(self) -> None:
        self.assertEqual(self.delays(*[(0.0, transient("x"))] * 7), [5, 10, 20, 40, 60, 60, 60])

    def test_a_run_of_two_minutes_begins_the_pauses_anew(self) -> None:
        short, long = (119.9, rank_failed(4, 1)), (120.0, rank_failed(4, 1))
        self.assertEqual(self.delays(short, short, short, long, short, long), [5, 10, 20, 5, 10, 5])

    def test_a_rank_s_own_2_does_not_stop_it(self) -> None:
        self.assertEqual(self.delays((0.0, rank_failed(4, 2)), (0.0, rank_failed(4, 1))), [5, 10])

    def test_our_2_does(self) -> None:
        self.assertEqual(self.delays(), [])

    def test_without_it_there_is_one_attempt(self) -> None:
        ScriptedAgent.script = [(0.0, transient("x"))]
        self.begin()
        self.assertEqual(self.ended().status, 1)
