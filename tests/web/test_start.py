"""Who may start a run: ``POST /start``, its refusals and their order."""

from __future__ import annotations

import json
import socket
from typing import Any

from twisted.logger import formatEvent

from flodl_tw.core.messages import WorldFormed
from flodl_tw.core.window import StartMode
from flodl_tw.testing import ClockedController, make_hello
from flodl_tw.web.access import PROXY_HEADERS, Attempt, host_name, web_page_reason
from tests.pumped import HYBRID, MANUAL, TOKEN, PumpedTestCase, window

AUTO = StartMode.AUTO
AWAY = "10.0.0.50"
HERE = "127.0.0.1"
WRONG = "ff" * 16
OWN = socket.gethostname()


def post(host: str | None = "localhost:29500", token: str | None = None, **headers: str) -> bytes:
    """The request; a header's name has underscores for hyphens."""
    target = "/start" if token is None else f"/start?token={token}"
    lines = [f"POST {target} HTTP/1.1"]
    if host is not None:
        lines.append(f"Host: {host}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


class StartTestCase(PumpedTestCase):
    def door(self, mode: StartMode = MANUAL, quorum: int = 1, joined: int = 1, **options: Any) -> ClockedController:
        door = ClockedController(window(start_mode=mode, min_rank_start=quorum), token=TOKEN, **options)
        if joined:
            self.member = door.dial(token=TOKEN)
            self.member.join(devices=joined)
        door.turn()
        return door

    def ask(self, door: ClockedController, request: bytes, peer: str = HERE) -> tuple[int, dict[str, Any]]:
        head, _, body = door.http(request, peer).partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)


class OrderTests(StartTestCase):
    """Each refusal comes first while all that come later would apply, too."""

    def test_the_order_of_the_refusals(self) -> None:
        evil = {"Origin": "http://evil.example"}
        table: tuple[tuple[str, bytes, str, StartMode, str, int, str], ...] = (
            ("a page, before all", post(token=WRONG, **evil), AWAY, AUTO, "done", 403, "web page"),
            ("no token, before auto", post(), AWAY, AUTO, "done", 403, "token"),
            ("a wrong token, before auto", post(token=WRONG), AWAY, AUTO, "done", 403, "token"),
            ("auto, before the window", post(), HERE, AUTO, "done", 409, "auto"),
            ("the window, before the quorum", post(), HERE, MANUAL, "failed", 409, "window is not open"),
            ("the quorum", post(), HERE, MANUAL, "open", 409, "quorum not met: 1 of 2"),
            ("the quorum in hybrid", post(), HERE, HYBRID, "open", 409, "quorum not met: 1 of 2"),
        )
        for name, request, peer, mode, stage, code, reason in table:
            door = self.door(mode, quorum=2)
            if stage in ("done", "failed"):
                door.clock.advance(600)
                self.assertEqual(door.state()["phase"], "failed")
            answer = self.ask(door, request, peer)
            self.assertEqual((answer[0], list(answer[1])), (code, ["error"]), name)
            self.assertIn(reason, answer[1]["error"], name)
            self.assertFalse(door.state()["start_armed"], name)

    def test_a_refusal_names_the_phase_that_the_window_left_for(self) -> None:
        door = self.door()
        door.controller.run.arm("127.0.0.1")
        door.turn()
        code, body = self.ask(door, post())
        self.assertEqual(code, 409)
        self.assertIn("training", body["error"])

    def test_a_start_with_a_quorum_forms_the_world_in_that_turn(self) -> None:
        for mode in (MANUAL, HYBRID):
            door = self.door(mode, joined=3, quorum=2)
            self.member.messages()
            dial = door.dial(HERE)
            dial.send(post())
            door.clock.advance(0)
            self.assertIsInstance(self.member.messages()[0], WorldFormed)
            answer = dial.received()
            self.assertTrue(answer.startswith(b"HTTP/1.1 200 OK\r\n"))
            self.assertTrue(answer.endswith(b'\r\n\r\n{"armed":true,"joined_ranks":3,"min_rank_start":2}'), answer)
            self.assertTrue(door.state()["start_armed"])

    def test_the_log_says_where_a_start_came_from(self) -> None:
        door = self.door()
        self.ask(door, post(token=TOKEN.hex()), AWAY)
        self.line(f"operator start from {AWAY}: 1 rank in (quorum 1)")


class TokenTests(StartTestCase):
    """From elsewhere a start needs the token, by either way."""

    def test_the_token_is_taken_by_query_and_by_bearer(self) -> None:
        token = TOKEN.hex()
        table = (
            ("by query", post(token=token), AWAY, 200),
            ("by Bearer", post(Authorization=f"Bearer {token}"), AWAY, 200),
            ("by bearer in lower case", post(Authorization=f"bearer {token}"), AWAY, 200),
            ("the wrong one by query", post(token=WRONG), AWAY, 403),
            ("the wrong one by Bearer", post(Authorization=f"Bearer {WRONG}"), AWAY, 403),
            ("by Basic", post(Authorization=f"Basic {token}"), AWAY, 403),
            ("none", post(), AWAY, 403),
            ("an empty one", post(token=""), AWAY, 403),
            ("an empty Bearer", post(Authorization="Bearer "), AWAY, 403),
            ("half of it", post(token=token[:16]), AWAY, 403),
            ("more than it", post(token=token + "00"), AWAY, 403),
            ("zeros", post(token="00" * 16), AWAY, 403),
            ("no hex", post(token="%C3%BC"), AWAY, 403),
            ("none, from loopback", post(), HERE, 200),
            ("none, from loopback by IPv6", post(host="[::1]:29500"), "::1", 200),
            ("none, from mapped loopback", post(), "::ffff:127.0.0.1", 200),
            ("a wrong one, from loopback", post(token=WRONG), HERE, 200),
            ("a wrong Bearer, from loopback", post(Authorization=f"Bearer {WRONG}"), HERE, 200),
            ("the right one, from loopback", post(token=token), HERE, 200),
        )
        for name, request, peer, code in table:
            door = self.door()
            self.assertEqual(self.ask(door, request, peer)[0], code, name)
            self.assertEqual(door.state()["start_armed"], code == 200, name)

    def test_under_open_admission_the_token_is_the_session_salt(self) -> None:
        door = ClockedController(window(start_mode=MANUAL))
        door.dial().join()
        door.turn()
        self.assertEqual(self.ask(door, post(), AWAY)[0], 403)
        salt_hex = door.controller.run.session_salt.hex()
        self.assertEqual(self.ask(door, post(token=salt_hex), AWAY)[0], 200)

    def test_no_token_ever_reaches_the_log_or_an_answer(self) -> None:
        secret = TOKEN.hex()
        door = self.door(allowed_hosts=("ctl.example",))
        answers = b""
        for peer in (AWAY, HERE):
            for request in (
                post(token=secret, Origin="http://evil.example"),
                post(host="evil.example", token=WRONG),
                post(Authorization=f"Bearer {secret}", Sec_Fetch_Site="cross-site"),
                post(token=secret).replace(b"POST /start", b"GET /start"),
                post(token=secret).replace(b"/start", b"/nothing"),
                post(token=secret).replace(b"/start", b"/%ff"),
                post(token=secret, Content_Length="5000"),
                post(token=secret + "a" * 2048),
                b"GET /?token=" + secret.encode() + b" HTTP/1.1\r\nAccept: text/html\r\n\r\n",
                post(token=secret).replace(b"HTTP/1.1", b"HTTP/9.9 rubbish"),
                post(token=secret),
                post(token=secret),
            ):
                answers += door.http(request, peer)
        cut_off = door.dial(AWAY)
        cut_off.send(post(token=secret)[:-2])
        door.clock.advance(10)
        bad = door.dial()
        bad.send(bad.talk.hello(make_hello()))
        door.turn()
        self.member.reset()
        door.turn()
        self.assertEqual(self.flushLoggedErrors(), [])
        self.assertGreater(len(self.events), 10)
        for event in self.events:
            shown = (formatEvent(event) + repr(event)).lower()
            self.assertNotIn(secret, shown)
            self.assertNotIn(repr(TOKEN).lower(), shown)
        self.assertNotIn(secret.encode(), answers)


class WebPageTests(StartTestCase):
    """A start that a web page made is refused before anything else."""

    def test_origin_fetch_site_and_host(self) -> None:
        token = TOKEN.hex()
        same = "http://localhost:29500"
        table = (
            ("no Origin", post(), HERE, 200),
            ("the same Origin", post(Origin=same), HERE, 200),
            ("the same in capitals", post(Origin="http://LOCALHOST:29500"), HERE, 200),
            ("another host", post(Origin="http://evil.example:29500"), HERE, 403),
            ("another port", post(Origin="http://localhost:8080"), HERE, 403),
            ("the default port against ours", post(Origin="http://localhost"), HERE, 403),
            ("the default port on both", post(host="localhost", Origin="http://localhost"), HERE, 200),
            ("https", post(Origin="https://localhost:29500"), HERE, 200),
            ("null", post(Origin="null"), HERE, 403),
            ("rubbish", post(Origin="http://[::1"), HERE, 403),
            ("a port that is none", post(Origin="http://localhost:99999"), HERE, 403),
            ("an IPv6 Origin", post(host="[::1]:29500", Origin="http://[::1]:29500"), HERE, 200),
            ("another Origin with the token", post(token=token, Origin="http://evil.example"), HERE, 403),
            ("null with the token", post(token=token, Origin="null"), AWAY, 403),
            ("an Origin without a Host", post(host=None, Origin=same).replace(b"1.1", b"1.0"), HERE, 403),
            ("cross-site", post(Sec_Fetch_Site="cross-site"), HERE, 403),
            ("cross-site with the token", post(token=token, Sec_Fetch_Site="cross-site"), AWAY, 403),
            ("same-origin", post(Sec_Fetch_Site="same-origin"), HERE, 200),
            ("none, the address bar", post(Sec_Fetch_Site="none"), HERE, 200),
            ("a loopback address", post(host="127.0.0.9:29500"), HERE, 200),
            ("an address without a port", post(host="127.0.0.1"), HERE, 200),
            ("an IPv6 address", post(host="[::1]:29500"), HERE, 200),
            ("an IPv6 address without a port", post(host="[::1]"), HERE, 200),
            ("localhost in capitals", post(host="LocalHost:1"), HERE, 200),
            ("an evil name", post(host="evil.example:29500"), HERE, 403),
            ("an address in front of a name", post(host="127.0.0.1.evil.example"), HERE, 403),
            ("localhost in front of a name", post(host="localhost.evil.example"), HERE, 403),
            ("an empty Host", post(host=""), HERE, 403),
            ("no Host, HTTP/1.0", post(host=None).replace(b"1.1", b"1.0"), HERE, 200),
            ("an evil name with a wrong token", post(host="evil.example", token=WRONG), HERE, 403),
            ("any name with the token", post(host="head-node.cluster:29500", token=token), AWAY, 200),
            ("any name with the token as Bearer", post(host="x.y", Authorization=f"Bearer {token}"), AWAY, 200),
            ("any name with the token, from loopback", post(host="evil.example", token=token), HERE, 200),
        )
        for name, request, peer, code in table:
            door = self.door(allowed_hosts=("ctl.example",))
            answer = self.ask(door, request, peer)
            self.assertEqual(answer[0], code, f"{name}: {answer}")
            self.assertEqual(door.state()["start_armed"], code == 200, name)
            if code == 403:
                self.assertIn("web page", answer[1]["error"], name)

    def test_two_hosts_are_a_bad_request(self) -> None:
        door = self.door()
        code, _ = self.ask(door, post().replace(b"\r\n\r\n", b"\r\nHost: evil.example\r\n\r\n"))
        self.assertEqual((code, door.state()["start_armed"]), (400, False))

    def test_other_methods_do_not_start(self) -> None:
        for method in (b"GET", b"HEAD", b"PUT", b"DELETE", b"PATCH", b"OPTIONS"):
            door = self.door()
            door.http(post().replace(b"POST", method))
            self.assertFalse(door.state()["start_armed"], method)

    def test_an_empty_host_does_not_make_null_the_same_origin(self) -> None:
        door = self.door()
        code, _ = self.ask(door, post(host="", token=TOKEN.hex(), Origin="null"), AWAY)
        self.assertEqual((code, door.state()["start_armed"]), (403, False))


class ProxyTests(StartTestCase):
    """A web proxy on the controller's machine makes no request local."""

    def test_what_a_proxy_passed_on_needs_the_token(self) -> None:
        token = TOKEN.hex()
        table = (
            *((name, post(**{name.replace("-", "_"): "10.0.0.9"})) for name in PROXY_HEADERS),
            ("X-Forwarded-For", post(host="127.0.0.1", x_forwarded_for="")),
            ("10.1.2.3", post(host="10.1.2.3:29500")),
            ("fd00::1", post(host="[fd00::1]:29500")),
            (OWN, post(host=f"{OWN}:29500")),
            ("ctl.example", post(host="ctl.example")),
        )
        for named, request in table:
            door = self.door(allowed_hosts=("ctl.example",))
            for path in (b"/start", b"/abort"):
                code, body = self.ask(door, request.replace(b"/start", path))
                self.assertEqual(code, 403, named)
                self.assertIn(named, body["error"])
                self.assertIn("needs the token", body["error"], named)
            self.assertEqual(door.state()["phase"], "staging")
            bearer = request.replace(b"\r\n\r\n", f"\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
            self.assertEqual(self.ask(door, bearer)[0], 200, named)


class PartsTests(PumpedTestCase):
    """Hosts taken apart."""

    def test_a_host_has_its_name(self) -> None:
        for host, name in (
            ("localhost", "localhost"),
            ("Localhost.:29500", "localhost"),
            ("10.0.0.1:1", "10.0.0.1"),
            ("[::1]", "::1"),
            ("[FD00::1]:29500", "fd00::1"),
            ("", ""),
            ("localhost:evil", None),
        ):
            self.assertEqual(host_name(host), name, host)

    def test_only_a_whole_address_counts_as_one(self) -> None:
        for host, allowed in (
            ("127.0.0.1:29500", True),
            ("[::1]:29500", True),
            ("127.0.0.1%evil.example", False),
            ("[::1%evil.example]", False),
            ("127.0.0.1:80@evil.example", False),
            ("localhost:evil", False),
        ):
            attempt = Attempt("127.0.0.1", host=host)
            self.assertEqual(web_page_reason(attempt, False, frozenset({"localhost"})) is None, allowed, host)

    def test_an_origin_is_foreign_unless_it_is_the_host(self) -> None:
        for origin, host, foreign in (
            ("http://127.0.0.1:1", "127.0.0.1:1", False),
            ("https://127.0.0.1", "127.0.0.1", False),
            ("http://127.0.0.1:1", "127.0.0.1:2", True),
            ("http://evil@127.0.0.1:1", "127.0.0.1:1", True),
            ("ftp://127.0.0.1:1", "127.0.0.1:1", True),
            ("http://127.0.0.1:1", None, True),
            ("http://", "", True),
            ("null", "127.0.0.1", True),
        ):
            attempt = Attempt("127.0.0.1", host=host, origin=origin)
            self.assertEqual(web_page_reason(attempt, True, frozenset()) is not None, foreign, (origin, host))
