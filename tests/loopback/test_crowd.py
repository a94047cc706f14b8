"""Scans, stuck peers and greedy clients on the real port: nobody else notices, and nothing is left of them."""

from __future__ import annotations

import contextlib
import json
import re
import select
import shutil
import socket
import statistics
import subprocess
import time

from flodl_tw.core.messages import Accept, Reject
from flodl_tw.core.wire import (
    CONTROL_MAGIC,
    DATA_MAGIC,
    FRAME_MAGIC,
    JOIN_MAGIC,
    RENDEZVOUS_MAGIC,
    ZERO_KEY,
    FrameKind,
    encode_frame,
)
from flodl_tw.testing import SimulatedClient, make_hello
from tests.loopback.process import (
    LOOPBACK,
    PATIENT,
    WAIT,
    Client,
    ProcessTestCase,
    Twistd,
    body_of,
    ends,
    head_of,
    read_all,
    reset,
    until,
)

MAGICS = (RENDEZVOUS_MAGIC, DATA_MAGIC, CONTROL_MAGIC, JOIN_MAGIC, b"GET ", b"POST")
LAG = 0.25
"""Seconds that a slow and busy machine may add to what takes a millisecond."""
SLACK_KIB = 1536
"""What a burst may leave in the memory of a warm server: 1 MiB, and what CPython's arenas round up to."""


def claim(length: int) -> bytes:
    """The join magic and a frame header that announces ``length`` bytes."""
    return (
        JOIN_MAGIC + FRAME_MAGIC + (4).to_bytes(4, "little") + bytes(8) + b"\x07\0\0\0" + length.to_bytes(4, "little")
    )


def loud_lines(controller: Twistd) -> list[str]:
    """The lines of the log; those of level debug are not to be there."""
    return controller.log.splitlines()


def counted(controller: Twistd) -> dict[str, int]:
    """The counts of connections that got nowhere, from the page."""
    page = body_of(controller.http(b"GET / HTTP/1.0\r\nAccept: text/html\r\n\r\n")).decode()
    found = re.search(r"Connections that got nowhere since the start: ([^<]*)\.<", page)
    pairs = (item.rsplit(" ", 1) for item in found.group(1).split(", ")) if found else ()
    return {word: int(count) for word, count in pairs}


class Crowd(ProcessTestCase):
    """One controller whose window stays open for all of these, and whose deadlines end nobody."""

    names = 0

    def setUp(self) -> None:
        self.controller = self.share("--target-ranks", "1000000", "--min-rank-start", "1000000", scale=PATIENT)
        self.quiet_descriptors = self.settled()

    def settled(self) -> int:
        """The server's descriptors once the members of earlier tests are gone."""
        self.controller.state_is(joined_hosts=0)
        # The connection that asked may be open for a moment more.
        return min(self.controller.descriptors() for _ in range(50))

    def assert_descriptors_are_back(self) -> None:
        """Assert that the server has as few descriptors as before the test, long before any deadline."""
        until(lambda: self.controller.descriptors() <= self.quiet_descriptors, "descriptors are back")

    def join_secs(self) -> float:
        """How long one join takes, from the dial to the answer; its host stays until the end of the test."""
        type(self).names += 1
        name = f"host-{self.names}"
        begun = time.perf_counter()
        client = Client(self.controller.port)
        answer = client.join(name)
        took = time.perf_counter() - begun
        self.addCleanup(client.close)
        self.assertIsInstance(answer, Accept)
        return took

    def hang_up(self, data: bytes, how: str) -> None:
        """Connect, send, and end by FIN or RST."""
        client = socket.create_connection((LOOPBACK, self.controller.port), WAIT)
        if data:
            client.sendall(data)
        reset(client) if how == "RST" else client.close()

    def test_a_join_beside_500_stuck_peers_takes_as_long_as_without(self) -> None:
        alone = [self.join_secs() for _ in range(25)]
        hello = SimulatedClient().hello(make_hello("never"))
        for count, data in ((300, b""), (100, hello[:40]), (100, b"GET /state.json HTTP/1.1\r\nHost: ")):
            for _ in range(count):
                self.connect(self.controller, data=data)
        beside = [self.join_secs() for _ in range(25)]
        self.assertGreater(self.controller.descriptors(), 500)
        # A busy machine may double a median of a fraction of a millisecond, or interrupt for much longer.
        self.assertLess(statistics.median(beside), 4 * statistics.median(alone) + LAG)

    def test_a_scan_that_hangs_up_early_leaves_no_trace(self) -> None:
        hello = SimulatedClient().hello(make_hello("never"))
        parts = [magic[:size] for magic in MAGICS for size in range(4)]
        parts += [JOIN_MAGIC, b"GET ", b"POST", hello[:28], hello[:-1]]
        before, lines = self.controller.state(), loud_lines(self.controller)
        for number in range(1000):
            self.hang_up(parts[number % len(parts)], "RST" if number % 2 else "FIN")
        self.assert_descriptors_are_back()
        self.assertEqual(loud_lines(self.controller), lines)
        after = self.controller.state()
        for key in ("window_remaining_secs", "cap_remaining_secs"):
            del before[key], after[key]
        self.assertEqual(after, before)

    def test_600_health_checks_are_counted_and_not_logged(self) -> None:
        lines = loud_lines(self.controller)
        before = counted(self.controller).get("before-channel", 0)
        for number in range(600):
            self.hang_up(b"", "RST" if number % 2 else "FIN")
        self.assert_descriptors_are_back()
        until(lambda: counted(self.controller).get("before-channel", 0) - before == 600, "600 counts")
        self.assertEqual(loud_lines(self.controller), lines)

    def test_a_length_that_nobody_sent_costs_no_memory(self) -> None:
        for length in (0xFFFFFFFF, 0x7FFFFFFF, 64 * 1024 + 1):
            with self.subTest(length=length):
                self.assertTrue(ends(self.connect(self.controller, data=claim(length))))
        warm = self.controller.resident_kib()
        for _ in range(20):
            for length in (0xFFFFFFFF, 0x7FFFFFFF, 64 * 1024 + 1):
                self.assertTrue(ends(self.connect(self.controller, data=claim(length))))
        # The most that is taken, and then silence: buffered, for no longer than the hello's deadline.
        silent = [self.connect(self.controller, data=claim(64 * 1024) + bytes(60 * 1024)) for _ in range(4)]
        self.controller.state()
        self.assertLess(self.controller.resident_kib() - warm, SLACK_KIB)
        for client in silent:
            client.close()
        self.assert_descriptors_are_back()

    def test_a_hello_with_too_much_in_it_is_rejected(self) -> None:
        many_labels = b"\0\x05never\x01\0" + b"\xfc" + (100_000).to_bytes(4, "little")
        rows = (
            ("malformed", encode_frame(ZERO_KEY, 4, FrameKind.JOIN, many_labels + bytes(1000))),
            ("bad-label", SimulatedClient().hello(make_hello("never", gpus=("",) * 60_000))[4:]),
            ("too-many-devices", SimulatedClient().hello(make_hello("never", local_devices=bytes(300)))[4:]),
        )
        for round_ in range(2):
            warm = self.controller.resident_kib()
            for word, frame in rows:
                with self.subTest(word=word):
                    client = self.dial(self.controller)
                    client.socket.sendall(JOIN_MAGIC + frame)
                    (answer,) = client.rest()
                    assert isinstance(answer, Reject)
                    self.assertEqual(answer.reason.partition(":")[0], word)
            if round_:
                self.assertLess(self.controller.resident_kib() - warm, SLACK_KIB)
        self.assertEqual(self.controller.state()["joined_hosts"], 0)

    def test_100000_labels_of_a_hello_over_the_cap_are_not_taken(self) -> None:
        client = self.connect(
            self.controller, data=SimulatedClient().hello(make_hello("never", gpus=("",) * 100_000))[:4096]
        )
        self.assertTrue(ends(client))
        self.controller.said("payload of 100")

    def test_an_endless_head_is_refused(self) -> None:
        client = self.connect(self.controller)
        warm = self.controller.resident_kib()
        answer = b""
        try:
            client.sendall(b"GET / HTTP/1.1\r\n" + b"X-Line: 1\r\n" * 100_000)
            answer = read_all(client)
        except OSError:
            # It hung up while the rest of our lines was on its way.
            pass
        if answer:
            self.assertTrue(answer.startswith(b"HTTP/1.1 431 "), answer)
        self.controller.said("head is over the limit of 500 lines")
        self.assertLess(self.controller.resident_kib() - warm, SLACK_KIB)

    def test_a_head_just_over_the_limit_gets_431(self) -> None:
        line = b"X-Line: 0123456789abcdef\r\n"
        answer = self.controller.http(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + line * 640)
        self.assertTrue(answer.startswith(b"HTTP/1.1 431 "), answer)

    def test_a_huge_body_is_refused_before_it_is_sent(self) -> None:
        answer = self.controller.http(b"POST /start HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n")
        self.assertTrue(answer.startswith(b"HTTP/1.1 413 "), answer)

    def test_10000_pipelined_requests_that_are_never_read_cost_little(self) -> None:
        hosts = []
        for number in range(32):
            hosts.append(self.dial(self.controller))
            self.assertIsInstance(hosts[-1].join(f"gpu-{number}", 8, gpus=("y" * 200,) * 8), Accept)
        self.assertEqual(self.controller.state()["joined_ranks"], 256)
        warm = self.controller.resident_kib()
        greedy = socket.socket()
        self.addCleanup(greedy.close)
        greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        greedy.connect((LOOPBACK, self.controller.port))
        greedy.settimeout(2)
        with contextlib.suppress(OSError):
            greedy.sendall(b"GET /state.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10_000)
        self.assertEqual(self.controller.state()["joined_ranks"], 256)
        self.join_secs()
        self.assertLess(self.controller.resident_kib() - warm, 20 * 1024)

    def test_a_client_that_hangs_up_in_the_middle_of_a_large_answer_is_no_fault(self) -> None:
        for number in range(40):
            self.assertIsInstance(self.dial(self.controller).join(f"gpu-{number}", 1, gpus=("z" * 250,) * 200), Accept)
        for how in ("FIN", "RST"):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((LOOPBACK, self.controller.port))
            client.sendall(b"GET /state.json HTTP/1.0\r\n\r\n")
            client.recv(1000)
            reset(client) if how == "RST" else client.close()
        self.assertEqual(self.controller.state()["joined_hosts"], 40)


class Deadlines(ProcessTestCase):
    """Peers that never finish, against deadlines of one second."""

    def setUp(self) -> None:
        self.controller = self.share("--min-rank-start", "1000000", scale=0.1)

    def test_silent_and_half_said_dials_go_with_one_line_a_kind(self) -> None:
        before = loud_lines(self.controller)
        hello = SimulatedClient().hello(make_hello("never"))
        rows = (
            (b"", "no channel within 1 s"),
            (b"\xe3\x17", "no channel within 1 s"),
            (hello[:40], "no whole hello within 1 s"),
            (b"GET / HT", "no whole HTTP request within 1 s"),
            (b"POST /start HTTP/1.1\r\nContent-Length: 9\r\n\r\nab", "no whole HTTP request within 1 s"),
        )
        clients = [self.connect(self.controller, data=data) for data, _ in rows]
        begun = time.monotonic()
        for client, (data, _) in zip(clients, rows, strict=True):
            self.assertTrue(ends(client), data)
        # Unscaled it would be 5 s and more.
        self.assertLess(time.monotonic() - begun, 5.0)
        for why in dict.fromkeys(why for _, why in rows):
            self.controller.said(why)
        new = loud_lines(self.controller)[len(before) :]
        for why in dict.fromkeys(why for _, why in rows):
            # Another test of this controller may have had the first line of the kind.
            self.assertLessEqual(len([line for line in new if why in line]), 1, new)

    def test_dribbling_requests_have_a_deadline_in_all(self) -> None:
        self.controller.state()
        quiet = self.controller.descriptors()
        left = {self.connect(self.controller, data=b"GET / HT") for _ in range(50)}
        begun = time.monotonic()
        joins = 0
        while left:
            self.assertLess(time.monotonic() - begun, WAIT)
            readable, _, _ = select.select(list(left), [], [], 0.1)
            left -= set(readable)
            for client in left:
                try:
                    client.sendall(b"x")
                except OSError:
                    readable.append(client)
            left -= set(readable)
            host = self.dial(self.controller)
            self.assertIsInstance(host.join(f"beside-{joins}"), Accept)
            host.close()
            joins += 1
        self.assertGreater(time.monotonic() - begun, 0.9)
        until(lambda: self.controller.descriptors() <= quiet, "descriptors are back")


class Visitors(ProcessTestCase):
    """Requests over real sockets, from people and from web pages."""

    controller: Twistd

    def setUp(self) -> None:
        self.controller = self.start("--start", "manual", "--min-rank-start", "1")

    def post(self, *headers: str, version: str = "1.1", query: str = "") -> tuple[int, dict[str, object]]:
        """The status and body that ``POST /start`` gets."""
        lines = [f"POST /start{query} HTTP/{version}", *headers, "Content-Length: 0", "", ""]
        answer = self.controller.http("\r\n".join(lines).encode())
        return int(head_of(answer).split()[1]), json.loads(body_of(answer))

    def test_a_web_page_cannot_start_a_run_and_its_operator_can(self) -> None:
        host = self.joined(self.controller, "gpu-a")
        port = self.controller.port
        for headers in (
            ("Host: evil.example:29500",),
            (f"Host: 127.0.0.1:{port}", "Origin: http://evil.example"),
            (f"Host: 127.0.0.1:{port}", "Origin: null"),
            (f"Host: 127.0.0.1:{port}", "Sec-Fetch-Site: cross-site"),
            ("Host: evil.example", "Content-Type: application/x-www-form-urlencoded"),
        ):
            with self.subTest(headers=headers):
                self.assertEqual(self.post(*headers)[0], 403)
        with self.subTest("two hosts"):
            self.assertEqual(self.post(f"Host: 127.0.0.1:{port}", "Host: evil.example")[0], 400)
        for method in ("GET", "HEAD", "PUT", "DELETE"):
            with self.subTest(method=method):
                head = head_of(self.controller.http(f"{method} /start HTTP/1.0\r\n\r\n".encode()))
                self.assertTrue(head.split("\r\n")[0].endswith("405 Method Not Allowed"), head)
                self.assertIn("\r\nallow: post", head.lower())
        smuggled = b"POST /nowhere HTTP/1.0\r\nContent-Length: 400\r\n\r\n" + SimulatedClient().hello(
            make_hello("gpu-x")
        )
        answer = self.controller.http(smuggled + bytes(400))
        self.assertTrue(answer.startswith(b"HTTP/1.1 404 ") or answer.startswith(b"HTTP/1.0 404 "), answer)
        self.assertTrue(ends(self.connect(self.controller, data=JOIN_MAGIC + b"POST /start HTTP/1.0\r\n\r\n")))
        state = self.controller.state()
        self.assertEqual((state["phase"], state["start_armed"], state["joined_hosts"]), ("staging", False, 1))
        status, body = self.post(version="1.0")
        self.assertEqual((status, body), (200, {"armed": True, "joined_ranks": 1, "min_rank_start": 1}))
        self.assertEqual(type(host.next()).__name__, "WorldFormed")

    def test_a_token_works_under_any_host(self) -> None:
        host = self.joined(self.controller, "gpu-a")
        assert host.talk.salt is not None
        status, _ = self.post("Host: evil.example:29500", query=f"?token={host.talk.salt.hex()}")
        self.assertEqual(status, 200)
        self.assertNotIn(host.talk.salt.hex(), self.controller.log)

    def test_curl_gets_the_state(self) -> None:
        curl = shutil.which("curl")
        if curl is None:
            self.skipTest("no curl here")
        url = f"http://127.0.0.1:{self.controller.port}/state.json"
        for options in ((), ("--http1.0",), ("--head",)):
            with self.subTest(options=options):
                done = subprocess.run(
                    [curl, "-sS", "--noproxy", "*", "--max-time", "5", *options, url],
                    capture_output=True,
                    text=True,
                )
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                if "--head" in options:
                    self.assertRegex(done.stdout, r"(?i)\AHTTP/1\.1 200 [\s\S]*content-length: [1-9]")
                else:
                    self.assertEqual(json.loads(done.stdout)["phase"], "waiting")
