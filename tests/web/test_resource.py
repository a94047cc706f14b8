"""The status channel: the state and the page, over one connection a request, whoever asks and however."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any
from unittest import mock

from twisted.logger import LogLevel

from flodl_tw.core.reports import RankError
from flodl_tw.core.run_settings import AfterRun, OnLoss
from flodl_tw.core.store.wire import Opcode, StoreLimits
from flodl_tw.core.window import StartMode
from flodl_tw.limits import Limits
from flodl_tw.testing import ClockedController, FakeDial, make_hello
from flodl_tw.web.page import page
from tests.core.store.queries import HELLO, many, q
from tests.pumped import MANUAL, TOKEN, PumpedTestCase, window

STATE = b"GET /state.json HTTP/1.1\r\nHost: ctl:29500\r\n\r\n"
PAGE = b"GET / HTTP/1.1\r\nHost: ctl:29500\r\nAccept: text/html,*/*\r\n\r\n"
KEYS = [
    "phase",
    "joined_ranks",
    "joined_hosts",
    "min_rank_start",
    "target_ranks",
    "window_remaining_secs",
    "cap_remaining_secs",
    "start_mode",
    "start_armed",
    "members",
]
MEMBER_KEYS = ["host", "ranks", "local_devices", "gpus", "libtorch", "joined_at_secs"]
NOT_FOUND = (
    b'{"error":"not found","endpoints":["GET /state.json","POST /start","POST /abort","POST /check",'
    b'"GET /run.json","GET /store.json"]}'
)


def ask(method: str, path: str, *headers: str, version: str = "1.1") -> bytes:
    """A request with a Host and these headers."""
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: ctl:29500", *headers, "", ""]).encode("latin-1")


class Answer:
    """An HTTP answer, taken apart; whatever is after its length stays in ``rest``."""

    def __init__(self, data: bytes, bodiless: bool = False) -> None:
        head, _, rest = data.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        self.code = int(status.split(" ")[1])
        pairs = [line.partition(": ") for line in lines]
        self.headers = {name.lower(): value for name, _, value in pairs}
        self.repeated = len(pairs) != len(self.headers)
        self.length = int(self.headers.get("content-length", -1))
        size = 0 if bodiless else self.length
        self.body, self.rest = rest[:size], rest[size:]


class StatusTestCase(PumpedTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.door = ClockedController(window(start_mode=MANUAL, min_rank_start=2))
        self.forget()

    def request(self, data: bytes, *, bodiless: bool = False, door: ClockedController | None = None) -> Answer:
        """The answer; checks that nothing failed, that the connection is closed and that one answer came."""
        door = door or self.door
        dial = door.dial("127.0.0.1")
        dial.send(data)
        door.turn()
        shown = data[:100]
        answer = Answer(dial.received(), bodiless)
        self.assertTrue(dial.closed, shown)
        self.assertEqual(answer.rest, b"", shown)
        self.assertEqual(self.flushLoggedErrors(), [], shown)
        return answer


class StateTests(StatusTestCase):
    def test_the_state_before_anybody_joined(self) -> None:
        answer = self.request(STATE)
        self.assertEqual(answer.code, 200)
        self.assertEqual(
            answer.body,
            b'{"phase":"waiting","joined_ranks":0,"joined_hosts":0,"min_rank_start":2,"target_ranks":null,'
            b'"window_remaining_secs":300,"cap_remaining_secs":600,"start_mode":"manual","start_armed":false,'
            b'"members":[]}',
        )

    def test_a_member_as_the_reference_shows_it(self) -> None:
        self.door.clock.advance(1.9)
        self.door.dial().join(make_hello('b "quoted" ü', local_devices=b"\7", gpus=("<b>",), libtorch=""))
        self.door.clock.advance(0.2)
        state = self.request(STATE).body
        self.assertEqual(list(json.loads(state)), KEYS)
        self.assertEqual(list(json.loads(state)["members"][0]), MEMBER_KEYS)
        self.assertTrue(
            state.endswith(
                ',"window_remaining_secs":297,"cap_remaining_secs":597,"start_mode":"manual","start_armed":false,'
                '"members":[{"host":"b \\"quoted\\" ü","ranks":[0],"local_devices":[7],"gpus":["<b>"],'
                '"libtorch":"","joined_at_secs":1}]}'.encode()
            ),
            state,
        )

    def test_countdowns_are_true_when_asked(self) -> None:
        for elapsed, left in ((0, (300, 600)), (0.1, (299, 599)), (300.5, (None, 299)), (599.5, (None, 0))):
            door = ClockedController(window(min_rank_start=2))
            door.clock.advance(elapsed)
            state = json.loads(self.request(STATE, door=door).body)
            self.assertEqual((state["window_remaining_secs"], state["cap_remaining_secs"]), left, elapsed)

    def test_the_headers_are_those_of_the_contract(self) -> None:
        for data in (STATE, ask("GET", "/"), ask("GET", "/nope"), ask("POST", "/start"), ask("PUT", "/start")):
            answer = self.request(data)
            self.assertFalse(answer.repeated, data)
            self.assertEqual(answer.length, len(answer.body), data)
            self.assertGreater(answer.length, 0)
            self.assertNotIn("transfer-encoding", answer.headers)
            for name, value in (
                ("content-type", "application/json"),
                ("cache-control", "no-cache"),
                ("access-control-allow-origin", "*"),
                ("connection", "close"),
            ):
                self.assertEqual(answer.headers.get(name), value, (data, name))

    def test_the_state_says_that_heartbeats_are_taken(self) -> None:
        self.assertEqual(self.request(STATE).headers.get("flodl-tw-heartbeats"), "1")

    def test_the_root_is_the_state_unless_html_is_asked_for(self) -> None:
        state = self.request(STATE).body
        for headers in ((), ("Accept: */*",), ("Accept: application/json",)):
            self.assertEqual(self.request(ask("GET", "/", *headers)).body, state)
        self.assertTrue(self.request(PAGE).body.startswith(b"<!DOCTYPE html>"))

    def test_a_query_changes_nothing(self) -> None:
        self.assertEqual(self.request(ask("GET", "/state.json?x=1&y")).body, self.request(STATE).body)

    def test_http_1_0_without_a_host_is_fine(self) -> None:
        for path in (b"/", b"/state.json"):
            answer = self.request(b"GET " + path + b" HTTP/1.0\r\n\r\n")
            self.assertEqual((answer.code, answer.headers["connection"]), (200, "close"))
            self.assertEqual(list(json.loads(answer.body)), KEYS)

    def test_keep_alive_is_not_granted(self) -> None:
        for version in ("1.0", "1.1"):
            answer = self.request(ask("GET", "/", "Connection: keep-alive", version=version))
            self.assertEqual(answer.headers["connection"], "close")

    def test_head_is_get_without_the_body(self) -> None:
        for path in ("/", "/state.json", "/nope"):
            get = self.request(ask("GET", path))
            head = self.request(ask("HEAD", path), bodiless=True)
            self.assertEqual((head.code, head.length, head.body), (get.code, get.length, b""), path)

    def test_a_pipelined_request_gets_no_second_answer(self) -> None:
        for follows in (STATE, STATE * 1000, ask("POST", "/start"), b"x" * 100_000):
            answer = self.request(STATE + follows)
            self.assertEqual(answer.code, 200)
        self.assertFalse(self.door.state()["start_armed"])

    def test_a_request_in_pieces_gets_the_same(self) -> None:
        whole = self.request(STATE).body
        dial = self.door.dial()
        for byte in STATE:
            dial.send(bytes((byte,)))
        self.door.turn()
        self.assertEqual(Answer(dial.received()).body, whole)


class OtherTests(StatusTestCase):
    """Everything that is not the state."""

    def test_an_unknown_path_is_404_with_the_endpoints(self) -> None:
        paths = ("/nope", "/state.json/", "/state", "/start/", "/START", "/%2e%2e/etc/passwd")
        for path in (*paths, "/a/../start", "/%C3%BC", "/%00", "/<script>", "/;", "/start%20"):
            answer = self.request(ask("GET", path))
            self.assertEqual((answer.code, answer.body), (404, NOT_FOUND), path)

    def test_a_path_with_a_slash_too_many_is_another_path(self) -> None:
        for method, path in (("GET", "//state.json"), ("GET", "/%2Fstate.json"), ("POST", "//start"), ("GET", "*")):
            answer = self.request(ask(method, path))
            self.assertEqual((answer.code, answer.body), (404, NOT_FOUND), path)

    def test_an_unknown_path_is_404_whatever_the_method(self) -> None:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            answer = self.request(ask(method, "/nope"))
            self.assertEqual((answer.code, answer.body), (404, NOT_FOUND), method)

    def test_another_method_on_a_known_path_is_405_with_allow(self) -> None:
        table = (
            ("/", ("POST", "PUT", "DELETE", "PATCH"), {"GET", "HEAD"}),
            ("/state.json", ("POST", "PUT", "DELETE", "PATCH"), {"GET", "HEAD"}),
            ("/start", ("GET", "HEAD", "PUT", "DELETE", "PATCH"), {"POST"}),
            ("/abort", ("GET", "HEAD", "PUT", "DELETE", "PATCH"), {"POST"}),
            ("/check", ("GET", "HEAD", "PUT", "DELETE", "PATCH"), {"POST"}),
            ("/run.json", ("POST", "PUT", "DELETE", "PATCH"), {"GET", "HEAD"}),
            ("/store.json", ("POST", "PUT", "DELETE", "PATCH"), {"GET", "HEAD"}),
        )
        for path, methods, allowed in table:
            for method in methods:
                answer = self.request(ask(method, path), bodiless=method == "HEAD")
                self.assertEqual(answer.code, 405, (method, path))
                self.assertEqual(set(answer.headers["allow"].split(", ")), allowed, (method, path))
                if method != "HEAD":
                    self.assertEqual(list(json.loads(answer.body)), ["error"])

    def test_a_balancers_probe_is_answered_well_and_in_silence(self) -> None:
        self.forget()
        probes = (
            (ask("HEAD", "/"), 200),
            (ask("HEAD", "/state.json", "Accept: text/html", version="1.0"), 200),
            (b"OPTIONS / HTTP/1.0\r\n\r\n", 204),
            (ask("OPTIONS", "*"), 204),
            (ask("OPTIONS", "/state.json"), 204),
        )
        for data, code in probes:
            dial = self.door.dial("10.0.0.9")
            dial.send(data)
            self.door.turn()
            answer = Answer(dial.received(), bodiless=True)
            self.assertEqual((answer.code, answer.rest, dial.closed), (code, b"", True), data)
            if code == 204:
                self.assertEqual(set(answer.headers["allow"].split(", ")), {"GET", "HEAD"})
                self.assertNotIn("content-length", answer.headers)
        for end in ("hang_up", "reset"):
            getattr(self.door.dial("10.0.0.9"), end)()
            self.door.turn()
        self.assertEqual(self.lines(), [])

    def test_odd_hosts_and_paths_never_fail(self) -> None:
        hosts = (b"a..b", b"a" * 300, b"\xff\xfe", b"", b"[::1", b"x:y:z", b"\xc3\xbc.example", b"ctl:99999999", b"/")
        for host in hosts:
            for path, code in ((b"/state.json", 200), (b"/", 200), (b"/nope", 404)):
                for accept in (b"*/*", b"text/html"):
                    data = b"GET " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\nAccept: " + accept + b"\r\n\r\n"
                    self.assertEqual(self.request(data).code, code, data)
        for path in (b"/\xff", b"/%ff", b"/%", b"/%zz", b"/\xc3\xbc", b"*", b"state.json", b"http://ctl/state.json"):
            for method in (b"GET", b"OPTIONS", b"POST", b"PUT"):
                data = method + b" " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n"
                self.assertLess(self.request(data).code, 500, data)
        self.assertEqual(self.lines(LogLevel.warn), [])

    def test_broken_requests_never_fail(self) -> None:
        for data in (
            b"GET \r\n\r\n",
            b"GET / HTTP/1.1 extra\r\n\r\n",
            b"GET /\r\n\r\n",
            b"GET / FTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
            b"GET / HTTP/1.1\r\n: no name\r\n\r\n",
            b"GET / HTTP/1.1\r\nA\0B: c\r\n\r\n",
            ask("POST", "/start", "Content-Length: x"),
            ask("POST", "/start", "Content-Length: -1"),
            ask("POST", "/start", "Content-Length: 1", "Content-Length: 2"),
            ask("POST", "/start", "Content-Length: 4", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
            ask("POST", "/start", "Transfer-Encoding: gzip"),
            ask("POST", "/start", "Transfer-Encoding: chunked") + b"zz\r\n",
            b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 600 + b"\r\n",
        ):
            answer = self.request(data)
            self.assertIn(answer.code, (200, 400, 403, 404, 409, 413, 431, 501, 505), data)
            self.assertFalse(self.door.state()["start_armed"], data)


class WorldTests(StatusTestCase):
    """What ``state.json`` has no keys for: the store of the world, and why it failed."""

    def formed(self, store: StoreLimits | None = StoreLimits()) -> ClockedController:  # noqa: B008  it is frozen
        """A world of two hosts with a rank each, at 10.0.0.1 and 10.0.0.2."""
        door = ClockedController(replace(window(target_ranks=2), store=store))
        self.hosts = [door.dial(f"10.0.0.{number}") for number in (1, 2)]
        for number, dial in enumerate(self.hosts):
            dial.join(host=f"h{number}")
        door.turn()
        for dial in self.hosts:
            dial.messages()
        return door

    def body(self, path: str, door: ClockedController | None = None) -> Any:
        answer = self.request(ask("GET", path), door=door)
        self.assertEqual((answer.code, answer.headers["content-type"]), (200, "application/json"))
        return json.loads(answer.body)

    def test_before_a_world_there_is_nothing_to_tell(self) -> None:
        self.assertEqual(
            self.body("/run.json"),
            {
                "run_id": self.door.controller.run.run_id,
                "phase": "waiting",
                "failure": None,
                "exited_ranks": 0,
                "rank_errors": [],
                "previous": [],
            },
        )
        self.assertEqual(self.body("/store.json"), {"store": None})
        self.assertNotIn("<h2>Store</h2>", self.request(PAGE).body.decode())

    def test_without_a_store_there_is_none(self) -> None:
        door = self.formed(None)
        self.assertEqual(self.body("/store.json", door), {"store": None})
        self.assertNotIn("<h2>Store</h2>", self.request(PAGE, door=door).body.decode())

    def test_who_waits_for_what_and_for_how_long(self) -> None:
        door = self.formed()
        for host in ("10.0.0.1", "10.0.0.2"):
            client = door.dial(host)
            client.send(HELLO + q(Opcode.ADD, b"init/", 1) + many(Opcode.WAIT, b"/<b>&\0"))
            door.clock.advance(20)
        self.assertEqual(
            self.body("/store.json", door),
            {
                "store": {
                    "world_size": 2,
                    "connected": 2,
                    "workers": 2,
                    "keys": 1,
                    "queue_items": 0,
                    "bytes": 6,
                    "held_bytes": 612,
                    "max_keys": 1000000,
                    "max_bytes": 268435456,
                    "waiting": [{"key": "/<b>&\0", "clients": 2, "seconds": 40}],
                }
            },
        )
        text = self.request(PAGE, door=door).body.decode()
        self.assertIn(
            "<h2>Store</h2><p>2 of 2 ranks came to the store; it has 2 connections, 1 key and 6 bytes</p>"
            "<p>2 clients have been waiting for /&lt;b&gt;&amp;\\x00, the first for 40 s</p>",
            text,
        )

    def test_what_a_rank_died_of_is_told_and_escaped(self) -> None:
        door = self.formed()
        dial = self.hosts[1]
        dial.send(dial.talk.reported(1, RankError("E", "<script>&", "a.py:1 in f")) + dial.talk.exited(1, 1))
        door.turn()
        failure = "rank 1 of host 'h1' exited with code 1 (E: <script>&, at a.py:1 in f)"
        self.assertEqual(
            self.body("/run.json", door),
            {
                "run_id": door.controller.run.run_id,
                "phase": "failed",
                "failure": failure,
                "exited_ranks": 1,
                "rank_errors": [{"rank": 1, "type": "E", "message": "<script>&", "line": "a.py:1 in f"}],
                "previous": [],
            },
        )
        text = self.request(PAGE, door=door).body.decode()
        self.assertIn("exited with code 1 (E: &lt;script&gt;&amp;, at a.py:1 in f)</p>", text)
        self.assertIn("<td>1 of 1, rank 1 with code 1 (E: &lt;script&gt;&amp;, at a.py:1 in f)</td>", text)
        self.assertNotIn("<script>", text)


class HeldTests(StatusTestCase):
    """``/run.json?wait=RUN_ID`` is answered when that run is over, or after a while."""

    def held(self, door: ClockedController, run_id: str | None = None) -> FakeDial:
        dial = door.dial("127.0.0.1")
        dial.send(ask("GET", f"/run.json?wait={run_id or door.controller.run.run_id}"))
        door.turn()
        return dial

    def told(self, dial: FakeDial) -> Any:
        return json.loads(Answer(dial.received()).body)

    def test_it_is_answered_when_the_run_is_over_though_the_next_one_is_open(self) -> None:
        door = ClockedController(window(target_ranks=1), after_run=AfterRun.REARM)
        run_id = door.controller.run.run_id
        dials = [self.held(door) for _ in range(3)]
        host = door.dial()
        host.join()
        door.turn()
        self.assertEqual([dial.received() for dial in dials], [b"", b"", b""])
        host.messages()
        host.send(host.talk.exited(0, 1))
        door.turn()
        for dial in dials:
            told = self.told(dial)
            self.assertNotEqual(told["run_id"], run_id)
            failure = "rank 0 of host 'gpu-a' exited with code 1"
            self.assertEqual(told["previous"], [{"run_id": run_id, "phase": "failed", "failure": failure}])

    def test_it_is_answered_after_a_while_and_when_the_controller_stops(self) -> None:
        first = self.held(self.door)
        self.door.clock.advance(20)
        self.assertEqual(self.told(first)["phase"], "waiting")
        second = self.held(self.door)
        self.door.controller.stop()
        self.assertEqual(self.told(second)["phase"], "failed")

    def test_no_other_id_and_no_crowd_is_waited_for(self) -> None:
        self.assertEqual(self.told(self.held(self.door, "other"))["phase"], "waiting")
        with mock.patch("flodl_tw.web.resource.MAX_HELD", 2):
            dials = [self.held(self.door) for _ in range(3)]
            self.assertEqual([bool(dial.received()) for dial in dials], [False, False, True])

    def test_one_who_hangs_up_makes_room(self) -> None:
        with mock.patch("flodl_tw.web.resource.MAX_HELD", 1):
            self.held(self.door).reset()
            self.door.turn()
            self.assertEqual(self.held(self.door).received(), b"")
        self.assertEqual(self.flushLoggedErrors(), [])


class LimitTests(StatusTestCase):
    """What is too large is refused before it is read."""

    def test_each_limit_has_its_code(self) -> None:
        long = "/" + "a" * (2048 - len("GET / HTTP/1.1"))
        pad = "X: " + "p" * 990
        table: tuple[tuple[str, bytes, int], ...] = (
            ("a start line of 2,048 bytes", ask("GET", long), 404),
            ("a start line of 2,049 bytes", ask("GET", long + "a"), 414),
            ("a head over 16 KiB", ask("GET", "/", *[pad] * 17), 431),
            ("100,000 header lines", ask("GET", "/", *["a: b"] * 100_000), 431),
            ("two Hosts", ask("GET", "/", "Host: other"), 400),
            ("10**9 announced", ask("POST", "/start", "Content-Length: 1000000000"), 413),
            ("4,097 announced", ask("POST", "/start", "Content-Length: 4097"), 413),
            ("4,097 announced to abort", ask("POST", "/abort", "Content-Length: 4097"), 413),
            ("65,537 announced to check", ask("POST", "/check", "Content-Length: 65537"), 413),
            ("65,536 sent to check", ask("POST", "/check", "Content-Length: 65536") + b"x" * 65536, 403),
            ("4,096 sent", ask("POST", "/start", "Content-Length: 4096") + b"x" * 4096, 403),
        )
        for name, data, code in table:
            answer = self.request(data)
            self.assertEqual(answer.code, code, name)
            self.assertEqual(answer.length, len(answer.body), name)

    def test_a_refusal_of_head_has_no_body(self) -> None:
        for data, code in ((ask("HEAD", "/", "Host: other"), 400), (ask("HEAD", "/" + "a" * 3000), 414)):
            self.assertEqual(self.request(data, bodiless=True).code, code)

    def chunked(self, size: int, path: str = "/start") -> bytes:
        return ask("POST", path, "Transfer-Encoding: chunked") + b"%x\r\n" % size + b"x" * size + b"\r\n0\r\n\r\n"

    def test_a_chunked_body_over_the_limit_is_refused_in_one_piece(self) -> None:
        self.assertEqual(self.request(self.chunked(5000)).code, 413)

    def test_a_chunked_check_has_a_limit_of_its_own(self) -> None:
        self.assertEqual(self.request(self.chunked(65_536, "/check")).code, 403)
        self.assertEqual(self.request(self.chunked(65_537, "/check")).code, 413)
        self.assertEqual(self.request(self.chunked(4_097, "/abort")).code, 413)

    def test_a_chunked_body_over_the_limit_is_refused_in_pieces(self) -> None:
        data = self.chunked(20_000)
        dial = self.door.dial()
        for at in range(0, len(data), 1000):
            dial.send(data[at : at + 1000])
        self.door.turn()
        self.assertEqual((Answer(dial.received()).code, dial.closed), (413, True))

    def test_a_chunked_body_of_the_limit_is_fine_however_it_comes(self) -> None:
        data = self.chunked(4096)
        self.assertEqual(self.request(data).code, 403)
        dial = self.door.dial("127.0.0.1")
        for byte in data:
            dial.send(bytes((byte,)))
        self.door.turn()
        self.assertEqual(Answer(dial.received()).code, 403)

    def test_a_refused_start_starts_nothing(self) -> None:
        door = ClockedController(window(start_mode=MANUAL))
        door.dial().join()
        door.turn()
        start = b"POST /start HTTP/1.1\r\nHost: localhost\r\n"
        for rest in (
            b"Content-Length: 5000\r\n\r\n" + b"x" * 5000,
            b"Transfer-Encoding: chunked\r\n\r\n1388\r\n" + b"x" * 5000 + b"\r\n0\r\n\r\n",
            b"Host: localhost\r\n\r\n",
        ):
            door.http(start + rest)
            self.assertFalse(door.state()["start_armed"], rest[:40])

    def test_a_client_that_does_not_read_its_refusal_is_aborted(self) -> None:
        dial = self.door.dial(reads=False)
        dial.send(ask("POST", "/start", "Content-Length: 1000000000"))
        self.assertEqual(Answer(dial.received()).code, 413)
        dial.send(b"x" * 100_000)
        self.door.clock.advance(2)
        self.door.turn()
        self.assertTrue(dial.closed)
        self.assertEqual((dial.received(), self.flushLoggedErrors()), (b"", []))


class DeadlineTests(StatusTestCase):
    """A request has five seconds in all, from its first byte."""

    def test_a_byte_each_second_buys_no_time(self) -> None:
        dial = self.door.dial(port=4711)
        for at in range(5):
            self.assertFalse(dial.transport.aborted)
            dial.send(STATE[at * 4 : at * 4 + 4])
            self.door.clock.advance(1)
        self.door.turn()
        self.assertTrue(dial.closed)
        self.line("10.0.0.1:4711", "no whole HTTP request within 5 s", level=LogLevel.info)
        self.assertEqual(self.door.ends(), {"request-deadline": 1})

    def test_the_first_byte_starts_it_even_before_the_fourth(self) -> None:
        dial = self.door.dial()
        self.door.clock.advance(1)
        dial.send(b"G")
        self.door.clock.advance(3)
        dial.send(STATE[1:30])
        self.door.clock.advance(1.999)
        self.assertFalse(dial.transport.aborted)
        self.door.clock.advance(0.001)
        self.assertTrue(dial.transport.aborted)

    def test_time_before_the_first_byte_is_not_the_requests(self) -> None:
        dial = self.door.dial()
        self.door.clock.advance(4)
        dial.send(STATE[:30])
        self.door.clock.advance(4.5)
        dial.send(STATE[30:])
        self.door.turn()
        self.assertEqual(Answer(dial.received()).code, 200)

    def test_the_body_is_within_it(self) -> None:
        dial = self.door.dial()
        dial.send(ask("POST", "/start", "Content-Length: 100"))
        for _ in range(5):
            self.assertFalse(dial.transport.aborted)
            dial.send(b"x")
            self.door.clock.advance(1)
        self.assertTrue(dial.transport.aborted)
        self.door.turn()
        self.assertEqual((dial.received(), self.flushLoggedErrors()), (b"", []))

    def test_the_scaled_one_applies(self) -> None:
        door = ClockedController(limits=Limits.at(2))
        dial = door.dial()
        dial.send(b"GET ")
        door.clock.advance(9.5)
        self.assertFalse(dial.transport.aborted)
        door.clock.advance(0.5)
        self.assertTrue(dial.transport.aborted)

    def test_an_answered_request_leaves_no_call_behind(self) -> None:
        for data in (STATE, PAGE, ask("GET", "/nope"), ask("GET", "/", "Host: y")):
            self.request(data)
        self.door.clock.advance(30)
        self.door.server.stopService()
        self.assert_idle(self.door)

    def test_half_close(self) -> None:
        for sent, code in ((STATE, 200), (PAGE, 200), (STATE[:-1], None), (b"GET ", None)):
            dial = self.door.dial()
            dial.send(sent)
            dial.half_close()
            self.door.turn()
            answer = dial.received()
            self.assertEqual(Answer(answer).code if answer else None, code, sent)
            self.assertTrue(dial.closed)
        self.assertEqual(self.flushLoggedErrors(), [])


class BodyTests(StatusTestCase):
    """A body costs memory of ours alone."""

    def test_a_chunked_request_opens_no_file(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        door = ClockedController()
        dials = [door.dial() for _ in range(50)]
        for dial in dials:
            dial.send(b"POST /start HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)


class PageTests(StatusTestCase):
    """What a person's browser gets."""

    def page(self, door: ClockedController) -> str:
        answer = self.request(PAGE, door=door)
        self.assertEqual(answer.code, 200)
        self.assertEqual(answer.length, len(answer.body))
        self.assertTrue(answer.headers["content-type"].startswith("text/html"))
        return answer.body.decode()

    def member(self, **fields: Any) -> ClockedController:
        door = ClockedController(window(min_rank_start=9))
        door.dial("10.0.0.42").join(make_hello(**fields))
        return door

    def test_a_large_world_s_page_lists_its_first_hosts_and_counts_the_rest(self) -> None:
        door = ClockedController(window(min_rank_start=9999))
        for number in range(502):
            door.dial().join(host=f"h{number}.")
        text = page(door.controller, "10.0.0.100:29500", {})
        self.assertEqual(text.count("<td>h"), 500)
        self.assertIn("And 2 more hosts", text)

    def test_gpu_labels_are_counted_and_cut(self) -> None:
        self.assertIn("<td>8 x H100</td>", self.page(self.member(devices=8, gpus=("H100",) * 8)))
        self.assertIn("<td>H100; 2 x A100</td>", self.page(self.member(devices=3, gpus=("H100", "A100", "A100"))))
        self.assertLess(len(self.page(self.member(gpus=tuple(f"{n}" * 60 for n in range(200))))), 10_000)

    def test_a_refused_host_is_on_the_page_with_its_reason_and_how_often(self) -> None:
        door = self.member(host="gpu-a", nccl_version=(2, 27, 3))
        for _ in range(3):
            door.dial("10.0.0.9").join(host="gpu-b", nccl_version=(2, 26, 0))
        page = self.page(door)
        for part in (
            "<h2>Refused</h2>",
            "<td>&#x27;gpu-b&#x27;</td><td>10.0.0.9</td>",
            "<td>3</td>",
            "nccl-mismatch: ",
        ):
            self.assertIn(part, page)

    def test_only_the_last_refusals_are_kept(self) -> None:
        door = self.member(host="gpu-a")
        for number in range(30):
            door.dial().join(host=f"bad{number}.", devices=0)
        page = self.page(door)
        self.assertNotIn("bad9.", page)
        self.assertIn("bad10.", page)
        self.assertIn("bad29.", page)

    def test_an_operator_who_can_start_it_learns_how(self) -> None:
        door = ClockedController(window(min_rank_start=1, start_mode=StartMode.MANUAL))
        self.assertNotIn("fdl start", self.page(door))
        self.assertIn("is held for the operator", self.page(door))
        door.dial().join(make_hello())
        self.assertIn("fdl start --addr 10.0.0.100:29500", self.page(door))

    def test_exits_and_ends_are_shown(self) -> None:
        door = ClockedController(window(target_ranks=3, on_loss=OnLoss.CONTINUE))
        first, second = door.dial(), door.dial()
        first.join(host="a", devices=2)
        second.join(host="b")
        door.turn()
        first.messages()
        first.send(first.talk.exited(0) + first.talk.exited(1, 3))
        second.vanish()
        door.turn()
        page = self.page(door)
        self.assertIn("<td>open</td><td>2 of 2, rank 1 with code 3</td>", page)
        self.assertIn("<td>silent</td><td>0 of 1</td>", page)
        first.hang_up()
        door.turn()
        self.assertIn("rank 1 of host &#x27;a&#x27; exited with code 3", self.page(door))

    def test_a_rank_that_ends_well_while_others_train_has_left_early(self) -> None:
        door = ClockedController(window(target_ranks=4, on_loss=OnLoss.CONTINUE))
        first, second = door.dial(), door.dial()
        first.join(host="a", devices=3)
        second.join(host="b")
        door.turn()
        first.messages()
        second.messages()
        self.assertNotIn("left early", self.page(door))
        first.send(first.talk.exited(1))
        self.assertIn("<td>1 of 3, rank 1 left early</td>", self.page(door))
        first.send(first.talk.exited(0, -11) + first.talk.exited(2))
        self.assertIn(
            "<td>3 of 3, rank 0 with code -11 (killed by SIGSEGV), ranks 1-2 left early</td><", self.page(door)
        )
        second.send(second.talk.exited(3))
        page = self.page(door)
        self.assertIn("<td>3 of 3, rank 0 with code -11 (killed by SIGSEGV)</td>", page)
        self.assertIn("<td>1 of 1</td>", page)

    def test_nobody_left_a_lost_host_s_ranks_early_nor_a_run_that_is_over(self) -> None:
        for end in (lambda dial: dial.vanish(), lambda dial: dial.send(dial.talk.exited(1, 3))):
            for on_loss in OnLoss:
                door = ClockedController(window(target_ranks=2, on_loss=on_loss))
                first, second = door.dial(), door.dial()
                first.join(host="a")
                second.join(host="b")
                door.turn()
                first.messages()
                second.messages()
                first.send(first.talk.exited(0))
                self.assertIn("<td>1 of 1, rank 0 left early</td>", self.page(door))
                end(second)
                door.turn()
                self.assertIn("<td>1 of 1</td>", self.page(door))

    def test_whatever_a_host_says_is_escaped(self) -> None:
        evil = "<script>alert('1')</script>"
        page = self.page(self.member(host=evil, gpus=(evil, '"><img src=x>'), libtorch=evil))
        self.assertNotIn("<script", page)
        self.assertNotIn("<img", page)
        self.assertEqual(page.count("&lt;script&gt;"), 3)

    def test_a_member_is_shown_with_its_ranks_and_its_observed_address(self) -> None:
        page = self.page(self.member(host="node-7", devices=3))
        for part in ("node-7", "ranks 0-2", "10.0.0.42", "precompiled/cu128"):
            self.assertIn(part, page)

    def test_the_join_command_states_the_port_and_asks_for_a_token_only_where_one_is_needed(self) -> None:
        page = self.page(ClockedController())
        self.assertIn("<code>flodl-tw join 10.0.0.100:29500 -- PROGRAM</code>", page)
        self.assertIn("<code>fdl join 10.0.0.100:29500 --bin PROGRAM</code>", page)
        self.assertNotIn("--token", page)
        page = self.page(ClockedController(token=TOKEN))
        self.assertIn("<code>flodl-tw join 10.0.0.100:29500 --token-file FILE -- PROGRAM</code>", page)
        self.assertIn("<code>fdl join 10.0.0.100:29500 --bin PROGRAM --token …</code>", page)
        self.assertNotIn(TOKEN.hex(), page)

    def test_the_join_command_has_the_advertised_host_which_may_be_asked_for_by_its_name(self) -> None:
        door = ClockedController(window(start_mode=MANUAL), advertised="Head.example")
        self.assertIn("<code>flodl-tw join Head.example:29500 -- PROGRAM</code>", self.page(door))
        door.dial().join()
        door.turn()
        for host, known in (("head.example", True), ("other.example", False)):
            answer = door.http(f"POST /start HTTP/1.1\r\nHost: {host}:29500\r\n\r\n".encode())
            self.assertEqual(b"is no name of this machine" not in answer, known, answer)

    def test_an_open_runs_salt_is_not_shown(self) -> None:
        door = self.member()
        self.assertNotIn(door.controller.run.session_salt.hex(), self.page(door))

    def test_a_failed_run_says_why_and_offers_no_join(self) -> None:
        door = ClockedController(window(target_ranks=2))
        dials = [door.dial(), door.dial()]
        for dial, host in zip(dials, ("<b>a</b>", "b"), strict=True):
            dial.join(host=host)
        door.turn()
        dials[0].vanish()
        door.turn()
        page = self.page(door)
        self.assertIn("went silent", page)
        self.assertIn("failed", page)
        self.assertNotIn("<b>a", page)
        self.assertNotIn("fdl join", page)
        self.assertNotIn("flodl-tw join", page)

    def test_no_control_character_of_a_label_reaches_the_page(self) -> None:
        page = self.page(self.member(libtorch="a\x00b\x1b[31mc\u202ed", gpus=("x\x07y",)))
        for bad in "\x00\x1b\x07\u202e":
            self.assertNotIn(bad, page)
