"""One HTTP connection: what is too long, however it arrives, what is just fine, and what it costs."""

from __future__ import annotations

import json

from flodl_tw.testing import ClockedController
from tests.pumped import PumpedTestCase

HOST = b"Host: x\r\n"


def line_of(size: int) -> bytes:
    """A request line of so many bytes, its end not counted."""
    return b"GET /" + b"a" * (size - len(b"GET / HTTP/1.1")) + b" HTTP/1.1"


def head_of(size: int) -> bytes:
    """A whole head of so many bytes, the blank line included."""
    start = b"GET / HTTP/1.1\r\nHost: x\r\n"
    lines = b""
    while size - len(start) - len(lines) - 2 > 1100:
        lines += b"X-Pad: " + b"p" * 991 + b"\r\n"
    rest = size - len(start) - len(lines) - 2 - len(b"X-Pad: \r\n")
    return start + lines + b"X-Pad: " + b"p" * rest + b"\r\n\r\n"


def post(path: bytes, length: bytes, body: bytes = b"") -> bytes:
    """A request with a body of that length announced."""
    return b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + length + b"\r\n\r\n" + body


FIT = (
    ("a plain request", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 200),
    ("no header at all", b"GET / HTTP/1.0\r\n\r\n", 200),
    ("a start line of 2,048 bytes", line_of(2048) + b"\r\n" + HOST + b"\r\n", 404),
    ("a head of 16 KiB", head_of(16 * 1024), 200),
    ("a head of 500 lines", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 498 + b"\r\n", 200),
    ("a body of 4,096 bytes", post(b"/start", b"4096", b"x" * 4096), 409),
    ("a check's body of 64 KiB", post(b"/check", b"65536", b"x" * 65536), 400),
    ("the same with a query", post(b"/check?token=x", b"65536", b"x" * 65536), 400),
    ("escaped UTF-8", b"GET /%C3%BC HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    ("a header that is not UTF-8", b"GET / HTTP/1.1\r\nHost: \xff\r\n\r\n", 200),
    ("headers that only look like Host", b"GET / HTTP/1.1\r\nHost: x\r\nX-Host: y\r\nHosts: z\r\n\r\n", 200),
    ("a second Host that goes on another header", b"GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n Host: b\r\n\r\n", 200),
)
UNFIT = (
    ("a start line of 2,049 bytes", line_of(2049) + b"\r\n" + HOST + b"\r\n", 414),
    ("a start line that does not end", b"GET /" + b"a" * 3000, 414),
    ("a head of 16 KiB + 1", head_of(16 * 1024 + 1), 431),
    ("a head of 16 KiB + 2", head_of(16 * 1024 + 2), 431),
    ("a header that does not end", b"GET / HTTP/1.1\r\nX: " + b"y" * 17_000, 431),
    ("a head that does not end", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 4000, 431),
    ("501 lines", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 499 + b"\r\n", 431),
    ("100,000 header lines", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100_000 + b"\r\n", 431),
    ("a body of 10**9 announced", post(b"/start", b"1000000000"), 413),
    ("a body of 10**30 announced", post(b"/start", b"1" + b"0" * 30), 413),
    ("a body of more digits than int() takes", post(b"/start", b"1" * 5000), 413),
    ("the same, and no header after it", b"POST / HTTP/1.1\r\nContent-Length: " + b"1" * 5000 + b"\r\n\r\n", 413),
    ("a body of 4,097 announced", post(b"/start", b"4097"), 413),
    ("the same, to be told to go on", b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 4097\r\n\r\n", 413),
    ("a check's body of 64 KiB + 1", post(b"/check", b"65537"), 413),
    ("an abort's body of 4,097", post(b"/abort", b"4097"), 413),
    ("a check spelled otherwise", post(b"/%63heck", b"4097"), 413),
    ("a check in the query", post(b"/start?/check", b"4097"), 413),
    ("a path that begins like it", post(b"/checks", b"4097"), 413),
    ("two Hosts", b"GET / HTTP/1.1\r\nHost: a\r\nHOST: b\r\n\r\n", 400),
    ("the same Host twice", b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
    ("an escaped path that is not UTF-8", b"GET /%ff HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("lines without CR", b"GET / HTTP/1.1\nHost: x\n\n", 400),
    ("a header without CR", b"GET / HTTP/1.1\r\nHost: x\n\r\n", 400),
)
UNPARSED = (
    ("a path that is not ASCII", b"GET /\xff HTTP/1.1\r\n" + HOST + b"\r\n"),
    ("no path at all", b"POST\r\nContent-Length: 4097\r\n\r\n"),
    ("a header that has no colon", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"),
    ("a length that is no number", post(b"/start", b"x")),
    ("two lengths", b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n"),
    ("two ways of a length", b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"),
    ("a chunk that is none", b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
)


class ConnectionTestCase(PumpedTestCase):
    def answer(self, request: bytes, size: int = 1 << 16) -> tuple[bytes, ClockedController]:
        """What a request gets that arrives in pieces of that size; the connection is closed then."""
        door = ClockedController()
        dial = door.dial("127.0.0.1")
        for at in range(0, len(request), size):
            dial.send(request[at : at + size])
        door.turn()
        self.assertTrue(dial.closed)
        self.assertEqual(self.flushLoggedErrors(), [])
        return dial.received(), door

    def sizes(self, request: bytes) -> tuple[int, ...]:
        return (1 << 16, 500) if len(request) > 10_000 else (1 << 16, 500, 7, 1)


class RequestTests(ConnectionTestCase):
    """What is within the limits, what is over one, and what does not parse: each has one answer, in any pieces."""

    def test_the_helpers_have_the_sizes_that_they_claim(self) -> None:
        self.assertEqual(len(line_of(2048)), 2048)
        self.assertEqual((len(head_of(16 * 1024)), head_of(16 * 1024)[-4:]), (16 * 1024, b"\r\n\r\n"))

    def test_a_fit_request_is_answered(self) -> None:
        for name, request, code in FIT:
            for size in self.sizes(request):
                with self.subTest(name, size=size):
                    answer, door = self.answer(request, size)
                    self.assertTrue(answer.startswith(b"HTTP/1.%d %d " % (b" HTTP/1.1" in request, code)), answer)
                    self.assertEqual(door.ends(), {})

    def test_an_unfit_request_is_refused_with_its_code_and_a_whole_answer(self) -> None:
        for name, request, code in UNFIT:
            for size in self.sizes(request):
                with self.subTest(name, size=size):
                    answer, door = self.answer(request, size)
                    head, _, body = answer.partition(b"\r\n\r\n")
                    status, *headers = head.decode("ascii").split("\r\n")
                    self.assertRegex(status, rf"\AHTTP/1\.1 {code} [A-Z]")
                    self.assertEqual(
                        sorted(headers),
                        [
                            "Access-Control-Allow-Origin: *",
                            "Cache-Control: no-cache",
                            "Connection: close",
                            f"Content-Length: {len(body)}",
                            "Content-Type: application/json",
                        ],
                    )
                    self.assertEqual(list(json.loads(body)), ["error"])
                    self.assertEqual(door.ends(), {f"http-{code}": 1})

    def test_what_does_not_parse_is_refused_and_counted(self) -> None:
        for name, request in UNPARSED:
            for size in self.sizes(request):
                with self.subTest(name, size=size):
                    answer, door = self.answer(request, size)
                    self.assertEqual(answer, b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    self.assertEqual(door.ends(), {"http-400": 1})

    def test_what_is_behind_the_one_request_is_not_read(self) -> None:
        smuggled = b"POST /abort HTTP/1.1\r\nHost: localhost\r\n\r\n"
        for name, request, code in (
            ("behind no body", b"GET /nope HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
            ("behind a body", post(b"/start", b"3", b"abc"), 409),
            ("in its chunked body's place", b"PUT /start HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 405),
            ("behind a refused one", post(b"/start", b"4097"), 413),
        ):
            for size in (1 << 16, 1):
                with self.subTest(name, size=size):
                    answer, door = self.answer(request + smuggled, size)
                    self.assertTrue(answer.startswith(b"HTTP/1.1 %d " % code), answer)
                    self.assertEqual(answer.count(b"HTTP/1.1"), 1)
                    self.assertEqual(door.state()["phase"], "waiting")
