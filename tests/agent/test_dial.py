"""Dialing on a clock: which address is tried when, what is said, and that nothing is left of a dial that ended."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable
from typing import Any

from twisted.internet import error
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.python.failure import Failure

from flodl_tw.agent.dial import ATTEMPTS, HEAD_START_SECS, LOOK_UP_SECS, Dialer, DialError, reason_of
from flodl_tw.resolver import ThreadResolver
from tests.agent.links import AgentTestCase, entries

REFUSED = error.ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
NO_ROUTE = error.NoRouteError(errno.EHOSTUNREACH, "No route to host")
Answer = list[str] | Exception


class DialTestCase(AgentTestCase):
    """A name whose addresses a test decides."""

    def setUp(self) -> None:
        super().setUp()
        self.answers: list[Answer] = []
        """What the next look-ups give; the last is given again."""
        self.asked: list[str] = []
        self.got: list[Any] = []
        self.failed: list[Failure] = []

    def getaddrinfo(self, host: str, port: None, **_: Any) -> list[Any]:
        """Called in a thread."""
        self.asked.append(host)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return entries(*answer)

    def dial(
        self,
        *answers: Answer,
        attempts: int = ATTEMPTS,
        jitter: Callable[[], float] = lambda: 0.5,
        answered: bool = True,
        **options: Any,
    ) -> Deferred[Any]:
        """Begin a dial; the first look-up answers unless a test wants to do that."""
        self.answers = list(answers)
        dialer = Dialer(
            self.reactor,
            "gpu-head",
            29500,
            attempts=attempts,
            connect_secs=5,
            say=self.said.append,
            resolver=ThreadResolver(self.reactor, options.get("getaddrinfo", self.getaddrinfo)),
            jitter=jitter,
        )
        dial = Deferred.fromCoroutine(dialer.dial(Factory.forProtocol(Protocol)))
        dial.addCallbacks(self.got.append, self.failed.append)
        if answered:
            self.reactor.thread_answers()
        return dial

    def next_attempt(self, pause: float = 0.5) -> None:
        """The pause passes, and the name is looked up again."""
        self.assertEqual(self.timers(), [pause])
        self.reactor.advance(pause)
        self.reactor.thread_answers()

    def reason(self) -> str:
        """Why the dial failed."""
        (failure,) = self.failed
        self.assertIs(failure.type, DialError)
        return failure.getErrorMessage()


class TestAttempts(DialTestCase):
    """One address, again and again."""

    def test_the_first_answer_is_the_connection(self) -> None:
        self.dial(["10.0.0.1"])
        self.assertEqual(self.asked, ["gpu-head"])
        self.assertEqual(self.reactor.tcpClients[0][:2], ("10.0.0.1", 29500))
        self.assertEqual(self.reactor.tcpClients[0][3], 5)
        transport = self.reactor.take()
        (protocol,) = self.got
        self.assertIs(protocol.transport, transport)
        self.assertFalse(transport.disconnecting or transport.aborted)
        self.assertEqual(self.said, [])
        self.assert_idle()

    def test_a_refused_dial_is_tried_60_times_half_a_second_apart(self) -> None:
        self.dial(["10.0.0.1"])
        for _ in range(59):
            self.reactor.refuse(REFUSED)
            self.next_attempt()
        self.assertEqual(self.failed, [])
        self.reactor.refuse(REFUSED)
        self.assertEqual(self.reason(), "gpu-head:29500 did not answer in 60 attempts (10.0.0.1: connection refused)")
        self.assertEqual(len(self.reactor.tcpClients), 60)
        self.assertEqual(self.reactor.seconds(), 29.5)
        self.assert_idle()

    def test_the_pause_has_jitter_between_a_half_and_three_halves(self) -> None:
        draws = [0.0, 0.25, 0.5, 1.0]
        self.dial(["10.0.0.1"], jitter=lambda: draws.pop(0))
        for pause in (0.25, 0.375, 0.5, 0.75):
            self.reactor.refuse(REFUSED)
            self.next_attempt(pause)

    def test_a_controller_that_comes_up_is_reached(self) -> None:
        self.dial(["10.0.0.1"])
        for _ in range(3):
            self.reactor.refuse(REFUSED)
            self.next_attempt()
        self.reactor.take()
        self.assertEqual(len(self.got), 1)
        self.assert_idle()

    def test_one_attempt_is_one_attempt(self) -> None:
        self.dial(["10.0.0.1"], attempts=1)
        self.reactor.refuse(NO_ROUTE)
        self.assertEqual(self.reason(), "gpu-head:29500 did not answer in 1 attempts (10.0.0.1: no route to host)")
        self.assert_idle()


class TestLines(DialTestCase):
    """What is said: a line when the reason changes."""

    def line(self, reason: str) -> str:
        return f"gpu-head:29500 does not answer yet ({reason}); trying up to 60 times"

    def test_a_reason_is_said_once_until_it_changes(self) -> None:
        self.dial(["10.0.0.1"])
        for why in (REFUSED, REFUSED, REFUSED, NO_ROUTE, NO_ROUTE, REFUSED):
            self.reactor.refuse(why)
            self.next_attempt()
        self.assertEqual(
            self.said,
            [
                self.line("10.0.0.1: connection refused"),
                self.line("10.0.0.1: no route to host"),
                self.line("10.0.0.1: connection refused"),
            ],
        )

    def test_each_address_is_named_with_its_own_reason(self) -> None:
        self.dial(["10.0.0.2", "::1"])
        self.reactor.refuse(NO_ROUTE, 0)
        self.reactor.advance(HEAD_START_SECS)
        self.reactor.refuse(error.TimeoutError(), 1)
        self.assertEqual(self.said, [self.line("10.0.0.2: no route to host; ::1: no answer in time")])

    def test_addresses_that_rotate_are_no_change(self) -> None:
        self.dial(["10.0.0.1", "10.0.0.2"], ["10.0.0.2", "10.0.0.1"])
        for _ in range(4):
            self.reactor.refuse(REFUSED)
            self.reactor.advance(HEAD_START_SECS)
            self.reactor.refuse(REFUSED)
            self.next_attempt()
        self.assertEqual(self.said, [self.line("10.0.0.1: connection refused; 10.0.0.2: connection refused")])

    def test_reasons_are_in_the_system_s_words(self) -> None:
        for why, text in (
            (REFUSED, "connection refused"),
            (NO_ROUTE, "no route to host"),
            (error.TimeoutError(), "no answer in time"),
            (error.getConnectError((errno.ENETUNREACH, "x")), "network is unreachable"),
            (error.getConnectError((errno.EINVAL, "x")), "invalid argument"),
            (error.getConnectError(OSError(errno.ETIMEDOUT, "x")), "connection timed out"),
            (ValueError("odd"), "odd"),
        ):
            with self.subTest(text):
                self.assertEqual(reason_of(Failure(why)), text)


class TestRace(DialTestCase):
    """Several addresses of one name."""

    def test_the_next_address_is_tried_beside_a_slow_one_after_its_head_start(self) -> None:
        self.dial(["10.0.0.1", "::1", "10.0.0.3"])
        self.assertEqual(self.reactor.dialed(), ["10.0.0.1"])
        self.reactor.advance(HEAD_START_SECS - 0.01)
        self.assertEqual(self.reactor.dialed(), ["10.0.0.1"])
        self.reactor.advance(0.01)
        self.assertEqual(self.reactor.dialed(), ["10.0.0.1", "::1"])
        self.reactor.advance(HEAD_START_SECS)
        self.assertEqual(self.reactor.open_dials(), ["10.0.0.1", "::1", "10.0.0.3"])
        self.assertEqual(self.timers(), [])

    def test_a_failure_takes_nothing_from_the_others(self) -> None:
        self.dial(["10.0.0.1", "10.0.0.2", "10.0.0.3"])
        self.reactor.refuse(REFUSED)
        self.assertEqual(self.timers(), [HEAD_START_SECS, 2 * HEAD_START_SECS])
        self.reactor.advance(HEAD_START_SECS)
        self.reactor.refuse(REFUSED)
        self.reactor.advance(HEAD_START_SECS)
        self.assertEqual(self.reactor.open_dials(), ["10.0.0.3"])
        self.assertEqual((self.timers(), self.said), ([], []))

    def test_the_first_to_answer_wins_and_the_others_are_given_up(self) -> None:
        for winner in range(3):
            with self.subTest(winner=winner):
                self.setUp()
                self.dial(["10.0.0.1", "10.0.0.2", "10.0.0.3"])
                self.reactor.advance(HEAD_START_SECS)
                self.reactor.advance(HEAD_START_SECS)
                transport = self.reactor.take(winner)
                self.assertIs(self.got[0].transport, transport)
                stopped = [connector.stoppedConnecting for connector in self.reactor.connectors]
                self.assertEqual(stopped, [place != winner for place in range(3)])
                self.assert_idle()

    def test_an_address_that_was_not_yet_tried_never_is(self) -> None:
        self.dial(["10.0.0.1", "10.0.0.2"])
        self.reactor.take()
        self.reactor.advance(10)
        self.assertEqual(self.reactor.dialed(), ["10.0.0.1"])
        self.assert_idle()

    def test_the_attempt_fails_when_the_last_of_them_has(self) -> None:
        self.dial(["10.0.0.1", "10.0.0.2"], attempts=1)
        self.reactor.advance(HEAD_START_SECS)
        self.reactor.refuse(REFUSED, 1)
        self.assertEqual((self.failed, self.reactor.open_dials()), ([], ["10.0.0.1"]))
        self.reactor.refuse(error.TimeoutError(), 0)
        self.assertEqual(
            self.reason(),
            "gpu-head:29500 did not answer in 1 attempts (10.0.0.1: no answer in time; 10.0.0.2: connection refused)",
        )
        self.assert_idle()


class TestNames(DialTestCase):
    """Looking the name up."""

    def test_an_unknown_name_is_asked_for_again(self) -> None:
        unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        self.dial(unknown, unknown, ["10.0.0.1"])
        self.next_attempt()
        self.assertEqual(
            self.said,
            [
                "gpu-head:29500 does not answer yet (the name 'gpu-head' cannot be looked up: "
                "Name or service not known); trying up to 60 times"
            ],
        )
        self.next_attempt()
        self.reactor.take()
        self.assertEqual((len(self.got), len(self.asked)), (1, 3))
        self.assert_idle()

    def test_a_name_that_is_none_is_an_attempt_that_failed(self) -> None:
        self.dial(UnicodeError("label too long"), attempts=1)
        self.assertEqual(
            self.reason(),
            "gpu-head:29500 did not answer in 1 attempts (the name 'gpu-head' cannot be looked up: it is no name)",
        )

    def test_each_attempt_asks_for_the_name_anew(self) -> None:
        self.dial(["10.0.0.1"], ["10.0.0.2"])
        self.reactor.refuse(REFUSED)
        self.next_attempt()
        self.assertEqual(self.reactor.dialed(), ["10.0.0.1", "10.0.0.2"])

    def test_a_resolver_that_does_not_answer_ends_the_attempt_and_its_late_answer_nothing(self) -> None:
        release = threading.Event()
        self.addCleanup(release.set)

        def slow(*_: Any, **__: Any) -> list[Any]:
            release.wait(10)
            return entries("10.0.0.9")

        self.dial(attempts=1, answered=False, getaddrinfo=slow)
        self.assertEqual(self.timers(), [LOOK_UP_SECS])
        self.reactor.advance(LOOK_UP_SECS)
        self.assertEqual(
            self.reason(),
            "gpu-head:29500 did not answer in 1 attempts "
            "(the name 'gpu-head' cannot be looked up: no answer within 10 s)",
        )
        release.set()
        self.reactor.thread_answers()
        self.assertEqual(self.reactor.dialed(), [])
        self.assert_idle()


class TestCancel(DialTestCase):
    """A dial that is given up at any moment leaves nothing."""

    def cancelled(self, dial: Deferred[Any]) -> None:
        dial.cancel()
        (failure,) = self.failed
        self.assertIs(failure.type, CancelledError)
        self.assertEqual(self.got, [])
        self.assert_idle()

    def test_while_the_name_is_looked_up(self) -> None:
        dial = self.dial(["10.0.0.1"], answered=False)
        self.cancelled(dial)
        self.reactor.thread_answers()
        self.assertEqual(self.reactor.dialed(), [])
        self.assert_idle()

    def test_while_one_address_has_its_head_start(self) -> None:
        self.cancelled(self.dial(["10.0.0.1", "10.0.0.2"]))
        self.assertEqual(self.reactor.dialed(), ["10.0.0.1"])

    def test_while_several_are_dialed(self) -> None:
        dial = self.dial(["10.0.0.1", "10.0.0.2", "::1"])
        self.reactor.advance(HEAD_START_SECS)
        self.reactor.advance(HEAD_START_SECS)
        self.cancelled(dial)
        self.assertEqual(len(self.reactor.connectors), 3)

    def test_between_two_attempts(self) -> None:
        dial = self.dial(["10.0.0.1"])
        self.reactor.refuse(REFUSED)
        self.assertEqual(self.timers(), [0.5])
        self.cancelled(dial)
        self.reactor.advance(60)
        self.assertEqual(len(self.reactor.tcpClients), 1)
