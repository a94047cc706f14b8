"""The controller: the operator's start, what follows a run, and the end of the process."""

from __future__ import annotations

import time
from typing import Any

from twisted.logger import LogLevel

from flodl_tw.core.messages import Abort, Accept, RankExited, encode_join
from flodl_tw.core.run_settings import AfterRun
from flodl_tw.testing import ClockedController, FakeDial, SimulatedClient, make_hello
from tests.pumped import HYBRID, MANUAL, TOKEN, PumpedTestCase, fill, window

START = b"POST /start HTTP/1.1\r\nHost: localhost:29500\r\n\r\n"


def kinds(dial: FakeDial) -> list[str]:
    """The kinds of message that came to a dial since the last look."""
    return [type(message).__name__ for message in dial.messages()]


class OperatorStartTests(PumpedTestCase):
    """Arming, in modes that hear the operator."""

    def test_a_start_with_a_quorum_forms_the_world_in_that_turn(self) -> None:
        for mode in (MANUAL, HYBRID):
            door = ClockedController(window(start_mode=mode))
            (dial,) = fill(door, 1)
            door.turn()
            self.assertEqual(door.state()["phase"], "staging")
            self.assertTrue(door.http(START).startswith(b"HTTP/1.1 200 "))
            self.assertEqual(kinds(dial), ["WorldFormed"])
            state = door.state()
            self.assertEqual((state["phase"], state["start_armed"]), ("training", True))

    def test_an_armed_start_outlives_a_quorum_that_is_lost_in_its_turn(self) -> None:
        door = ClockedController(window(min_rank_start=2, start_mode=MANUAL))
        dials = fill(door, 2)
        door.turn()
        door.controller.run.arm("127.0.0.1")
        dials[0].reset()
        door.turn()
        state = door.state()
        self.assertEqual((state["phase"], state["start_armed"], state["joined_ranks"]), ("waiting", True, 1))
        door.clock.advance(100)
        self.assertEqual(door.state()["phase"], "waiting")
        door.dial().join(host="again")
        door.turn()
        state = door.state()
        self.assertEqual((state["phase"], state["start_armed"]), ("training", True))

    def test_the_log_says_of_the_window_what_status_says(self) -> None:
        for mode, said in ((MANUAL, "is held for the operator's start"), (HYBRID, "is open for 300 s")):
            self.forget()
            ClockedController(window(start_mode=mode))
            self.line(f"the join window {said}, with a hard cap of 600 s")

    def test_armed_without_a_quorum_until_the_cap_fails_and_stays_armed(self) -> None:
        door = ClockedController(window(min_rank_start=2, start_mode=MANUAL))
        dials = fill(door, 2)
        door.controller.run.arm("127.0.0.1")
        dials[0].reset()
        door.clock.advance(600)
        state = door.state()
        self.assertEqual((state["phase"], state["start_armed"]), ("failed", True))

    def test_arming_after_the_verdict_changes_nothing(self) -> None:
        door = ClockedController(window(target_ranks=1, start_mode=HYBRID))
        fill(door, 1)
        door.turn()
        door.controller.run.arm("127.0.0.1")
        self.assertFalse(door.state()["start_armed"])

    def test_who_dials_in_the_turn_of_the_start_finds_the_window_closed(self) -> None:
        door = ClockedController(window(start_mode=MANUAL))
        fill(door, 1)
        door.turn()
        door.controller.run.arm("127.0.0.1")
        self.assertTrue(door.dial().join(host="late").reason.startswith("window-closed: "))


class AfterRunTests(PumpedTestCase):
    """exit, hold and rearm."""

    def ends(self, door: ClockedController) -> list[str]:
        """The outcome of the run that is current now, once it has come."""
        ended: list[str] = []
        door.server.when_over().addCallback(lambda end: ended.append(end.phase.value))
        return ended

    def play(self, door: ClockedController, *, code: int = 0, host: str = "a", token: bytes | None = None) -> FakeDial:
        dial = door.dial(token=token)
        self.assertIsInstance(dial.join(host=host), Accept)
        door.turn()
        self.assertEqual(kinds(dial), ["WorldFormed"])
        dial.send(dial.talk.exited(0, code))
        dial.hang_up()
        door.turn()
        return dial

    def test_the_last_run_is_served_on_and_everybody_learns_its_outcome_once(self) -> None:
        for code, outcome in ((0, "done"), (3, "failed")):
            for after_run in (AfterRun.EXIT, AfterRun.HOLD):
                door = ClockedController(window(target_ranks=1), after_run=after_run)
                ends = self.ends(door), self.ends(door)
                self.play(door, code=code)
                state = door.state()
                door.clock.advance(10_000)
                door.http(START)
                self.assertEqual(ends, ([outcome], [outcome]))
                self.assertEqual(self.ends(door), [outcome])
                self.assertEqual(door.state(), state)
                self.assertEqual((state["phase"], state["joined_hosts"]), (outcome, 1))
                self.assertTrue(door.dial().join(host="late").reason.startswith("window-closed: "))

    def test_the_end_waits_for_the_last_link(self) -> None:
        door = ClockedController(window(target_ranks=2), after_run=AfterRun.EXIT)
        ended = self.ends(door)
        slow = door.dial(reads=False)
        slow.join(host="slow")
        other = door.dial()
        other.join(host="other")
        door.turn()
        other.reset()
        door.turn()
        self.assertEqual((door.state()["phase"], ended), ("failed", []))
        door.clock.advance(2)
        door.turn()
        self.assertEqual(ended, ["failed"])

    def test_a_window_that_fails_with_nobody_in_it_is_over_too(self) -> None:
        door = ClockedController(window(), after_run=AfterRun.EXIT)
        ended = self.ends(door)
        door.clock.advance(600)
        self.assertEqual(ended, ["failed"])
        self.assert_idle(door)

    def test_rearm_opens_the_next_window_in_the_turn_of_the_last_links_end(self) -> None:
        door = ClockedController(window(min_rank_start=2, start_mode=MANUAL), after_run=AfterRun.REARM)
        dials = fill(door, 2)
        door.dial().join(host=" ")
        door.clock.advance(50)
        door.http(START)
        self.assertEqual((door.state()["phase"], door.controller.run.window.refused), ("training", 1))
        for rank, dial in enumerate(dials):
            dial.messages()
            dial.send(dial.talk.exited(rank))
        dials[0].hang_up()
        door.turn()
        self.assertEqual(door.state()["phase"], "training")
        dials[1].half_close()
        door.clock.advance(0)
        self.assertEqual(
            door.state(),
            {
                "phase": "waiting",
                "joined_ranks": 0,
                "joined_hosts": 0,
                "min_rank_start": 2,
                "target_ranks": None,
                "window_remaining_secs": 300,
                "cap_remaining_secs": 600,
                "start_mode": "manual",
                "start_armed": False,
                "members": [],
            },
        )
        self.assertEqual(door.controller.run.window.refused, 0)

    def test_the_next_run_has_deadlines_of_its_own(self) -> None:
        door = ClockedController(window(target_ranks=1), after_run=AfterRun.REARM)
        self.play(door)
        door.clock.advance(200)
        self.play(door)
        door.clock.advance(599.999)
        self.assertEqual(door.state()["phase"], "waiting")
        self.assertEqual(door.state()["cap_remaining_secs"], 0)
        door.clock.advance(0.001)
        # It failed, and the one after it is open.
        self.assertEqual(door.state()["cap_remaining_secs"], 600)
        self.line("the window closes, and no host was in it", "quorum not met: 0 of 1")

    def test_each_run_has_a_fresh_salt_under_open_admission_and_the_token_otherwise(self) -> None:
        door = ClockedController(window(target_ranks=1), after_run=AfterRun.REARM)
        salts = [self.play(door).talk.salt for _ in range(3)]
        self.assertEqual(len({*salts, door.controller.run.session_salt}), 4)
        door = ClockedController(window(target_ranks=1), after_run=AfterRun.REARM, token=TOKEN)
        worlds = []
        for _ in range(3):
            dial = self.play(door, token=TOKEN)
            self.assertEqual(door.controller.run.session_salt, TOKEN)
            worlds.append(dial.talk.envelope["salt"])
        self.assertEqual(len({*worlds, TOKEN.hex()}), 4)

    def test_nothing_of_the_last_run_reaches_the_next(self) -> None:
        door = ClockedController(window(target_ranks=1), after_run=AfterRun.REARM, token=TOKEN)
        old = door.dial(token=TOKEN, reads=False)
        old.join(host="a")
        door.turn()
        old.messages()
        old.send(old.talk.exited(0))
        old.half_close()  # its connection lives on, and its run is over
        door.turn()
        self.assertEqual(door.state()["phase"], "waiting")
        new = door.dial("10.0.0.2", token=TOKEN)
        self.assertIsInstance(new.join(host="a"), Accept)
        door.turn()
        self.assertEqual(kinds(new), ["WorldFormed"])
        run = door.controller.run
        before = door.state()
        self.forget()
        for late in (old.talk.exited(0, 9), old.talk.hello(make_hello("a"))[4:], b"rubbish"):
            old.send(late)
        old.reset()
        door.turn()
        self.assertIs(door.controller.run, run)
        self.assertEqual(door.state(), before)
        self.assertEqual((before["phase"], new.messages(), new.closed), ("training", [], False))
        self.assertEqual(self.lines(), [])

    def test_a_late_frame_under_the_token_cannot_be_taken_for_a_new_hosts(self) -> None:
        door = ClockedController(window(target_ranks=1), after_run=AfterRun.REARM, token=TOKEN)
        self.play(door, token=TOKEN)
        late = door.dial(token=TOKEN)
        late.send(SimulatedClient(token=TOKEN).hello(make_hello())[:4] + encode_join(TOKEN, 4, RankExited(0, 9)))
        (answer,) = late.messages()
        self.assertTrue(answer.reason.startswith("not-a-hello: "), answer)

    def test_a_dial_from_before_the_rearm_joins_the_run_of_its_hello(self) -> None:
        door = ClockedController(window(target_ranks=1), after_run=AfterRun.REARM)
        early = door.dial("10.0.0.9")
        whole = early.talk.hello(make_hello("early"))
        early.send(whole[:20])
        self.play(door)
        early.send(whole[20:])
        self.assertEqual(early.messages()[0].ranks, (0,))
        self.assertEqual(early.talk.salt, door.controller.run.session_salt)
        door.turn()
        self.assertEqual(kinds(early), ["WorldFormed"])

    def test_a_hello_between_the_abort_and_the_end_is_for_no_run(self) -> None:
        door = ClockedController(window(target_ranks=2), after_run=AfterRun.REARM)
        slow, other = door.dial(reads=False), door.dial()
        slow.join(host="slow")
        other.join(host="other")
        door.turn()
        other.reset()
        door.turn()
        answer = door.dial().join(host="other")
        self.assertTrue(answer.reason.startswith("window-closed: "), answer)
        self.assertIn("failed", answer.reason)
        door.clock.advance(2)
        door.turn()
        self.assertIsInstance(door.dial().join(host="other"), Accept)

    def test_rearm_goes_on_for_many_runs_with_one_timer(self) -> None:
        door = ClockedController(window(target_ranks=1), after_run=AfterRun.REARM)
        for _ in range(20):
            self.play(door)
        self.assertEqual(len(door.front), 0)
        door.clock.advance(20)
        self.assertEqual(len(door.clock.getDelayedCalls()), 1)


class LostTests(PumpedTestCase):
    """Only a run that somebody has lost is an error in the log."""

    NOBODY = "the window closes, and no host was in it: "

    def test_a_clean_stop_of_a_window_that_nobody_is_in_is_none(self) -> None:
        ClockedController(window()).controller.stop()
        self.line(self.NOBODY + "the controller was stopped", level=LogLevel.info)
        self.assertEqual(self.lines(LogLevel.warn), [])

    def test_an_idle_window_that_is_opened_again_is_none(self) -> None:
        door = ClockedController(window(), after_run=AfterRun.REARM)
        door.clock.advance(600)
        door.turn()
        self.line(self.NOBODY + "quorum not met: 0 of 1 ranks joined", level=LogLevel.info)
        self.assertEqual(self.lines(LogLevel.warn), [])

    def test_an_abort_of_a_window_that_nobody_is_in_is_none(self) -> None:
        ClockedController(window()).controller.run.abort("tried", "127.0.0.1")
        self.line(self.NOBODY + "aborted by the operator: tried", level=LogLevel.info)

    def test_a_stop_or_an_end_that_somebody_has_lost_is_one(self) -> None:
        def joined(door: ClockedController) -> None:
            door.dial().join()
            door.controller.stop()

        def left(door: ClockedController) -> None:
            dial = door.dial()
            dial.join()
            dial.hang_up()
            door.clock.advance(600)

        def refused(door: ClockedController) -> None:
            door.dial().join(devices=0)
            door.clock.advance(600)

        def awaited(door: ClockedController) -> None:
            door.clock.advance(600)

        for happens, after_run in (
            (joined, AfterRun.EXIT),
            (left, AfterRun.REARM),
            (refused, AfterRun.REARM),
            (awaited, AfterRun.EXIT),
        ):
            with self.subTest(happens.__name__):
                self.forget()
                happens(ClockedController(window(min_rank_start=2), after_run=after_run))
                self.line("the run has failed: ", level=LogLevel.error)


class RearmedClockTests(PumpedTestCase):
    """The next run has deadlines of its own."""

    def test_the_next_window_closes_at_its_own_time_though_the_old_one_ended_within_a_turn(self) -> None:
        door = ClockedController(window(join_timeout=20, max_join_timeout=400, max_rejects=1), after_run=AfterRun.REARM)
        door.clock.advance(30)
        for host in "ab":
            door.dial().join(host=host, devices=0)
        door.turn()
        self.assertEqual(door.state()["window_remaining_secs"], 20)
        door.dial().join()
        door.clock.advance(20)
        door.turn()
        self.assertEqual(door.state()["phase"], "training")


class ClockTests(PumpedTestCase):
    """Time is the clock's alone."""

    def test_a_step_of_the_wall_clock_moves_nothing(self) -> None:
        for step in (-86_400.0, 86_400.0):
            door = ClockedController(window(min_rank_start=2))
            fill(door, 1)
            door.clock.advance(100)
            before = door.state()
            wall = time.time()
            self.patch(time, "time", lambda moment=wall + step: moment)
            door.turn()
            self.assertEqual(door.state(), before)
            self.assertEqual(before["window_remaining_secs"], 200)
            door.clock.advance(499.5)
            self.assertEqual(door.state()["phase"], "waiting")
            door.clock.advance(0.5)
            self.assertEqual(door.state()["phase"], "failed")

    def test_an_idle_window_wakes_nobody_but_at_its_two_deadlines(self) -> None:
        door = ClockedController(window())
        moments: list[float] = []
        evaluate = door.controller.run.evaluate

        def watched() -> None:
            moments.append(door.clock.seconds())
            evaluate()

        self.patch(door.controller.run, "evaluate", watched)
        for _ in range(1400):
            door.clock.advance(0.5)
        self.assertEqual(moments, [300, 600])


class StopTests(PumpedTestCase):
    """SIGTERM, as far as the controller sees it."""

    def test_an_abort_that_was_due_in_that_turn_is_sent(self) -> None:
        door = ClockedController(window(target_ranks=2))
        dials = fill(door, 2)
        door.turn()
        for dial in dials:
            dial.messages()
        dials[0].send(dials[0].talk.exited(0, 1))
        door.controller.stop()
        for dial in dials:
            (abort,) = dial.messages()
            self.assertIn("exited with code 1", abort.reason)

    def stop(self, door: ClockedController) -> None:
        door.controller.stop()
        door.turn()

    def test_every_joined_host_gets_an_abort(self) -> None:
        for settings in (window(min_rank_start=9), window(target_ranks=2)):
            door = ClockedController(settings)
            dials = fill(door, 2)
            door.turn()
            for dial in dials:
                dial.messages()
            self.stop(door)
            for dial in dials:
                (abort,) = dial.messages()
                self.assertIsInstance(abort, Abort)
                self.assertIn("stopped", abort.reason)
                self.assertTrue(dial.closed)

    def test_a_stop_in_the_turn_of_a_verdict_sends_no_world(self) -> None:
        door = ClockedController(window(target_ranks=2))
        dials = fill(door, 2)
        self.stop(door)
        self.assertEqual([kinds(dial) for dial in dials], [["Abort"], ["Abort"]])

    def test_a_stop_while_an_abort_leaves_adds_no_second_one(self) -> None:
        door = ClockedController(window(target_ranks=2))
        slow, other = door.dial(reads=False), door.dial()
        slow.join(host="slow")
        other.join(host="other")
        door.turn()
        slow.messages()
        other.reset()
        door.turn()
        self.assertEqual(kinds(slow), ["Abort"])
        self.forget()
        self.stop(door)
        self.assertEqual(kinds(slow), [])
        self.assertEqual([line for line in self.lines() if "the run has failed" in line], [])

    def test_a_stop_without_members_leaves_no_call_behind(self) -> None:
        for hosts in (0, 2):
            door = ClockedController(window(min_rank_start=9))
            fill(door, hosts)
            door.server.stopService()
            door.turn()
            self.assert_idle(door)

    def test_a_stopped_controller_opens_no_further_run(self) -> None:
        door = ClockedController(window(target_ranks=1), after_run=AfterRun.REARM)
        (dial,) = fill(door, 1)
        door.turn()
        run = door.controller.run
        self.stop(door)
        self.assertTrue(dial.closed)
        door.clock.advance(1000)
        self.assertIs(door.controller.run, run)
        self.assertEqual(door.state()["phase"], "failed")

    def test_a_run_that_is_over_is_left_as_it_is(self) -> None:
        states: list[dict[str, Any]] = []
        door = ClockedController(window(target_ranks=1), after_run=AfterRun.HOLD)
        (dial,) = fill(door, 1)
        door.turn()
        dial.send(dial.talk.exited(0))
        dial.hang_up()
        door.turn()
        states.append(door.state())
        self.stop(door)
        states.append(door.state())
        self.assertEqual(states[0]["phase"], "done")
        self.assertEqual(states[0], states[1])
