"""``status``, ``status --watch`` and ``wait``: what is printed, and the exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from treq.client import HTTPClient
from treq.testing import StubTreq
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock

from flodl_tw.cli import operator
from flodl_tw.cli.client import ControllerClient
from flodl_tw.cli.status import show_status, wait_for_end, watch
from flodl_tw.core.reports import RankError
from flodl_tw.core.run_settings import AfterRun
from flodl_tw.core.store.wire import Opcode, StoreLimits
from flodl_tw.testing import ClockedController
from tests.cli.test_operator import HERE, NO_JSON, NOT_OURS, REFUSED, FailingAgent, OperatorTestCase, Pages
from tests.core.store.queries import HELLO, many
from tests.pumped import fill, window

FAILED = "The run at 127.0.0.1:29500 is failed:"


class StatusTests(OperatorTestCase):
    def status(self, http: Any, *, as_json: bool = False) -> int:
        return self.command(self.client(http), partial(show_status, as_json=as_json))

    def test_a_run_at_a_glance(self) -> None:
        door = self.door()
        door.clock.advance(8)
        fill(door, 2, devices=4)
        self.assertEqual(self.status(self.http(door)), 0)
        self.assertEqual(
            self.said,
            [
                "The run at 127.0.0.1:29500 is staging: there is a quorum, and the operator may start it.",
                "  joined    8 ranks of 2 hosts; quorum 2 (met)",
                "  window    held for the operator's start",
                "  hard cap  the run fails in 9 min 52 s if no world has formed",
                "  start     manual, not armed",
                "",
                "HOST  RANKS  DEVICES  GPUS                           LIBTORCH           JOINED AFTER",
                "h0    0-3    0-3      4 x NVIDIA H100 (80GB, sm_90)  precompiled/cu128  8 s",
                "h1    4-7    0-3      4 x NVIDIA H100 (80GB, sm_90)  precompiled/cu128  8 s",
            ],
        )

    def test_json_is_the_body_as_it_is(self) -> None:
        door = self.door()
        door.dial().join(host="ü")
        self.assertEqual(self.status(self.http(door), as_json=True), 0)
        self.assertEqual(self.said, [door.controller.run.state_json().decode()])

    def failed(self, ranks: int = 1) -> ClockedController:
        """A run that failed of an exception on each of its ranks, while somebody waited for a key."""
        door = self.door(settings=replace(window(target_ranks=ranks), store=StoreLimits()))
        dial = door.dial()
        dial.join(devices=ranks)
        door.turn()
        dial.messages()
        door.dial().send(HELLO + many(Opcode.WAIT, b"/ready"))
        for rank in range(ranks):
            dial.send(dial.talk.reported(rank, RankError("ValueError", "boom " + "x" * 500, "a.py:1 in f" + "y" * 200)))
        dial.send(dial.talk.exited(0, 1))
        door.clock.advance(7)
        return door

    def test_a_run_that_failed_says_why_and_what_its_store_waits_for(self) -> None:
        self.assertEqual(self.status(self.http(self.failed())), 0)
        told = f"ValueError: boom {'x' * 500}, at a.py:1 in f{'y' * 200}"
        self.assertEqual(
            [self.said[0], *self.said[-3:]],
            [
                f"The run at 127.0.0.1:29500 is failed: rank 0 of host 'gpu-a' exited with code 1 ({told}).",
                f"rank 0: {told}",
                "store: 0 of 1 rank came, 0 keys, 0 bytes",
                "  1 client waiting for /ready, 7 s so far",
            ],
        )

    def test_a_window_that_failed_without_a_quorum_says_so_first(self) -> None:
        door = self.door()
        door.clock.advance(600)
        self.assertEqual(self.status(self.http(door)), 0)
        first = "The run at 127.0.0.1:29500 is failed: quorum not met: 0 of 2 ranks joined within the hard cap (600 s)."
        self.assertEqual(self.said[0], first)

    def test_many_ranks_that_died_are_no_answer_that_is_too_long(self) -> None:
        door = self.failed(100)
        self.assertGreater(len(json.dumps(door.controller.run.why())), 48 * 1024)
        self.assertEqual(self.status(self.http(door)), 0)
        self.assertEqual(len([line for line in self.said if ": ValueError" in line]), 8)

    def test_a_window_that_is_open_has_nothing_more_to_tell(self) -> None:
        site = Pages({b"/state.json": self.door().controller.run.state_json()})
        self.assertEqual(self.status(StubTreq(site)), 0)
        self.assertEqual(site.asked, [b"/state.json"])

    def test_a_controller_without_these_two_has_nothing_more_to_tell(self) -> None:
        site = Pages({b"/state.json": self.failed().controller.run.state_json()})
        self.assertEqual(self.status(StubTreq(site)), 0)
        self.assertEqual(site.asked, [b"/state.json", b"/run.json", b"/store.json"])
        self.assertTrue(self.said[-1].startswith("gpu-a"), self.said)

    def test_another_shape_is_told(self) -> None:
        state = self.failed().controller.run.state_json()
        self.assertEqual(self.status(StubTreq(Pages({b"/state.json": state, b"/run.json": b"{}"}))), 1)
        self.assertEqual(self.said[-1], NOT_OURS + "run.json's rank_errors is missing: it must be a list of objects")

    def test_a_controller_that_goes_after_its_state_has_told_it(self) -> None:
        http = self.http(self.failed())
        answers = iter((http.request, HTTPClient(FailingAgent()).request))

        def request(*asked: Any, **options: Any) -> Any:
            return next(answers)(*asked, **options)

        http.request = request
        self.assertEqual(self.status(http), 0)
        self.assertTrue(self.said[0].startswith("The run at 127.0.0.1:29500 is failed"))

    def test_json_is_the_state_alone(self) -> None:
        door = self.failed()
        self.assertEqual(self.status(self.http(door), as_json=True), 0)
        self.assertEqual(self.said, [door.controller.run.state_json().decode()])

    def test_nothing_that_answers(self) -> None:
        self.assertEqual(self.status(HTTPClient(FailingAgent())), 1)
        self.assertEqual(self.said, [REFUSED])

    def test_what_is_no_controller_is_told_in_one_line(self) -> None:
        for code, body, text in (
            (200, b"<html>hello</html>", f"its state {NO_JSON}"),
            (200, b"", f"its state {NO_JSON}"),
            (200, {"members": []}, "its state's phase is missing: it must be a text, in characters that UTF-8 has"),
            (404, {"error": "not found"}, "GET /state.json gets status 404"),
            (500, b"oops", "GET /state.json gets status 500"),
            (302, b"", "GET /state.json gets status 302"),
        ):
            for as_json in (False, True):
                self.said.clear()
                self.assertEqual(self.status(self.canned(code, body), as_json=as_json), 1)
                self.assertEqual(self.said, [NOT_OURS + text])


class FollowTestCase(OperatorTestCase):
    """A controller that is followed."""

    def follow(self, http: Any, clock: Clock, conversation: operator.Conversation) -> Deferred[int]:
        self.followed = http
        client = ControllerClient(http, clock, *HERE)
        return Deferred.fromCoroutine(operator.told(client, conversation, self.said.append, self.said.append))

    def watch(self, http: Any, clock: Clock, *, as_json: bool = False) -> Deferred[int]:
        return self.follow(http, clock, partial(watch, as_json=as_json))

    def after(self, clock: Clock, seconds: float) -> list[str]:
        """The lines that were printed within these seconds."""
        self.said.clear()
        clock.advance(seconds)
        if isinstance(self.followed, StubTreq):
            # What was held is on its way.
            self.followed.flush()
        return list(self.said)

    def ended(self, door: ClockedController, code: int = 0) -> None:
        """The one host of a world comes, and its rank ends."""
        dial = door.dial()
        dial.join()
        door.turn()
        dial.messages()
        dial.send(dial.talk.exited(0, code))
        dial.hang_up()
        door.turn()


class WatchTests(FollowTestCase):
    def test_a_change_is_printed_and_a_countdown_is_none(self) -> None:
        door = self.door()
        watching = self.watch(self.http(door), door.clock)
        self.assertEqual(len(self.said), 5)
        self.assertEqual(self.after(door.clock, 2), [])
        door.dial().join()
        self.assertEqual(self.after(door.clock, 1), [])
        printed = self.after(door.clock, 1)
        self.assertEqual((printed[0], printed[-1].split()[0]), ("", "gpu-a"))
        self.assertEqual(self.after(door.clock, 2), [])
        self.assertNoResult(watching)
        watching.cancel()
        self.failureResultOf(watching, CancelledError)

    def test_a_countdown_that_has_run_out_is_a_change(self) -> None:
        door = self.door(settings=window(min_rank_start=2))
        watching = self.watch(self.http(door), door.clock)
        for _ in range(150):
            self.assertEqual(self.after(door.clock, 2), [])
        self.assertIn("  window    past: the world forms as soon as there is a quorum", self.after(door.clock, 2))
        watching.cancel()
        self.failureResultOf(watching, CancelledError)

    def test_as_json_each_change_is_a_line(self) -> None:
        door = self.door()
        watching = self.watch(self.http(door), door.clock, as_json=True)
        door.dial().join()
        door.clock.advance(2)
        self.assertEqual([json.loads(line)["joined_ranks"] for line in self.said], [0, 1])
        watching.cancel()
        self.failureResultOf(watching, CancelledError)

    def test_it_ends_with_the_run(self) -> None:
        door = self.door(settings=window(target_ranks=1))
        watching = self.watch(self.http(door), door.clock)
        self.ended(door)
        self.assertIn("The run at 127.0.0.1:29500 is done: every rank has exited with 0.", self.after(door.clock, 2))
        self.assertEqual(self.successResultOf(watching), 0)

    def test_a_run_that_failed_is_status_1_and_its_last_lines_begin_with_the_reason(self) -> None:
        door = self.door(settings=window(target_ranks=1))
        watching = self.watch(self.http(door), door.clock)
        self.ended(door, 3)
        told = self.after(door.clock, 2)
        self.assertEqual(told[:2], ["", f"{FAILED} rank 0 of host 'gpu-a' exited with code 3."])
        self.assertEqual(self.successResultOf(watching), 1)

    def test_as_json_a_run_that_failed_is_status_1_too(self) -> None:
        door = self.door(settings=window(target_ranks=1))
        watching = self.watch(self.http(door), door.clock, as_json=True)
        self.ended(door, 3)
        self.assertEqual(json.loads(self.after(door.clock, 2)[0])["phase"], "failed")
        self.assertEqual(self.successResultOf(watching), 1)

    def test_it_follows_one_run_though_the_next_window_is_open(self) -> None:
        door = self.door(settings=window(target_ranks=1), after_run=AfterRun.REARM)
        for as_json, code, status, told in (
            (False, 0, 0, ["The run at 127.0.0.1:29500 is done: every rank has exited with 0."]),
            (False, 3, 1, [f"{FAILED} rank 0 of host 'gpu-a' exited with code 3."]),
            (True, 3, 1, []),
        ):
            watching = self.watch(self.http(door), door.clock, as_json=as_json)
            self.ended(door, code)
            self.assertEqual(door.state()["phase"], "waiting")
            self.assertEqual(self.after(door.clock, 2), told)
            self.assertEqual(self.successResultOf(watching), status)

    def test_it_says_how_the_run_ended_though_its_controller_ends_with_it(self) -> None:
        door = self.door(settings=window(target_ranks=1))
        http = self.http(door)
        watching = self.watch(http, door.clock)
        http.request = HTTPClient(FailingAgent()).request
        self.ended(door, 3)
        self.assertEqual(self.after(door.clock, 2), [])
        self.assertEqual(self.after(door.clock, 2), [f"{FAILED} rank 0 of host 'gpu-a' exited with code 3."])
        self.assertEqual(self.successResultOf(watching), 1)

    def test_another_controller_on_the_port_is_not_taken_for_the_first(self) -> None:
        door, other = self.door(), self.door()
        http = self.http(door)
        watching = self.watch(http, door.clock)
        http.request = self.http(other).request
        # The question that the first one holds is over.
        door.clock.pump([2] * 11)
        http.flush()
        self.assertEqual(
            self.after(door.clock, 2)[-1:],
            [
                "another controller answers at 127.0.0.1:29500 now: "
                "the run was waiting before, and the log of its controller has its end"
            ],
        )
        self.assertEqual(self.successResultOf(watching), 1)

    def test_a_controller_without_ids_is_watched_by_its_state(self) -> None:
        door = self.door(settings=window(target_ranks=1))
        site = Pages({b"/state.json": door.controller.run.state_json()})
        watching = self.watch(StubTreq(site), door.clock)
        self.ended(door)
        site.bodies[b"/state.json"] = door.controller.run.state_json()
        self.assertIn("The run at 127.0.0.1:29500 is done: every rank has exited with 0.", self.after(door.clock, 2))
        self.assertEqual(self.successResultOf(watching), 0)

    def test_a_controller_that_was_never_there(self) -> None:
        self.assertEqual(self.successResultOf(self.watch(HTTPClient(FailingAgent()), Clock())), 1)
        self.assertEqual(self.said, [REFUSED])

    def test_what_is_no_controller_ends_it_and_leaves_nothing_behind(self) -> None:
        door = self.door()
        http = self.http(door)
        watching = self.watch(http, door.clock)
        http.request = self.canned(200, b"<html>").request
        self.assertEqual(self.after(door.clock, 2), [f"{NOT_OURS}its state {NO_JSON}"])
        self.assertEqual(self.successResultOf(watching), 1)

    def test_a_controller_that_has_gone_is_asked_three_times(self) -> None:
        # It gives its runs no ids, so no question is held.
        site = Pages({b"/state.json": self.door().controller.run.state_json()})
        http, clock = StubTreq(site), Clock()
        here: Callable[..., Any] = http.request
        watching = self.watch(http, clock)
        gone: Callable[..., Any] = HTTPClient(FailingAgent()).request
        for request in (gone, gone, here, gone, gone):
            http.request = request
            self.assertEqual(self.after(clock, 2), [])
        self.assertNoResult(watching)
        (line,) = self.after(clock, 2)
        self.assertEqual(
            line,
            f"the controller has gone, its run was waiting: {REFUSED}; "
            "it ends with its run, unless it has --after-run hold or rearm: its log has the run's end",
        )
        self.assertEqual(self.successResultOf(watching), 1)


class WaitTests(FollowTestCase):
    """``wait`` says one line, when the run is over."""

    def test_it_is_quiet_until_the_run_is_over(self) -> None:
        door = self.door(settings=window(target_ranks=1), after_run=AfterRun.REARM)
        for code, status, told in (
            (0, 0, "The run at 127.0.0.1:29500 is done: every rank has exited with 0."),
            (3, 1, f"{FAILED} rank 0 of host 'gpu-a' exited with code 3."),
        ):
            waiting = self.follow(self.http(door), door.clock, wait_for_end)
            for _ in range(30):
                self.assertEqual(self.after(door.clock, 2), [])
            self.ended(door, code)
            self.assertEqual(self.after(door.clock, 0), [told])
            self.assertEqual(self.successResultOf(waiting), status)

    def test_a_run_that_is_over_is_told_at_once(self) -> None:
        door = self.door(settings=window(target_ranks=1))
        self.ended(door)
        self.assertEqual(self.successResultOf(self.follow(self.http(door), door.clock, wait_for_end)), 0)

    def test_a_controller_without_ids_cannot_be_waited_for(self) -> None:
        waiting = self.follow(StubTreq(Pages({})), Clock(), wait_for_end)
        self.assertEqual(self.said, ["127.0.0.1:29500 gives its runs no ids: use status --watch"])
        self.assertEqual(self.successResultOf(waiting), 1)
