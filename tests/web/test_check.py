"""``POST /check``: what a hello would be answered, by the admission itself, and who is told."""

from __future__ import annotations

import json
import re
from typing import Any

from flodl_tw.core.facts import FACTS
from flodl_tw.core.messages import Accept, Hello, Reject
from flodl_tw.core.run_settings import RunSettings
from flodl_tw.testing import ClockedController, make_hello
from flodl_tw.web.hello_json import hello_to_json
from tests.pumped import TOKEN, PumpedTestCase, window
from tests.web.test_start import AWAY, HERE, WRONG

RIGHT = make_hello("gpu-b", 2)
FIRST = make_hello("gpu-a", 2, nccl_version=(2, 27, 3), run_id="publish-7", model_sig=bytes(range(32)))
OTHER = bytes(range(1, 33))

# Each row's hello is one that the controller with FIRST in it refuses; the version that it comes in; the word
REFUSED: tuple[tuple[Hello, int, str], ...] = (
    (make_hello(" "), 4, "bad-host"),
    (make_hello("x" * 256), 4, "bad-host"),
    (make_hello("a\nb"), 4, "bad-host"),
    (make_hello("gpu-b", gpus=("x" * 256,)), 4, "bad-label"),
    (make_hello("gpu-b", gpus=("x",) * 257), 4, "bad-label"),
    (make_hello("gpu-b", 0), 4, "no-devices"),
    (make_hello("gpu-b", local_devices=bytes(257)), 4, "too-many-devices"),
    (make_hello("gpu-b", local_devices=b"\7\7"), 4, "repeated-device"),
    (make_hello("gpu-b"), 2, "version-mismatch"),
    (make_hello("gpu-b"), 3, "unspoken-version"),
    (make_hello("gpu-b"), 6, "unspoken-version"),
    (make_hello("gpu-a"), 4, "duplicate-host"),
    (make_hello("gpu-b", dataset_sig=OTHER), 4, "dataset-mismatch"),
    (make_hello("gpu-b", libtorch="rocm6.2"), 4, "vendor-mismatch"),
    (make_hello("gpu-b", run_id="publish-8"), 4, "run-mismatch"),
    (make_hello("gpu-b", nccl_version=(2, 26, 0)), 4, "nccl-mismatch"),
    (make_hello("gpu-b", model_sig=OTHER), 4, "model-mismatch"),
)


def post(body: bytes, host: str = "localhost:29500", token: str | None = None, **headers: str) -> bytes:
    """The request; a header's name has underscores for hyphens."""
    target = "/check" if token is None else f"/check?token={token}"
    lines = [f"POST {target} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def body_of(hello: Hello = RIGHT, version: int = 4) -> bytes:
    """The hello as a request has it."""
    return json.dumps(hello_to_json(hello, version)).encode()


def observed(door: ClockedController) -> tuple[Any, ...]:
    """Everything of a run that a hello could change."""
    run = door.controller.run
    return (
        run.state_json(),
        run.ledger.departures,
        [run.ledger.expected(fact) for fact in FACTS],
        run.window.refused,
        list(run.window.refused_hosts),
        run.links.copy(),
        run.phase,
    )


class CheckTestCase(PumpedTestCase):
    def door(self, settings: RunSettings | None = None, **options: Any) -> ClockedController:
        """A controller that has the first host in it."""
        door = ClockedController(settings or window(min_rank_start=99), **options)
        talk = {"token": options["token"]} if "token" in options else {}
        self.first = door.dial(**talk)
        self.first.join(FIRST)
        door.turn()
        self.forget()
        return door

    def ask(self, door: ClockedController, request: bytes, peer: str = HERE) -> tuple[int, dict[str, Any]]:
        head, _, body = door.http(request, peer).partition(b"\r\n\r\n")
        self.assertEqual(self.flushLoggedErrors(), [])
        return int(head.split()[1]), json.loads(body)


class AnswerTests(CheckTestCase):
    """The answer is the one that the hello itself would get."""

    def test_a_right_hello_is_told_the_ranks_that_it_would_get(self) -> None:
        door = self.door()
        self.assertEqual(self.ask(door, post(body_of())), (200, {"admitted": True, "ranks": [2, 3]}))
        self.assertEqual(door.dial().join(RIGHT).ranks, (2, 3))

    def test_a_refusal_is_the_one_that_the_hello_would_get(self) -> None:
        for hello, version, word in REFUSED:
            door = self.door()
            code, told = self.ask(door, post(body_of(hello, version)))
            self.assertEqual(code, 200, word)
            self.assertEqual(list(told), ["admitted", "word", "retry", "reason"])
            retry = word in ("duplicate-host", "run-mismatch")
            self.assertEqual((told["admitted"], told["word"], told["retry"]), (False, word, retry))
            dial = door.dial(version=version)
            self.assertEqual(dial.join(hello), Reject(told["reason"]))

    def test_it_says_too_many_ranks_as_the_hello_would_hear(self) -> None:
        door = self.door(window(min_rank_start=3, target_ranks=3))
        _, told = self.ask(door, post(body_of(make_hello("gpu-b", 2))))
        self.assertEqual((told["admitted"], told["word"], told["retry"]), (False, "too-many-ranks", True))
        self.assertEqual(door.dial().join(make_hello("gpu-b", 2)), Reject(told["reason"]))

    def test_it_touches_nothing(self) -> None:
        door = self.door()
        before = observed(door)
        for hello, version in [(RIGHT, 4), *((hello, version) for hello, version, _ in REFUSED)]:
            self.assertEqual(self.ask(door, post(body_of(hello, version)))[0], 200)
            self.assertEqual(observed(door), before, hello)
        self.assertEqual(self.lines(), [])

    def test_the_first_to_ask_sets_no_expectation(self) -> None:
        door = ClockedController(window(min_rank_start=99))
        self.assertEqual(self.ask(door, post(body_of(FIRST))), (200, {"admitted": True, "ranks": [0, 1]}))
        self.assertIsInstance(door.dial().join(make_hello(nccl_version=(2, 1, 1), dataset_sig=OTHER)), Accept)

    def test_no_number_of_checks_fails_a_window(self) -> None:
        door = self.door(window(min_rank_start=99, max_rejects=2))
        for _ in range(9):
            self.assertFalse(self.ask(door, post(body_of(make_hello("gpu-a"))))[1]["admitted"])
        self.assertEqual(door.state()["phase"], "waiting")

    def test_outside_an_open_window_it_is_closed_to_all(self) -> None:
        formed = self.door(window(target_ranks=2))
        failed = self.door(window(min_rank_start=99))
        failed.clock.advance(600)
        for door, phase in ((formed, "training"), (failed, "failed")):
            for hello in (RIGHT, make_hello("gpu-a"), make_hello("gpu-c", 0)):
                code, told = self.ask(door, post(body_of(hello)))
                self.assertEqual((code, told["word"], told["retry"]), (200, "window-closed", True))
                self.assertIn(f"the run is {phase}", told["reason"])
                self.assertEqual(door.dial().join(hello), Reject(told["reason"]))

    def test_an_unspoken_version_is_told_before_a_closed_window(self) -> None:
        door = self.door(window(target_ranks=2))
        self.assertEqual(self.ask(door, post(body_of(version=3)))[1]["word"], "unspoken-version")

    def test_who_asks_in_the_turn_of_the_target_finds_the_window_closed(self) -> None:
        door = ClockedController(window(target_ranks=1))
        door.dial().join(host="gpu-a")
        dial = door.dial(HERE)
        dial.send(post(body_of()))
        self.assertIn(b'"word":"window-closed"', dial.received())

    def test_a_body_of_64_kib_is_read_and_more_is_not(self) -> None:
        door = self.door()
        gpus = ("x" * 250,) * 250
        full = body_of(make_hello("gpu-b", gpus=gpus))
        whole = full[:-1] + b" " * (65_536 - len(full)) + b"}"
        self.assertEqual(self.ask(door, post(whole)), (200, {"admitted": True, "ranks": [2]}))
        dial = door.dial(HERE)
        dial.send(post(whole + b" ")[:-65_537])
        self.assertIn(b" 413 ", dial.received()[:20])

    def test_a_body_in_pieces_and_one_in_chunks_get_the_same(self) -> None:
        door = self.door()
        body = body_of()
        dial = door.dial(HERE)
        for byte in post(body):
            dial.send(bytes((byte,)))
        door.turn()
        self.assertTrue(dial.received().endswith(b'{"admitted":true,"ranks":[2,3]}'))
        chunked = (
            b"POST /check HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"5\r\n" + body[:5] + b"\r\n%x\r\n" % (len(body) - 5) + body[5:] + b"\r\n0\r\n\r\n"
        )
        self.assertEqual(self.ask(door, chunked), (200, {"admitted": True, "ranks": [2, 3]}))

    def test_a_body_that_is_no_hello_is_400(self) -> None:
        door = self.door()
        before = observed(door)
        for body, error in (
            (b"", "the body is not JSON"),
            (b"[" * 65_536, "the body is nested deeper than 64"),
            (b'{"host":"a"}', "the key 'local_devices' is missing"),
            (
                body_of().replace(b"[0, 1]", b"[0, 999]"),
                "local_devices[1] 999: it must be a whole number from 0 to 255",
            ),
        ):
            code, told = self.ask(door, post(body))
            self.assertEqual((code, list(told)), (400, ["error"]), body[:40])
            self.assertIn(error, told["error"])
        self.assertEqual(observed(door), before)


class AccessTests(CheckTestCase):
    """Who is told."""

    def test_open_admission_asks_for_no_token(self) -> None:
        door = self.door()
        for peer, request in (
            (HERE, post(body_of())),
            (AWAY, post(body_of(), host="10.0.0.100:29500")),
            (AWAY, post(body_of(), token=WRONG)),
        ):
            self.assertEqual(self.ask(door, request, peer)[0], 200)

    def test_credentialed_admission_asks_for_it_even_from_loopback(self) -> None:
        token = TOKEN.hex()
        door = self.door(token=TOKEN)
        for peer in (HERE, "::1", AWAY):
            for request, code in (
                (post(body_of(), token=token), 200),
                (post(body_of(), Authorization=f"Bearer {token}"), 200),
                (post(body_of()), 403),
                (post(body_of(), token=WRONG), 403),
                (post(body_of(), Authorization=f"Bearer {WRONG}"), 403),
            ):
                self.assertEqual(self.ask(door, request, peer)[0], code, (peer, request))

    def test_without_the_token_the_answer_is_one_whatever_the_run_and_the_hello(self) -> None:
        formed = self.door(window(target_ranks=2), token=TOKEN)
        doors = (self.door(token=TOKEN), ClockedController(token=TOKEN), formed)
        for token, given in ((None, "it came without a token"), (WRONG, "the token that came with it is not this")):
            answers = {
                # All but the date, which may move on to the next second.
                re.sub(rb"Date: [^\r]+\r\n", b"", door.http(post(body, token=token), peer))
                for door in doors
                for peer in (HERE, AWAY)
                for body in (body_of(), body_of(make_hello("gpu-a")), body_of(version=3), b"", b"[" * 60_000)
            }
            self.assertEqual(len(answers), 1, answers)
            self.assertIn(f"a check needs the token, and {given}".encode(), answers.pop())

    def test_a_web_page_is_told_nothing(self) -> None:
        for options, token in (({}, None), ({"token": TOKEN}, TOKEN.hex())):
            door = self.door(**options)
            for request in (
                post(body_of(), token=token, Origin="http://evil.example"),
                post(body_of(), token=token, Sec_Fetch_Site="cross-site"),
                post(body_of(), host="evil.example:29500", token=WRONG),
            ):
                code, told = self.ask(door, request)
                self.assertEqual((code, list(told)), (403, ["error"]))
                self.assertIn("web page's doing, which may not check a host", told["error"])
