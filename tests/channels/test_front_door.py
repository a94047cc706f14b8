"""The front door: every connection finds its owner however its bytes come, and none of the rest is a nuisance."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from unittest import mock

from twisted.logger import LogLevel

from flodl_tw.channels.repeats import MOST_KINDS
from flodl_tw.core.messages import Accept
from flodl_tw.core.wire import (
    CONTROL_MAGIC,
    DATA_MAGIC,
    FRAME_MAGIC,
    HTTP_MAGICS,
    JOIN_MAGIC,
    RENDEZVOUS_MAGIC,
    STORE_MAGIC,
)
from flodl_tw.limits import MAX_WARNED_ADDRESSES, Limits
from flodl_tw.testing import ClockedController, FakeDial, SimulatedClient, make_hello
from tests.pumped import PumpedTestCase, window

GET = b"GET /state.json HTTP/1.1\r\nHost: 10.0.0.100\r\n\r\n"
UNSERVED = {RENDEZVOUS_MAGIC: "rendezvous", DATA_MAGIC: "data", CONTROL_MAGIC: "control", STORE_MAGIC: "store"}
METHODS = {b"GET ": "GET", b"POST": "POST", b"HEAD": "HEAD", b"OPTI": "OPTIONS", b"PUT ": "PUT"}
METHODS |= {b"DELE": "DELETE", b"PATC": "PATCH"}
DIALS = (
    *((magic, f"{METHODS[magic]} /start HTTP/1.1\r\nHost: 10.0.0.100\r\n\r\n".encode()) for magic in HTTP_MAGICS),
    (b"GET ", GET),
    (JOIN_MAGIC, SimulatedClient().hello(make_hello())),
    *((magic, magic + b"and what follows") for magic in UNSERVED),
    (b"SSH-", b"SSH-2.0-OpenSSH_9.6\r\n"),
    (b"\x16\x03\x01\x00", b"\x16\x03\x01\x00\xa5TLS"),
)


def undated(answer: bytes) -> bytes:
    """An answer without its date and the salt that is fresh for each run."""
    return re.sub(rb"(?im)^date:.*\r\n", b"", answer)


class SplitTests(PumpedTestCase):
    """A dial gets the same however its first bytes are split."""

    def outcome(self, parts: list[bytes]) -> tuple[object, ...]:
        """Everything that a peer and an operator can see of a dial whose parts come 1 s apart, then its end."""
        door = ClockedController()
        self.forget()
        dial = door.dial("10.0.0.7")
        for part in parts[:-1]:
            dial.send(part)
            door.clock.advance(1)
        door.clock.advance(4.5 - door.clock.seconds())
        dial.send(parts[-1])
        door.turn()
        answer = undated(dial.received())
        if parts[0][:1] == JOIN_MAGIC[:1] and answer:
            (accept,) = dial.talk.feed(answer)
            self.assertIsInstance(accept, Accept)
            answer = repr((accept.ranks, accept.formation_wait_secs)).encode()
        lines = self.lines()
        ended = dict(door.ends())
        state = door.state()
        dial.reset()
        return answer, dial.closed, lines, ended, state

    def test_a_prefix_may_come_in_any_pieces(self) -> None:
        for magic, whole in DIALS:
            expected = self.outcome([whole])
            if magic in HTTP_MAGICS:
                self.assertTrue(expected[0].startswith(b"HTTP/1.1 "), magic)
            for size in (1, 2, 3, 4):
                for cuts in combinations((1, 2, 3, 4), size):
                    edges = (0, *cuts, len(whole))
                    parts = [whole[start:end] for start, end in pairwise(edges)]
                    self.assertEqual(self.outcome(parts), expected, f"{magic!r} cut at {cuts}")

    def test_a_hello_and_a_request_may_be_cut_anywhere(self) -> None:
        for _, whole in ((JOIN_MAGIC, SimulatedClient().hello(make_hello())), (b"GET ", GET)):
            expected = self.outcome([whole])
            for cut in range(1, len(whole)):
                self.assertEqual(self.outcome([whole[:cut], whole[cut:]]), expected, f"{whole!r} cut at {cut}")

    def test_the_owner_gets_every_byte_once_and_in_order(self) -> None:
        class Recorder:
            def __init__(self) -> None:
                self.data: list[bytes] = []

            def makeConnection(self, transport: object) -> None:
                self.data.append(b"made")

            def dataReceived(self, data: bytes) -> None:
                self.data.append(data)

            def connectionLost(self, reason: object) -> None:
                self.data.append(b"lost")

        for parts in ([b"ab", b"cd", b"efg", b"h"], [b"a", b"b", b"c", b"d", b"e"], [b"abcdefgh"], [b"abc", b"defgh"]):
            door = ClockedController()
            recorder = Recorder()
            door.front.routes = {b"abcd": mock.Mock(buildProtocol=mock.Mock(return_value=recorder))}
            dial = door.dial()
            for part in parts:
                dial.send(part)
            self.assertEqual(recorder.data[0], b"made")
            self.assertEqual(b"".join(recorder.data[1:]), b"".join(parts))
            dial.reset()
            self.assertEqual(recorder.data[-1], b"lost")
            self.assertEqual(recorder.data.count(b"lost"), 1)

    def test_join_bytes_in_a_request_and_a_request_in_a_join_reach_nobody_else(self) -> None:
        door = ClockedController()
        body = SimulatedClient().hello(make_hello())
        answer = door.http(b"POST /start HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        self.assertTrue(answer.startswith(b"HTTP/1.1 403 "))
        dial = door.dial()
        dial.send(JOIN_MAGIC + GET)
        door.turn()
        self.assertEqual((dial.received(), dial.closed), (b"", True))
        self.assertEqual(door.state()["joined_hosts"], 0)


class DropTests(PumpedTestCase):
    """What is dropped, with one line each, and what is only counted."""

    def setUp(self) -> None:
        super().setUp()
        self.door = ClockedController()
        self.forget()

    def test_each_drop_has_one_line_that_names_the_peer_and_the_reason(self) -> None:
        table = (
            (b"SSH-2.0-x\r\n", "unknown-channel", "it speaks SSH: its client has the wrong port"),
            (b"PROXY TCP4 10.0.0.7 10.0.0.1 4 5\r\n", "unknown-channel", "a PROXY protocol header: the proxy in front"),
            (b"\r\n\r\n\0\r\nQUIT\n\x21", "unknown-channel", "PROXY protocol header of version 2: the proxy in front"),
            (b"\x16\x03\x01\2\0\1\0", "unknown-channel", "it speaks TLS: this port has none: write http://"),
            (b"\x16\x03\x03\2\0\1\0", "unknown-channel", "it speaks TLS"),
            (b"PRI * HTTP/2.0\r\n\r\n", "unknown-channel", "it speaks HTTP/2: this port has HTTP/1.1 alone"),
            (b"CONNECT ctl:29500 HTTP/1.1\r\n", "unknown-channel", "it speaks HTTP's CONNECT: this port is no proxy"),
            (b"\x16\x07\x01\2", "unknown-channel", "its first bytes 16070102 are no channel's"),
            (b"\0\0\0\0", "unknown-channel", "00000000"),
            (b"get / HTTP/1.1\r\n", "unknown-channel", "67657420"),
            (b"\3\5\0\0\0\0\0\0\0init/", "unknown-channel", "the store of torch before 2.2, which is another"),
            *((magic, "unserved-channel", f"the {name} channel") for magic, name in UNSERVED.items()),
        )
        for sent, word, reason in table:
            self.door = ClockedController()
            self.forget()
            dial = self.door.dial("10.0.0.5", port=4711)
            dial.send(sent)
            self.door.turn()
            self.assertTrue(dial.closed, sent)
            self.assertTrue(dial.transport.aborted, sent)
            self.assertEqual(dial.received(), b"")
            self.line("10.0.0.5:4711", reason, level=LogLevel.info)
            self.assertEqual(len(self.lines()), 1)
            self.assertEqual(self.door.ends(), {word: 1})

    def test_only_what_looks_like_an_old_torch_is_told_which_torch_is_needed(self) -> None:
        for sent, told in ((b"\3\5\0\0", True), (b"\3\0\0\0", True), (b"\3\5\0\1", False), (b"\4\5\0\0", False)):
            door = ClockedController()
            self.forget()
            door.dial().send(sent)
            (line,) = self.lines()
            self.assertEqual("torch 2.2 or newer is needed" in line, told, line)

    def test_the_deadline_of_the_first_four_bytes_is_five_seconds_from_the_accept(self) -> None:
        for sent in (b"", b"\xe3", b"GE", JOIN_MAGIC[:3]):
            self.door = ClockedController()
            self.forget()
            dial = self.door.dial("10.0.0.5", port=4711)
            self.door.clock.advance(4)
            dial.send(sent) if sent else None
            self.door.clock.advance(0.999)
            self.assertFalse(dial.transport.aborted, sent)
            self.door.clock.advance(0.001)
            self.door.turn()
            self.assertTrue(dial.closed, sent)
            self.line("10.0.0.5:4711", "no channel within 5 s")
            self.assertEqual(len(self.lines()), 1)

    def test_the_deadline_is_the_scaled_one(self) -> None:
        door = ClockedController(limits=Limits.at(3))
        dial = door.dial()
        door.clock.advance(14.9)
        self.assertFalse(dial.transport.aborted)
        door.clock.advance(0.1)
        self.assertTrue(dial.transport.aborted)

    def test_30000_noises_of_one_address_are_a_line_and_a_count_a_minute(self) -> None:
        for _ in range(3):
            for _ in range(10_000):
                self.door.dial("10.0.0.5").send(b"\0\0\0\0")
            self.door.clock.advance(10)
        self.door.dial("10.0.0.6").send(b"\0\0\0\0")
        self.door.dial("10.0.0.5").send(RENDEZVOUS_MAGIC)
        self.assertEqual(len(self.lines()), 3)
        self.door.clock.advance(31)
        self.line("29999 more from 10.0.0.5 within 60 s (unknown-channel), the last one: dropped 10.0.0.5:")
        self.door.dial("10.0.0.5").send(b"\0\0\0\0")
        self.assertEqual(len(self.lines()), 4)
        self.door.clock.advance(61)
        self.line("1 more from 10.0.0.5")
        self.door.clock.advance(61)
        self.door.dial("10.0.0.5").send(b"\0\0\0\0")
        self.assertEqual(len(self.lines()), 6)

    def test_a_flood_from_many_addresses_has_a_bound_on_its_lines(self) -> None:
        for number in range(3000):
            self.door.dial(f"10.1.{number >> 8}.{number & 255}").send(b"\0\0\0\0")
        self.assertEqual(len(self.lines()), MOST_KINDS + 1)
        self.door.clock.advance(61)
        self.line(f"{3000 - MOST_KINDS - 1} more from other addresses")

    def test_what_was_only_counted_is_told_at_the_end(self) -> None:
        for _ in range(3):
            self.door.dial("10.0.0.5").send(b"\0\0\0\0")
        self.door.server.stopService()
        self.door.clock.advance(5)
        self.line("2 more from 10.0.0.5")
        self.assert_idle(self.door)

    def test_a_silent_dial_delays_nobody(self) -> None:
        silent = [self.door.dial(port=port) for port in range(100)]
        self.assertIsInstance(self.door.dial().join(), Accept)
        self.assertTrue(self.door.http(GET).startswith(b"HTTP/1.1 200 "))
        self.assertFalse(any(dial.closed for dial in silent))

    def test_a_second_chunk_after_a_drop_does_nothing(self) -> None:
        dial = self.door.dial("10.0.0.5")
        dial.send(b"SSH-")
        dial.send(SimulatedClient().hello(make_hello()))
        dial.send(b"SSH-")
        self.door.turn()
        self.assertEqual(len(self.lines()), 1)
        self.assertEqual(self.door.ends(), {"unknown-channel": 1})
        self.assertEqual(self.door.state()["joined_hosts"], 0)

    def test_a_probe_of_fewer_than_four_bytes_is_counted_alone(self) -> None:
        ends = (FakeDial.hang_up, FakeDial.reset)
        for end in ends:
            for sent in (b"", b"G", b"\xe3\x17", JOIN_MAGIC[:3]):
                dial = self.door.dial()
                if sent:
                    dial.send(sent)
                end(dial)
                self.door.turn()
                self.assertTrue(dial.closed)
        self.door.clock.advance(60)
        self.assertEqual(self.lines(), [])
        self.assertEqual(self.lines(LogLevel.debug), [])
        self.assertEqual(self.door.ends(), {"before-channel": 8})
        self.assertEqual((len(self.door.front), len(self.door.front.pending)), (0, 0))

    def test_a_cut_off_hello_is_counted_alone(self) -> None:
        whole = SimulatedClient().hello(make_hello())
        count = 0
        for end in (FakeDial.hang_up, FakeDial.reset):
            for cut in (4, 5, 8, 27, 28, 29, len(whole) - 1):
                dial = self.door.dial()
                dial.send(whole[:cut])
                end(dial)
                self.door.turn()
                count += 1
                self.assertTrue(dial.closed, cut)
        self.door.clock.advance(60)
        self.assertEqual(self.lines(), [])
        self.assertEqual(self.door.ends(), {"cut-off-hello": count})

    def test_a_cut_off_request_is_counted_however_it_ends(self) -> None:
        count = 0
        for end in (FakeDial.hang_up, FakeDial.reset):
            for sent in (b"GET ", b"GET / HT", GET[:-1]):
                dial = self.door.dial()
                dial.send(sent)
                end(dial)
                self.door.turn()
                count += 1
                self.assertEqual((dial.received(), dial.closed), (b"", True), sent)
        self.door.clock.advance(60)
        self.assertEqual(self.lines(), [])
        self.assertEqual(self.door.ends(), {"cut-off-request": count})

    def test_a_thousand_probes_change_nothing(self) -> None:
        before = self.door.state()
        for number in range(1000):
            dial = self.door.dial()
            dial.send((JOIN_MAGIC + FRAME_MAGIC)[: number % 9] or b"\xe3")
            dial.hang_up() if number % 2 else dial.reset()
        self.door.turn()
        self.assertEqual(self.lines(), [])
        self.assertEqual(self.door.state(), before)
        self.assertEqual(sum(self.door.ends().values()), 1000)
        self.assertEqual((len(self.door.front), len(self.door.front.pending)), (0, 0))


class HalfCloseTests(PumpedTestCase):
    """A peer that shuts its sending side, per kind of connection."""

    def test_an_undecided_peer_is_closed(self) -> None:
        for sent in (b"", b"GE", JOIN_MAGIC, JOIN_MAGIC + FRAME_MAGIC):
            door = ClockedController()
            dial = door.dial()
            if sent:
                dial.send(sent)
            dial.half_close()
            door.turn()
            self.assertEqual((dial.closed, dial.received()), (True, b""), sent)

    def test_a_member_departs(self) -> None:
        door = ClockedController(window(min_rank_start=2))
        dial = door.dial()
        dial.join()
        dial.half_close()
        self.assertEqual(door.state()["joined_hosts"], 0)
        door.turn()
        self.assertTrue(dial.closed)

    def test_http_gets_its_answer(self) -> None:
        door = ClockedController()
        dial = door.dial()
        dial.send(GET)
        dial.half_close()
        door.turn()
        self.assertTrue(dial.received().startswith(b"HTTP/1.1 200 OK\r\n"))
        self.assertTrue(dial.closed)

    def test_a_peer_that_is_refused_still_gets_its_reject(self) -> None:
        door = ClockedController()
        dial = door.dial()
        dial.send(dial.talk.hello(make_hello(host=" ")))
        dial.half_close()
        door.turn()
        (reject,) = dial.messages()
        self.assertTrue(reject.reason.startswith("bad-host: "))
        self.assertTrue(dial.closed)
        self.assertEqual(door.ends(), {})


class PublicPeerTests(PumpedTestCase):
    """A peer from outside the private ranges is warned about, once an address."""

    def warnings(self) -> list[str]:
        return [line for line in self.lines(LogLevel.warn) if "public address" in line]

    def test_public_and_private_addresses_are_told_apart(self) -> None:
        table = (
            ("127.0.0.1", False),
            ("127.200.0.9", False),
            ("10.255.0.1", False),
            ("172.16.0.1", False),
            ("172.31.255.255", False),
            ("192.168.4.4", False),
            ("169.254.1.1", False),
            ("100.64.0.1", False),
            ("100.127.255.255", False),
            ("::1", False),
            ("fe80::1", False),
            ("fd00::1", False),
            ("::ffff:10.0.0.1", False),
            ("8.8.8.8", True),
            ("172.32.0.1", True),
            ("192.0.2.1", True),
            ("100.128.0.1", True),
            ("2001:db8::1", True),
            ("::ffff:9.9.9.9", True),
        )
        door = ClockedController()
        for host, public in table:
            self.forget()
            door.dial(host)
            self.assertEqual(len(self.warnings()), int(public), host)

    def test_the_warning_comes_once_an_address_and_shows_a_mapped_one_as_ipv4(self) -> None:
        door = ClockedController()
        for host in ("::ffff:8.8.8.8", "8.8.8.8", "::ffff:8.8.8.8"):
            door.dial(host)
        (warning,) = self.warnings()
        self.assertTrue(warning.startswith("8.8.8.8 is a public address"), warning)
        door.dial("8.8.4.4")
        self.assertEqual(len(self.warnings()), 2)

    def test_the_memory_of_addresses_is_bounded(self) -> None:
        door = ClockedController(max_pending=1 << 20)
        for number in range(MAX_WARNED_ADDRESSES + 50):
            door.dial(f"8.8.{number // 250}.{number % 250}").reset()
        remembered = door.front._warned  # the one place where the bound can be seen
        self.assertLessEqual(len(remembered), MAX_WARNED_ADDRESSES)
        self.assertGreaterEqual(len(self.warnings()), MAX_WARNED_ADDRESSES)

    def test_log_lines_show_a_mapped_peer_as_ipv4_and_an_ipv6_one_in_brackets(self) -> None:
        door = ClockedController()
        for host, shown in (("::ffff:10.1.2.3", "10.1.2.3:77"), ("fd00::7", "[fd00::7]:77")):
            self.forget()
            door.dial(host, port=77).send(b"SSH-")
            self.line(f"dropped {shown}:")


class CloseAllTests(PumpedTestCase):
    """The end of the process."""

    def closing(self, door: ClockedController) -> list[float]:
        """The moments at which the server said that it has stopped."""
        fired: list[float] = []
        door.server.stopService().addCallback(lambda _: fired.append(door.clock.seconds()))
        return fired

    def test_an_empty_door_is_closed_at_once(self) -> None:
        door = ClockedController()
        self.assertEqual(self.closing(door), [0])

    def test_the_undecided_go_at_once_and_leave_no_call_behind(self) -> None:
        door = ClockedController()
        dials = [door.dial(port=port) for port in range(5)]
        for dial, sent in zip(dials, (b"", b"GE", JOIN_MAGIC, JOIN_MAGIC + FRAME_MAGIC, b"GET / HT"), strict=True):
            if sent:
                dial.send(sent)
        fired = self.closing(door)
        door.turn()
        self.assertEqual([dial.transport.aborted for dial in dials], [True] * 5)
        self.assertEqual(fired, [0])
        self.assertEqual(self.flushLoggedErrors(), [])
        self.assert_idle(door)

    def test_a_peer_that_does_not_read_is_aborted_after_two_seconds(self) -> None:
        door = ClockedController(window(min_rank_start=9))
        readers = door.dial("10.0.0.1"), door.dial("10.0.0.2", reads=False)
        for number, dial in enumerate(readers):
            dial.join(host=f"h{number}")
        door.turn()
        fired = self.closing(door)
        door.turn()
        self.assertEqual([dial.closed for dial in readers], [True, False])
        door.clock.advance(1.999)
        self.assertFalse(readers[1].transport.aborted)
        self.assertEqual(fired, [])
        door.clock.advance(0.001)
        door.turn()
        self.assertTrue(readers[1].closed)
        self.assertEqual(fired, [2])

    def test_after_a_stop_nothing_is_left_on_the_clock(self) -> None:
        door = ClockedController(window(min_rank_start=9))
        for number, reads in enumerate((True, False)):
            door.dial(reads=reads).join(host=f"h{number}")
        door.dial(reads=False).send(JOIN_MAGIC)
        door.dial(reads=False).send(b"GET / HT")
        door.dial(reads=False)
        fired = self.closing(door)
        door.clock.advance(2)
        door.turn()
        self.assertEqual(fired, [2])
        self.assert_idle(door)

    def test_who_comes_while_the_door_closes_is_dropped(self) -> None:
        door = ClockedController(window(min_rank_start=9))
        door.dial(reads=False).join()
        fired = self.closing(door)
        late = door.dial("10.0.0.9")
        door.turn()
        self.assertTrue(late.closed)
        self.assertEqual(fired, [])
        door.clock.advance(2)
        self.assertEqual(fired, [2])

    def test_who_comes_after_the_door_closed_is_dropped_and_breaks_nothing(self) -> None:
        door = ClockedController()
        fired = self.closing(door)
        late = door.dial("10.0.0.9")
        door.turn()
        self.assertTrue(late.closed)
        self.assertEqual(fired, [0])
