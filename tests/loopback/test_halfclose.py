"""A peer that shuts its sending side, by kind, and closing towards peers that do not co-operate."""

from __future__ import annotations

import socket

from flodl_tw.core.messages import Abort, Accept, Reject, WorldFormed
from flodl_tw.testing import SimulatedClient, make_hello
from tests.loopback.process import (
    LOOPBACK,
    PATIENT,
    WAIT,
    ProcessTestCase,
    body_of,
    ends,
    head_of,
    read_all,
    until,
)


class HalfClose(ProcessTestCase):
    """One controller whose window stays open for all of these, and whose deadlines end nobody."""

    def setUp(self) -> None:
        self.controller = self.share("--min-rank-start", "1000000", scale=PATIENT)
        self.controller.state_is(joined_hosts=0)

    def half_closed(self, data: bytes) -> socket.socket:
        """A connection that has sent ``data`` and shut its side."""
        client = self.connect(self.controller, data=data)
        client.shutdown(socket.SHUT_WR)
        return client

    def test_an_http_client_gets_its_whole_answer_and_then_the_end(self) -> None:
        for path, status in (("/state.json", 200), ("/", 200), ("/nowhere", 404)):
            with self.subTest(path=path):
                answer = read_all(self.half_closed(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()))
                self.assertEqual(int(head_of(answer).split()[1]), status)
                self.assertIn(f"content-length: {len(body_of(answer))}", head_of(answer).lower())
                self.assertTrue(body_of(answer).endswith(b"}"))

    def test_an_answer_of_megabytes_arrives_whole_too(self) -> None:
        for number in range(50):
            self.joined(self.controller, f"gpu-{number}", 1, gpus=("x" * 250,) * 200)
        # A receive window far smaller than the answer keeps it going for many rounds after the FIN.
        client = socket.socket()
        self.addCleanup(client.close)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.settimeout(WAIT)
        client.connect((LOOPBACK, self.controller.port))
        client.sendall(b"GET /state.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        answer = read_all(client)
        self.assertGreater(len(answer), 2_500_000)
        self.assertIn(f"content-length: {len(body_of(answer))}", head_of(answer).lower())
        self.assertTrue(body_of(answer).endswith(b"]}"))

    def test_an_undecided_peer_is_closed(self) -> None:
        hello = SimulatedClient().hello(make_hello("never"))
        for data in (
            b"",
            b"G",
            b"\xe3\x17\x0d",
            hello[:4],
            hello[:20],
            hello[:-1],
            b"GET ",
            b"GET / HTTP/1.1\r\nHost: x",
        ):
            with self.subTest(data=data):
                self.assertTrue(ends(self.half_closed(data)))

    def test_a_joined_host_has_departed(self) -> None:
        host = self.joined(self.controller, "gpu-a", 2)
        self.assertEqual(self.controller.state()["joined_ranks"], 2)
        host.socket.shutdown(socket.SHUT_WR)
        self.assertEqual(host.rest(), [])
        self.controller.state_is(joined_ranks=0, joined_hosts=0)
        self.joined(self.controller, "gpu-a", 1)

    def test_a_hello_and_the_end_at_once_is_an_accept_and_a_departure(self) -> None:
        host = self.dial(self.controller)
        host.socket.sendall(host.talk.hello(make_hello("gpu-a")))
        host.socket.shutdown(socket.SHUT_WR)
        (answer,) = host.rest()
        self.assertIsInstance(answer, Accept)
        self.controller.state_is(joined_hosts=0)

    def test_a_reject_reaches_its_peer_before_the_close(self) -> None:
        self.joined(self.controller, "gpu-a")
        for after in (b"", b"more that nobody asked for" * 1000):
            with self.subTest(after=len(after)):
                host = self.dial(self.controller)
                host.socket.sendall(host.talk.hello(make_hello("gpu-a")) + after)
                answer = host.next()
                assert isinstance(answer, Reject)
                self.assertTrue(answer.reason.startswith("duplicate-host: "), answer.reason)
                self.assertTrue(ends(host.socket))

    def test_a_refused_peer_that_never_reads_and_never_closes_is_gone(self) -> None:
        self.joined(self.controller, "gpu-a")
        self.controller.state()
        quiet = self.controller.descriptors()
        before = self.controller.log.count("refused host 'none-")
        stuck = []
        for number in range(10):
            client = socket.socket()
            self.addCleanup(client.close)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            client.connect((LOOPBACK, self.controller.port))
            client.sendall(SimulatedClient().hello(make_hello(f"none-{number}", 0, gpus=("w" * 255,) * 100)))
            stuck.append(client)
        until(lambda: self.controller.log.count("refused host 'none-") == before + 10, "the refusals")
        until(lambda: self.controller.descriptors() <= quiet, "the refused are gone")

    def test_a_client_of_a_large_answer_that_does_not_read_is_kept_no_longer_than_its_write_stall(self) -> None:
        controller = self.start("--min-rank-start", "1000000", scale=0.1)
        for number in range(60):
            # A dial that says nothing for half a second is over, so each speaks before the next one dials.
            self.joined(controller, f"gpu-{number}", gpus=("x" * 255,) * 200)
        quiet = controller.descriptors()
        client = socket.socket()
        self.addCleanup(client.close)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((LOOPBACK, controller.port))
        client.sendall(b"GET /state.json HTTP/1.0\r\n\r\n")
        until(lambda: controller.descriptors() > quiet, "the client")
        # TCP_USER_TIMEOUT is 3 s here, and the kernel looks at it when a probe of its own falls due.
        # Unscaled it would be 30 s.
        until(lambda: controller.descriptors() <= quiet, "the end of the client", 25)


class HalfCloseAfterFormation(ProcessTestCase):
    """The world has formed: shutting a side early is a loss, and after the last exit it is the end."""

    def test_a_joined_host_that_shuts_its_side_is_lost(self) -> None:
        controller = self.start("--target-ranks", "2")
        hosts = [self.joined(controller, name) for name in ("gpu-a", "gpu-b")]
        for host in hosts:
            self.assertIsInstance(host.next(), WorldFormed)
        hosts[0].socket.shutdown(socket.SHUT_WR)
        (abort,) = hosts[1].rest()
        assert isinstance(abort, Abort)
        self.assertIn("'gpu-a'", abort.reason)
        self.assertIn("closed", abort.reason)
        self.assertEqual(controller.ended(), 1)

    def test_exits_and_the_end_in_one_segment_are_a_good_end(self) -> None:
        controller = self.start("--target-ranks", "2")
        host = self.joined(controller, "gpu-a", 2)
        self.assertIsInstance(host.next(), WorldFormed)
        host.socket.sendall(host.talk.exited(0, 0) + host.talk.exited(1, 0))
        host.socket.shutdown(socket.SHUT_WR)
        self.assertEqual(host.rest(), [])
        self.assertEqual(controller.ended(), 0)
