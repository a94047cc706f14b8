"""``POST /abort``: who may end a run, when there is one to end, and what comes of it."""

from __future__ import annotations

import json
from typing import Any

from twisted.logger import LogLevel

from flodl_tw.core.messages import Abort
from flodl_tw.core.run_settings import AfterRun
from flodl_tw.core.window import Phase
from flodl_tw.run import RunEnd
from flodl_tw.testing import ClockedController, make_hello
from tests.pumped import MANUAL, TOKEN, PumpedTestCase, fill, turns, window
from tests.web.test_start import AWAY, HERE, WRONG

TOLD = "aborted by the operator: wrong data set"
BODY = b'{"reason":"wrong data set"}'


def post(body: bytes = BODY, host: str = "localhost:29500", token: str | None = None, **headers: str) -> bytes:
    """The request; a header's name has underscores for hyphens."""
    target = "/abort" if token is None else f"/abort?token={token}"
    lines = [f"POST {target} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class AbortTestCase(PumpedTestCase):
    def door(self, *, hosts: int = 2, target: int | None = None, **options: Any) -> ClockedController:
        """A credentialed controller with these hosts in its window, or in its world where that is its target."""
        settings = window(target_ranks=target, min_rank_start=target or 1)
        door = ClockedController(settings, token=TOKEN, **options)
        self.hosts = [door.dial(f"10.0.0.{number + 1}", token=TOKEN) for number in range(hosts)]
        for number, dial in enumerate(self.hosts):
            dial.join(host=f"h{number}")
        door.turn()
        for dial in self.hosts:
            dial.messages()
        self.forget()
        return door

    def ask(self, door: ClockedController, request: bytes, peer: str = HERE) -> tuple[int, dict[str, Any]]:
        head, _, body = door.http(request, peer).partition(b"\r\n\r\n")
        self.assertEqual(self.flushLoggedErrors(), [])
        return int(head.split()[1]), json.loads(body)


class EffectTests(AbortTestCase):
    """What an abort does, in each phase in which there is something to end."""

    def assert_aborted(self, door: ClockedController, reason: str = TOLD) -> None:
        self.assertEqual((door.state()["phase"], door.controller.run.failure), ("failed", reason))
        for dial in self.hosts:
            self.assertEqual(dial.messages(), [Abort(reason)])
            self.assertTrue(dial.closed)
        if self.hosts:
            self.line(f"the run has failed: {reason}", level=LogLevel.error)
        else:
            # Nobody has lost it.
            self.line(f"no host was in it: {reason}", level=LogLevel.info)

    def test_an_open_window_closes_and_every_host_hears_why(self) -> None:
        door = self.door()
        self.assertEqual(self.ask(door, post()), (200, {"aborted": True, "joined_hosts": 2}))
        self.assert_aborted(door)
        self.assertTrue(door.controller.run.over)
        self.assertEqual(door.state()["joined_hosts"], 2)

    def test_a_world_that_trains_ends(self) -> None:
        door = self.door(target=2)
        self.assertEqual(door.state()["phase"], "training")
        self.assertEqual(self.ask(door, post()), (200, {"aborted": True, "joined_hosts": 2}))
        self.assert_aborted(door)

    def test_a_world_that_is_being_written_ends_and_no_more_of_it_is_written(self) -> None:
        door = ClockedController(window(target_ranks=600))
        self.hosts = fill(door, 600)
        for dial in self.hosts:
            dial.messages()
        asked = door.dial(HERE)

        def look(turn: int) -> None:
            if turn == 1:
                self.assertEqual(door.state()["phase"], "forming")
                asked.send(post())

        turns(door, look, 4)
        self.assertTrue(asked.received().endswith(b'{"aborted":true,"joined_hosts":600}'))
        self.assertEqual([type(message).__name__ for message in self.hosts[0].messages()], ["WorldFormed", "Abort"])
        self.assertEqual(self.hosts[599].messages(), [Abort(TOLD)])
        self.assertTrue(door.controller.run.over)

    def test_an_empty_window_fails_too(self) -> None:
        door = self.door(hosts=0)
        self.assertEqual(self.ask(door, post()), (200, {"aborted": True, "joined_hosts": 0}))
        self.assert_aborted(door)
        self.assertTrue(door.controller.run.over)

    def test_hosts_hear_of_it_at_the_end_of_the_turn(self) -> None:
        door = self.door()
        dial = door.dial(HERE)
        dial.send(post())
        self.assertEqual(self.hosts[0].messages(), [])
        self.assertEqual(door.state()["phase"], "failed")
        late = door.dial(token=TOKEN).join(host="late")
        self.assertTrue(late.reason.startswith("window-closed: the run is failed"), late)
        door.turn()
        self.assert_aborted(door)

    def test_an_abort_in_the_turn_of_the_target_comes_first(self) -> None:
        door = self.door(hosts=1, target=2)
        self.hosts.append(door.dial(token=TOKEN))
        self.hosts[1].join(host="h1")
        self.assertEqual(self.ask(door, post())[0], 200)
        self.assert_aborted(door)

    def test_a_host_that_left_is_not_told_and_no_other_cause_takes_its_place(self) -> None:
        door = self.door(target=2)
        dial = door.dial(HERE)
        dial.send(post())
        self.hosts[0].reset()
        door.turn()
        self.assertEqual((self.hosts[0].messages(), self.hosts[1].messages()), ([], [Abort(TOLD)]))
        self.assertEqual(door.controller.run.failure, TOLD)

    def test_what_follows_a_run_follows_an_aborted_one(self) -> None:
        door = self.door(target=2, after_run=AfterRun.EXIT)
        over = door.server.when_over()
        self.ask(door, post())
        self.assertEqual(self.successResultOf(over), RunEnd(Phase.FAILED, TOLD))
        door = self.door(after_run=AfterRun.REARM)
        self.ask(door, post())
        self.assertEqual((door.state()["phase"], door.state()["joined_hosts"]), ("waiting", 0))
        self.assertEqual(door.controller.last_outcome, f"failed: {TOLD}")
        self.assertEqual(self.ask(door, post())[0], 200)

    def test_the_log_says_where_it_came_from_and_who_had_joined_by_then(self) -> None:
        door = self.door()
        door.dial(token=TOKEN).join(host="h2")
        self.ask(door, post(token=TOKEN.hex()), AWAY)
        lines = self.lines()
        self.assertTrue(lines[0].startswith("joined: 'h2' from "), lines)
        self.assertEqual(lines[1], f"operator abort from {AWAY}: 3 ranks in (quorum 1)")
        self.assertEqual(lines[2], f"the run has failed: {TOLD}")

    def test_the_page_says_why(self) -> None:
        door = self.door()
        self.ask(door, post(b'{"reason":"<b>no</b>"}'))
        page = door.http(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\n\r\n")
        self.assertIn(b"aborted by the operator: &lt;b&gt;no&lt;/b&gt;", page)


class RefusalTests(AbortTestCase):
    """Who may not, and when there is nothing to end."""

    def test_the_order_of_the_refusals(self) -> None:
        evil = {"Origin": "http://evil.example"}
        table: tuple[tuple[str, bytes, str, int, str], ...] = (
            ("a page, before all", post(b"x", token=WRONG, **evil), AWAY, 403, "web page's doing, which may not abort"),
            ("no token, before the body", post(b"x"), AWAY, 403, "an abort from another host needs the token, and it"),
            ("a wrong token, before the body", post(b"x", token=WRONG), AWAY, 403, "is not this run's"),
            ("the body, before the phase", post(b"x"), HERE, 400, "the body is not JSON"),
            ("the phase", post(), HERE, 409, "the run is failed already: an abort would change nothing"),
        )
        for name, request, peer, code, reason in table:
            door = self.door()
            door.controller.run.fail("the first cause")
            door.turn()
            answer = self.ask(door, request, peer)
            self.assertEqual((answer[0], list(answer[1])), (code, ["error"]), name)
            self.assertIn(reason, answer[1]["error"], name)
            self.assertEqual(door.controller.run.failure, "the first cause", name)

    def test_who_may_is_as_with_a_start(self) -> None:
        token = TOKEN.hex()
        table = (
            ("from loopback without a token", post(), HERE, 200),
            ("from loopback with a wrong one", post(token=WRONG), HERE, 200),
            ("by query", post(token=token), AWAY, 200),
            ("by Bearer", post(Authorization=f"Bearer {token}"), AWAY, 200),
            ("without one", post(), AWAY, 403),
            ("with a wrong one", post(Authorization=f"Bearer {WRONG}"), AWAY, 403),
            ("cross-site", post(Sec_Fetch_Site="cross-site"), HERE, 403),
            ("an evil name", post(host="evil.example:29500"), HERE, 403),
            ("another Origin with the token", post(token=token, Origin="http://evil.example"), HERE, 403),
            ("an allowed name with the token", post(host="ctl.example:29500", token=token), HERE, 200),
        )
        for name, request, peer, code in table:
            door = self.door(allowed_hosts=("ctl.example",))
            self.assertEqual(self.ask(door, request, peer)[0], code, name)
            self.assertEqual(door.state()["phase"], "failed" if code == 200 else "waiting", name)

    def test_under_open_admission_the_token_is_the_session_salt(self) -> None:
        door = ClockedController(window(start_mode=MANUAL))
        self.assertEqual(self.ask(door, post(), AWAY)[0], 403)
        self.assertEqual(self.ask(door, post(token=door.controller.run.session_salt.hex()), AWAY)[0], 200)

    def test_a_run_that_is_done_or_has_failed_stays_as_it_is(self) -> None:
        door = self.door(hosts=1, target=1)
        self.hosts[0].send(self.hosts[0].talk.exited(0))
        self.hosts[0].hang_up()
        door.turn()
        code, body = self.ask(door, post())
        self.assertEqual((code, door.state()["phase"]), (409, "done"))
        self.assertIn("the run is done already", body["error"])
        door = self.door(hosts=1, target=1)
        first, second = door.dial(HERE), door.dial(HERE)
        first.send(post())
        second.send(post(b'{"reason":"again"}'))
        door.turn()
        self.assertIn(b" 200 ", first.received()[:20])
        self.assertIn(b" 409 ", second.received()[:20])
        self.assertEqual(self.hosts[0].messages(), [Abort(TOLD)])

    def test_a_run_that_has_ended_hears_no_late_abort(self) -> None:
        door = self.door(hosts=0)
        door.controller.run.fail("the first cause")
        door.controller.run.abort("late", HERE)
        self.assertEqual(door.controller.run.failure, "the first cause")
        self.assertEqual([line for line in self.lines() if "abort" in line], [])

    def test_the_token_is_in_no_line(self) -> None:
        door = self.door()
        for peer in (AWAY, HERE):
            self.ask(door, post(b"[]", token=TOKEN.hex()), peer)
        self.ask(door, post(Authorization=f"Bearer {TOKEN.hex()}"), AWAY)
        for event in self.events:
            self.assertNotIn(TOKEN.hex(), repr(event))


class BodyTests(AbortTestCase):
    """The reason that an operator gives."""

    def test_a_reason_that_can_be_told_is_told_as_it_is(self) -> None:
        for reason in ("x", "wrong data set ü 😀", "a" * 512, "ü" * 256, ' "quoted" \\ <b>'):
            door = self.door()
            body = json.dumps({"reason": reason}).encode()
            self.assertEqual(self.ask(door, post(body))[0], 200, reason)
            self.assertEqual(self.hosts[0].messages(), [Abort(f"aborted by the operator: {reason}")])

    def test_without_a_body_the_reason_is_ours(self) -> None:
        for request in (post(b""), b"POST /abort HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            door = self.door()
            self.assertEqual(self.ask(door, request)[0], 200)
            self.assertEqual(self.hosts[0].messages(), [Abort("aborted by the operator: no reason given")])

    def test_any_other_body_is_refused_and_ends_nothing(self) -> None:
        table: tuple[tuple[bytes, str], ...] = (
            (b"{", "the body is not JSON"),
            (b" ", "the body is not JSON"),
            (b"\xff", "the body is not UTF-8"),
            (b"reason=x", "the body is not JSON"),
            (b'"why"', "the body is not an object of JSON"),
            (b"{}", "the key 'reason' is missing"),
            (b'{"reason":"a","force":true}', "the key 'force' is not known: the keys are reason"),
            (b'{"reason":"a","reason":"b"}', "the key 'reason' comes twice"),
            (b'{"reason":null}', "reason null: it must be a text"),
            (b'{"reason":["a"]}', "reason (a list of 1): it must be a text"),
            (b'{"reason":"\\ud800"}', "reason '\\ud800': it must be a text"),
            (b'{"reason":""}', "reason '': it is blank"),
            (b'{"reason":" \\t "}', "reason ' \\t ': it is blank"),
            (b'{"reason":"a\\nb"}', "reason 'a\\nb': it has characters that do not print"),
            (b'{"reason":"\\u202e"}', "reason '\\u202e': it has characters that do not print"),
            (json.dumps({"reason": "a" * 513}).encode(), f"reason '{'a' * 100}…': it has 513 bytes, the limit is 512"),
            (json.dumps({"reason": "ü" * 257}).encode(), "it has 514 bytes, the limit is 512"),
            (b'{"a":' * 800, "the body is not"),
            (b"[" * 2000 + b"]" * 2000, "the body is nested deeper than 64"),
        )
        for body, error in table:
            door = self.door()
            code, answer = self.ask(door, post(body))
            self.assertEqual((code, list(answer)), (400, ["error"]), body[:40])
            self.assertIn(error, answer["error"])
            self.assertEqual((door.state()["phase"], self.hosts[0].messages()), ("waiting", []), body[:40])

    def test_a_body_over_4_kib_is_refused_before_it_is_read(self) -> None:
        door = self.door()
        head = b"POST /abort HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4097\r\n\r\n"
        self.assertEqual(self.ask(door, head)[0], 413)
        self.assertEqual(door.state()["phase"], "waiting")

    def test_other_methods_abort_nothing(self) -> None:
        for method in (b"GET", b"PUT", b"DELETE", b"PATCH"):
            door = self.door()
            self.assertEqual(self.ask(door, post().replace(b"POST", method))[0], 405)
            self.assertEqual(door.state()["phase"], "waiting", method)


class OpenAdmissionTests(AbortTestCase):
    def test_a_host_under_open_admission_hears_it_too(self) -> None:
        door = ClockedController()
        dial = door.dial()
        dial.join(make_hello())
        self.assertEqual(self.ask(door, post())[0], 200)
        self.assertEqual(dial.messages(), [Abort(TOLD)])
