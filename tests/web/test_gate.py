"""The gate in front of the HTTP parser: what is too long, however it arrives, and what is just fine."""

from __future__ import annotations

import json
import unittest

from flodl_tw.web.gate import RequestGate, Unfit

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


FIT = (
    ("a plain request", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    ("no header at all", b"GET / HTTP/1.0\r\n\r\n"),
    ("a start line of 2,048 bytes", line_of(2048) + b"\r\n" + HOST + b"\r\n"),
    ("a head of 16 KiB", head_of(16 * 1024)),
    ("a body of 4,096 bytes announced", b"POST /start HTTP/1.1\r\nContent-Length: 4096\r\n\r\n"),
    ("a check's body of 64 KiB announced", b"POST /check HTTP/1.1\r\nContent-Length: 65536\r\n\r\n"),
    ("the same with a query", b"POST /check?token=x HTTP/1.1\r\nContent-Length: 65536\r\n\r\n"),
    ("escaped UTF-8", b"GET /%C3%BC HTTP/1.1\r\n" + HOST + b"\r\n"),
    ("a header that is not UTF-8", b"GET / HTTP/1.1\r\nHost: \xff\r\n\r\n"),
    ("headers that only look like Host", b"GET / HTTP/1.1\r\nHost: x\r\nX-Host: y\r\nHosts: z\r\n\r\n"),
)
UNFIT = (
    ("a start line of 2,049 bytes", line_of(2049) + b"\r\n" + HOST + b"\r\n", 414),
    ("a start line that does not end", b"GET /" + b"a" * 3000, 414),
    ("a head of 16 KiB + 1", head_of(16 * 1024 + 1), 431),
    ("a head that does not end", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 4000, 431),
    ("100,000 header lines", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100_000 + b"\r\n", 431),
    ("a body of 10**9 announced", b"POST /start HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n", 413),
    ("a body of 10**30 announced", b"POST /start HTTP/1.1\r\nContent-Length: 1" + b"0" * 30 + b"\r\n\r\n", 413),
    ("a body of 4,097 announced", b"POST /start HTTP/1.1\r\ncontent-length:4097\r\n\r\n", 413),
    ("a check's body of 64 KiB + 1", b"POST /check HTTP/1.1\r\nContent-Length: 65537\r\n\r\n", 413),
    ("an abort's body of 4,097", b"POST /abort HTTP/1.1\r\nContent-Length: 4097\r\n\r\n", 413),
    ("a check spelled otherwise", b"POST /%63heck HTTP/1.1\r\nContent-Length: 4097\r\n\r\n", 413),
    ("a check in the query", b"POST /start?/check HTTP/1.1\r\nContent-Length: 4097\r\n\r\n", 413),
    ("a path that begins like it", b"POST /checks HTTP/1.1\r\nContent-Length: 4097\r\n\r\n", 413),
    ("no path at all", b"POST\r\nContent-Length: 4097\r\n\r\n", 413),
    ("two Hosts", b"GET / HTTP/1.1\r\nHost: a\r\nHOST: b\r\n\r\n", 400),
    ("the same Host twice", b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
    ("two Hosts, one folded", b"GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n Host: b\r\n\r\n", 400),
    ("a path that is not UTF-8", b"GET /\xff HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("an escaped path that is not UTF-8", b"GET /%ff HTTP/1.1\r\n" + HOST + b"\r\n", 400),
)


class GateTests(unittest.TestCase):
    def test_the_helpers_have_the_sizes_that_they_claim(self) -> None:
        self.assertEqual(len(line_of(2048)), 2048)
        self.assertEqual((len(head_of(16 * 1024)), head_of(16 * 1024)[-4:]), (16 * 1024, b"\r\n\r\n"))

    def test_a_fit_request_passes_whole_and_once(self) -> None:
        for name, request in FIT:
            with self.subTest(name):
                gate = RequestGate()
                self.assertEqual(gate.feed(request), request)
                self.assertTrue(gate.open)

    def test_a_fit_request_may_come_in_any_pieces(self) -> None:
        for name, request in FIT:
            for size in (1, 7, 1000):
                with self.subTest(name, size=size):
                    gate = RequestGate()
                    passed = [gate.feed(request[at : at + size]) for at in range(0, len(request), size)]
                    self.assertEqual(passed, [b""] * (len(passed) - 1) + [request])

    def test_an_unfit_request_is_refused_with_its_code(self) -> None:
        for name, request, code in UNFIT:
            with self.subTest(name):
                answer = RequestGate().feed(request)
                self.assertIsInstance(answer, Unfit)
                self.assertEqual(answer.code, code)

    def test_an_unfit_request_is_refused_in_pieces_too_and_nothing_of_it_passes(self) -> None:
        for name, request, code in UNFIT:
            with self.subTest(name):
                gate = RequestGate()
                for at in range(0, len(request), 500):
                    answer = gate.feed(request[at : at + 500])
                    if isinstance(answer, Unfit):
                        break
                    self.assertEqual(answer, b"")
                self.assertIsInstance(answer, Unfit)
                self.assertEqual(answer.code, code)

    def test_bytes_after_the_head_pass(self) -> None:
        gate = RequestGate()
        head = b"POST /start HTTP/1.1\r\nContent-Length: 9\r\n\r\n"
        self.assertEqual(gate.feed(head + b"abc"), head + b"abc")
        self.assertEqual(gate.feed(b"defghi"), b"defghi")

    def test_a_refusal_is_a_whole_answer(self) -> None:
        for name, request, code in UNFIT:
            with self.subTest(name):
                answer = RequestGate().feed(request)
                head, _, body = answer.response().partition(b"\r\n\r\n")
                status, *headers = head.decode("ascii").split("\r\n")
                self.assertRegex(status, rf"\AHTTP/1\.1 {code} [A-Z]")
                self.assertEqual(
                    headers,
                    [
                        "Content-Type: application/json",
                        "Cache-Control: no-cache",
                        "Access-Control-Allow-Origin: *",
                        "Connection: close",
                        f"Content-Length: {len(body)}",
                    ],
                )
                self.assertEqual(list(json.loads(body)), ["error"])
