"""One question over HTTP: each way of getting no answer has its sentence, and nothing waits for ever."""

from __future__ import annotations

from typing import Any

from treq.client import HTTPClient
from twisted.internet import error
from twisted.internet.defer import Deferred, fail
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.client import ResponseNeverReceived

from flodl_tw.cli.client import AnswerError, ControllerClient, NoAnswerError, make_client
from tests.pumped import TOKEN

OK = b"HTTP/1.1 200 OK\r\n"
WHAT_TO_CHECK = (
    "; check that the controller runs, its address and its port "
    "(29500 unless it was told otherwise; flodl's own launcher has 1337)"
)


class Dialed:
    """A real client on a reactor in memory, with one question under way."""

    def __init__(self, *controller: Any, method: str = "GET", body: object = None) -> None:
        self.reactor = MemoryReactorClock()
        self.answer: Deferred[tuple[int, bytes]] = make_client(self.reactor, *controller).ask(
            method, "/state.json", body
        )

    def connect(self) -> None:
        """The dial succeeds."""
        factory = self.reactor.tcpClients[-1][2]
        self.protocol = factory.buildProtocol(None)
        self.transport = StringTransport()
        self.transport.abortConnection = lambda: self.lose(error.ConnectionAborted())
        self.protocol.makeConnection(self.transport)

    def sent(self) -> bytes:
        """The request."""
        # A body is sent in turns of the reactor.
        for _ in range(3):
            self.reactor.advance(0)
        data: bytes = self.transport.value()
        return data

    def receive(self, data: bytes) -> None:
        """Bytes of an answer."""
        self.protocol.dataReceived(data)

    def lose(self, why: Exception) -> None:
        """The connection ends."""
        self.protocol.connectionLost(Failure(why))


class AskTestCase(SynchronousTestCase):
    here = ("127.0.0.1", 29500)

    def dial(self, *controller: Any, **options: Any) -> Dialed:
        dialed = Dialed(*(controller or self.here), **options)
        dialed.connect()
        return dialed

    def foreign(self, dialed: Dialed) -> str:
        """What is said of an answer that is not a controller's."""
        return str(self.failureResultOf(dialed.answer, AnswerError).value)

    def no_answer(self, dialed: Dialed) -> str:
        """Why there is no answer, without what to check."""
        text = str(self.failureResultOf(dialed.answer, NoAnswerError).value)
        self.assertTrue(text.endswith(WHAT_TO_CHECK), text)
        return text.removesuffix(WHAT_TO_CHECK)


class RequestTests(AskTestCase):
    def test_a_question_in_full(self) -> None:
        head, _, body = self.dial().sent().partition(b"\r\n\r\n")
        first, *headers = head.split(b"\r\n")
        self.assertEqual((first, body), (b"GET /state.json HTTP/1.1", b""))
        self.assertEqual(
            sorted(headers),
            [b"Accept-Encoding: gzip", b"Accept: application/json", b"Connection: close", b"Host: 127.0.0.1:29500"],
        )

    def test_the_token_goes_in_a_header_of_a_post_alone(self) -> None:
        told = ("ctl", 29500, TOKEN)
        sent = self.dial(*told, method="POST", body={"a": "ü"}).sent()
        self.assertIn(b"\r\nAuthorization: Bearer 00112233445566778899aabbccddeeff\r\n", sent)
        self.assertNotIn(TOKEN.hex().encode(), sent.split(b"\r\n")[0])
        self.assertTrue(sent.endswith(b'\r\n\r\n{"a": "\\u00fc"}'), sent)
        self.assertNotIn(b"Authorization", self.dial(*told).sent())
        self.assertNotIn(b"Authorization", self.dial(method="POST").sent())

    def test_any_host_is_named_as_http_wants_it(self) -> None:
        for host, header in (
            ("ctl", b"ctl:29500"),
            ("10.0.0.7", b"10.0.0.7:29500"),
            ("::1", b"[::1]:29500"),
            ("fe80::1%eth0", b"[fe80::1]:29500"),
            ("bücher.example", b"xn--bcher-kva.example:29500"),
        ):
            self.assertIn(b"\r\nHost: " + header + b"\r\n", self.dial(host, 29500).sent())

    def test_an_ipv6_address_is_dialed_with_its_zone(self) -> None:
        for host in ("::1", "fe80::1%eth0"):
            (dial,) = Dialed(host, 29500).reactor.tcpClients
            self.assertEqual(dial[:2], (host, 29500))

    def test_a_name_that_is_none_dials_nobody(self) -> None:
        for host in ("x" * 64, "a..b", ""):
            dialed = Dialed(host, 29500)
            self.assertEqual(dialed.reactor.tcpClients, [])
            self.assertTrue(self.no_answer(dialed))

    def test_each_question_is_a_connection_of_its_own(self) -> None:
        reactor = MemoryReactorClock()
        client = make_client(reactor, *self.here)
        for count in (1, 2):
            client.ask("GET", "/")
            self.assertEqual(len(reactor.tcpClients), count)

    def test_no_proxy_of_the_environment_is_asked(self) -> None:
        import os

        self.addCleanup(os.environ.pop, "http_proxy", None)
        os.environ["http_proxy"] = "http://127.0.0.1:3128"
        dialed = Dialed(*self.here)
        self.assertEqual(dialed.reactor.tcpClients[0][:2], ("127.0.0.1", 29500))


class AnswerTests(AskTestCase):
    def test_an_answer_in_pieces(self) -> None:
        dialed = self.dial()
        for byte in OK + b"Content-Length: 4\r\n\r\n[12]":
            dialed.receive(bytes((byte,)))
        self.assertEqual(self.successResultOf(dialed.answer), (200, b"[12]"))

    def test_what_ended_the_connection_is_said(self) -> None:
        for before in (b"", b"HTTP/1.1 200", OK + b"Content-Length: 9\r\n\r\n{"):
            for why in (error.ConnectionDone(), error.ConnectionLost()):
                dialed = self.dial()
                dialed.receive(before)
                dialed.lose(why)
                text = "it closed the connection without a whole answer"
                self.assertEqual(self.no_answer(dialed), f"nothing answers at 127.0.0.1:29500: {text}")

    def test_what_is_no_http_is_said(self) -> None:
        for data in (
            b"SSH-2.0-OpenSSH_9.6\r\n",
            b"\xe3\x17\x0d\xf1\r\n",
            OK + b"Content-Length: x\r\n\r\n",
            OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        ):
            dialed = self.dial()
            try:
                dialed.receive(data)
            except ValueError as broken:
                # A reactor ends a connection whose protocol raises.
                dialed.lose(broken)
            else:
                self.assertTrue(dialed.transport.disconnecting)
                dialed.lose(error.ConnectionDone())
            self.assertEqual(
                self.foreign(dialed), "127.0.0.1:29500 answers, but not as a controller does: what it sends is not HTTP"
            )
            self.flushLoggedErrors()

    def test_a_redirect_is_not_followed(self) -> None:
        dialed = self.dial("ctl", 29500, TOKEN, method="POST")
        dialed.receive(b"HTTP/1.1 307 Go\r\nLocation: http://10.9.9.9:1/\r\nContent-Length: 0\r\n\r\n")
        self.assertEqual(self.successResultOf(dialed.answer)[0], 307)
        self.assertEqual(len(dialed.reactor.tcpClients), 1)


class TimeTests(AskTestCase):
    def test_a_dial_has_five_seconds(self) -> None:
        (dial,) = Dialed(*self.here).reactor.tcpClients
        self.assertEqual(dial[3], 5)

    def test_a_look_up_that_never_ends_is_given_up(self) -> None:
        dialed = Dialed(*self.here)
        dialed.reactor.advance(10)
        self.assertIn("no whole answer within 10 s", self.no_answer(dialed))

    def test_an_answer_has_ten_seconds_from_the_dial_on(self) -> None:
        for before in (b"", OK, OK + b"Content-Length: 100\r\n\r\n"):
            dialed = Dialed(*self.here)
            dialed.reactor.advance(4)
            dialed.connect()
            dialed.receive(before)
            for _ in range(5):
                dialed.reactor.advance(1)
                if before:
                    dialed.receive(b"x")
                self.assertNoResult(dialed.answer)
            dialed.reactor.advance(1)
            self.assertIn("no whole answer within 10 s", self.no_answer(dialed))
            self.assertEqual(dialed.reactor.getDelayedCalls(), [])

    def test_an_answer_leaves_no_call_behind(self) -> None:
        dialed = self.dial()
        dialed.receive(OK + b"Content-Length: 2\r\n\r\n{}")
        self.successResultOf(dialed.answer)
        dialed.lose(error.ConnectionDone())
        self.assertEqual(dialed.reactor.getDelayedCalls(), [])


class FailingAgent:
    """An agent whose every request fails."""

    def __init__(self, why: Exception) -> None:
        self.why = why

    def request(self, *request: Any) -> Deferred[Any]:
        return fail(self.why)


class ReasonTests(AskTestCase):
    def test_each_reason_in_words(self) -> None:
        for why, text in (
            (error.ConnectionRefusedError(111), "connection refused"),
            (error.TimeoutError(), "no answer in time"),
            (error.DNSLookupError("no results"), "DNS lookup failed: no results"),
            (error.NoRouteError(113), "no route to host"),
            (
                ResponseNeverReceived([Failure(error.ConnectionLost())]),
                "it closed the connection without a whole answer",
            ),
            (OSError(101, "Network is unreachable\x1b"), "[Errno 101] Network is unreachable\\x1b"),
        ):
            client = ControllerClient(HTTPClient(FailingAgent(why)), Clock(), "ctl", 1)
            said = str(self.failureResultOf(client.ask("GET", "/"), NoAnswerError).value)
            self.assertEqual(said, f"nothing answers at ctl:1: {text}{WHAT_TO_CHECK}")
