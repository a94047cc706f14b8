"""One run: its verdict, its world, and what becomes of hosts and ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from twisted.logger import LogLevel

from flodl_tw.core.ends import LinkEnd
from flodl_tw.core.messages import Abort, Accept, RankExited, Reject, WorldFormed, encode_join
from flodl_tw.core.reports import RankError
from flodl_tw.core.run_settings import AfterRun, OnLoss
from flodl_tw.core.store.wire import StoreLimits
from flodl_tw.core.views import SHOWN_ERRORS
from flodl_tw.testing import ClockedController, FakeDial, make_hello
from tests.pumped import HYBRID, MANUAL, TOKEN, PumpedTestCase, fill, turns, window

FROZEN = ("joined_ranks", "joined_hosts", "members", "start_armed")


def types(dial: FakeDial) -> list[str]:
    """The kinds of message that came to a dial since the last look."""
    return [type(message).__name__ for message in dial.messages()]


class VerdictTests(PumpedTestCase):
    """When the window closes, and for whom."""

    def test_an_accept_is_on_its_link_before_the_world_that_it_leads_to(self) -> None:
        door = ClockedController(window(target_ranks=1))
        dial = door.dial()
        dial.send(dial.talk.hello(make_hello()))
        self.assertEqual(door.state()["phase"], "waiting")
        door.turn()
        self.assertEqual(types(dial), ["Accept", "WorldFormed"])
        self.assertEqual(door.state()["phase"], "training")

    def test_one_verdict_is_taken_for_all_that_happened_in_a_turn(self) -> None:
        door = ClockedController(window(min_rank_start=2, target_ranks=3))
        self.forget()
        dials = fill(door, 3)
        dials[0].reset()
        door.turn()
        self.assertEqual(door.state()["phase"], "waiting")
        self.assertEqual(door.state()["joined_ranks"], 2)
        self.assertEqual([line for line in self.lines() if "the world forms" in line], [])
        door.dial().join(host="h0")
        door.turn()
        self.assertEqual(door.state()["phase"], "training")
        self.line("the world forms: 3 ranks on 3 hosts")

    def test_a_host_that_overshoots_the_target_is_admitted_whole(self) -> None:
        door = ClockedController(window(target_ranks=2))
        door.dial().join(host="a")
        last = door.dial("10.0.0.2")
        self.assertEqual(last.join(host="b", devices=8).ranks, tuple(range(1, 9)))
        door.turn()
        self.assertIsInstance(last.messages()[0], WorldFormed)
        self.assertEqual(last.talk.envelope["world_size"], 9)

    def test_a_world_with_more_ranks_than_its_target_says_so_once(self) -> None:
        door = ClockedController(window(min_rank_start=2, target_ranks=8))
        fill(door, 3, devices=3)
        door.turn()
        self.assertEqual(door.state()["phase"], "training")
        self.line("more than the target of 8 ranks", "--min-rank-start 8 has such a host refused", level=LogLevel.warn)

    def test_where_quorum_and_target_are_one_no_world_has_more_ranks(self) -> None:
        door = ClockedController(window(min_rank_start=8, target_ranks=8))
        fill(door, 2, devices=3)
        answer = door.dial("10.0.0.3").join(host="h2", devices=3)
        self.assertIsInstance(answer, Reject)
        self.assertTrue(answer.reason.startswith("too-many-ranks: 'h2' offers 3 devices, and 2 of 8 ranks are free"))
        self.assertIsInstance(door.dial("10.0.0.3").join(host="h2", devices=2), Accept)
        door.turn()
        self.assertEqual(door.state()["joined_ranks"], 8)
        self.assertEqual(door.state()["phase"], "training")

    def test_who_dials_in_the_turn_of_the_target_finds_the_window_closed(self) -> None:
        door = ClockedController(window(target_ranks=1))
        door.dial().join(host="a")
        answer = door.dial().join(host="b")
        self.assertIsInstance(answer, Reject)
        self.assertTrue(answer.reason.startswith("window-closed: "), answer)
        self.assertIn("forming", answer.reason)
        door.turn()
        self.assertEqual(door.state()["joined_hosts"], 1)

    def test_who_dials_in_the_turn_of_the_deadline_finds_the_window_closed(self) -> None:
        door = ClockedController(window())
        door.dial().join(host="a")
        door.turn()
        door.clock.rightNow += 300  # the time is over, and the turn that says so is yet to come
        late = door.dial().join(host="b")
        door.turn()
        self.assertTrue(late.reason.startswith("window-closed: "), late)
        self.assertEqual(door.state()["phase"], "training")

    def test_each_mode_keeps_to_its_deadlines(self) -> None:
        table: tuple[tuple[str, dict[str, Any], int, int, str], ...] = (
            ("auto with a quorum", {}, 1, 300, "training"),
            ("auto without", {"min_rank_start": 2}, 1, 600, "failed"),
            ("auto, quorum, target unmet", {"target_ranks": 4}, 1, 300, "training"),
            ("hybrid with a quorum", {"start_mode": HYBRID}, 1, 300, "training"),
            ("hybrid without", {"start_mode": HYBRID, "min_rank_start": 2}, 1, 600, "failed"),
            ("manual with a quorum", {"start_mode": MANUAL}, 1, 600, "failed"),
            ("manual without", {"start_mode": MANUAL, "min_rank_start": 2}, 1, 600, "failed"),
            ("nobody", {}, 0, 600, "failed"),
            ("a window as long as the cap", {"join_timeout": 600}, 0, 600, "failed"),
        )
        for name, fields, hosts, moment, phase in table:
            door = ClockedController(window(**fields))
            fill(door, hosts)
            door.turn()
            door.clock.advance(moment - 0.001)
            door.turn()
            self.assertIn(door.state()["phase"], ("waiting", "staging"), name)
            door.clock.advance(0.001)
            door.turn()
            self.assertEqual(door.state()["phase"], phase, name)

    def test_a_quorum_between_window_and_cap_forms_the_world_at_once(self) -> None:
        door = ClockedController(window(min_rank_start=2))
        first = door.dial()
        first.join(host="a")
        door.clock.advance(400)
        self.assertEqual(door.state()["phase"], "waiting")
        self.assertEqual((door.state()["window_remaining_secs"], door.state()["cap_remaining_secs"]), (None, 200))
        door.dial().join(host="b")
        door.turn()
        self.assertEqual(door.state()["phase"], "training")
        self.assertEqual(types(first), ["Accept", "WorldFormed"][1:])

    def test_staging_is_told_in_manual_and_hybrid_until_the_cap(self) -> None:
        for mode, phase in ((MANUAL, "staging"), (HYBRID, "staging")):
            door = ClockedController(window(min_rank_start=2, start_mode=mode))
            dials = fill(door, 1)
            self.assertEqual(door.state()["phase"], "waiting")
            dials.append(door.dial())
            dials[-1].join(host="b")
            self.assertEqual(door.state()["phase"], phase)
            dials[0].reset()
            self.assertEqual(door.state()["phase"], "waiting")

    def test_a_failed_window_aborts_everybody_with_the_reason(self) -> None:
        table: tuple[tuple[dict[str, Any], str], ...] = (
            ({"min_rank_start": 3}, "quorum not met: 2 of 3 ranks joined within the hard cap (600 s)"),
            ({"min_rank_start": 2, "start_mode": MANUAL}, "the operator never started it: 2 ranks"),
        )
        for fields, reason in table:
            door = ClockedController(window(**fields))
            dials = fill(door, 2)
            self.forget()
            door.clock.advance(600)
            for dial in dials:
                (abort,) = dial.messages()
                self.assertIsInstance(abort, Abort)
                self.assertIn(reason, abort.reason)
                self.assertTrue(dial.closed)
            self.line("the run has failed", reason, level=LogLevel.error)
            state = door.state()
            self.assertEqual((state["phase"], state["joined_hosts"], len(state["members"])), ("failed", 2, 2))

    def test_a_scaled_cap_is_named_beside_the_configured_one(self) -> None:
        settings = window(min_rank_start=2)
        object.__setattr__(settings.window, "window_secs", 150.0)
        object.__setattr__(settings.window, "cap_secs", 300.0)
        door = ClockedController(settings)
        self.assertEqual(door.state()["cap_remaining_secs"], 300)
        door.clock.advance(300)
        self.line("the run has failed", "hard cap (600 s, scaled to 300 s)")

    def test_from_the_verdict_on_the_state_stays_whoever_leaves(self) -> None:
        for on_loss in OnLoss:
            door = ClockedController(window(target_ranks=3, on_loss=on_loss))
            dials = fill(door, 3)
            door.turn()
            frozen = {key: door.state()[key] for key in FROZEN}
            self.assertEqual(frozen["joined_ranks"], 3)
            for dial in dials:
                dial.reset()
                door.turn()
                state = door.state()
                self.assertEqual({key: state[key] for key in FROZEN}, frozen)
                self.assertEqual((state["window_remaining_secs"], state["cap_remaining_secs"]), (None, None))

    def test_a_failed_window_keeps_its_state_too(self) -> None:
        door = ClockedController(window(min_rank_start=9))
        fill(door, 2)
        before = door.state()
        door.clock.advance(700)
        state = door.state()
        self.assertEqual({key: state[key] for key in FROZEN}, {key: before[key] for key in FROZEN})
        self.assertEqual((state["window_remaining_secs"], state["cap_remaining_secs"]), (None, None))


class RefusalLogTests(PumpedTestCase):
    """What a stranger can have written to the log."""

    def test_a_refused_name_is_cut_whatever_the_reason(self) -> None:
        door = ClockedController(window(target_ranks=1))
        door.dial().join()
        self.forget()
        for host in ("\x01" * 60000, "x" * 60000):
            door.dial().join(host=host)
        door.turn()
        door.dial().join(host="x" * 60000)
        self.assertLess(max(map(len, self.lines())), 1000)


class DepartureTests(PumpedTestCase):
    """Hosts that leave while the window is open."""

    def test_a_departed_host_frees_its_name_and_no_longer_counts(self) -> None:
        for end in (FakeDial.hang_up, FakeDial.reset, FakeDial.vanish):
            door = ClockedController(window(min_rank_start=2))
            first = door.dial()
            first.join(host="a")
            end(first)
            door.turn()
            self.assertEqual((door.state()["joined_ranks"], door.state()["members"]), (0, []))
            self.assertEqual(door.dial("10.0.0.9").join(host="a").ranks, (0,))

    def test_while_the_old_link_lives_its_address_and_age_are_named(self) -> None:
        door = ClockedController(window(min_rank_start=3))
        door.dial("10.0.0.7").join(host="a")
        door.clock.advance(42.9)
        answer = door.dial("10.0.0.8").join(host="a")
        self.assertTrue(answer.reason.startswith("duplicate-host: "), answer)
        self.assertIn("10.0.0.7", answer.reason)
        self.assertIn("42 s", answer.reason)

    def test_names_are_compared_as_sent(self) -> None:
        door = ClockedController(window(min_rank_start=9))
        for number, name in enumerate(("GPU1", "gpu1", "node.a", "node.b", " gpu1")):
            self.assertEqual(door.dial().join(host=name).ranks, (number,))

    def test_what_only_the_departed_stated_is_forgotten(self) -> None:
        door = ClockedController(window(min_rank_start=9))
        first = door.dial()
        first.join(host="a", dataset_sig=b"x" * 32)
        self.assertIsInstance(door.dial().join(host="b", dataset_sig=b"y" * 32), Reject)
        first.reset()
        self.assertIsInstance(door.dial().join(host="b", dataset_sig=b"y" * 32), Accept)

    def test_final_ranks_are_contiguous_and_exits_are_translated(self) -> None:
        door = ClockedController(window(target_ranks=4))
        first, second, third = (door.dial(f"10.0.0.{number}") for number in (1, 2, 3))
        self.assertEqual(first.join(host="a").ranks, (0,))
        self.assertEqual(second.join(host="b", devices=2).ranks, (1, 2))
        first.reset()
        self.assertEqual(door.state()["members"][0]["ranks"], [0, 1])
        self.assertEqual(third.join(host="c", devices=2).ranks, (2, 3))
        self.forget()
        door.turn()
        self.line("ranks moved", "'b' from ranks 1-2 to ranks 0-1")
        state = door.state()
        self.assertEqual(
            [(member["host"], member["ranks"]) for member in state["members"]], [("b", [0, 1]), ("c", [2, 3])]
        )
        second.messages(), third.messages()
        self.assertEqual(second.talk.envelope["worker"]["ranks"], [0, 1])
        self.assertEqual(third.talk.envelope["worker"]["ranks"], [2, 3])
        # The agent goes on to name its ranks as its Accept did.
        second.send(second.talk.exited(2, 3))
        self.line("'b'", "rank 1", "rank 2 to its agent", "code 3", level=LogLevel.warn)
        door.turn()
        (abort,) = third.messages()
        self.assertIn("rank 1 of host 'b'", abort.reason)

    def test_a_rank_that_is_final_but_was_not_accepted_is_a_violation(self) -> None:
        door = ClockedController(window(target_ranks=2))
        first, second = door.dial(), door.dial("10.0.0.2")
        first.join(host="a")
        second.join(host="b", devices=2)
        first.reset()
        door.turn()
        second.messages()
        self.assertEqual(second.talk.envelope["worker"]["ranks"], [0, 1])
        second.send(encode_join(second.talk.salt, 4, RankExited(0, 0)))
        self.line("'b'", "RankExited for rank 0", "ranks 1-2", "its link is closed")

    def test_a_world_without_moves_says_nothing_of_moves(self) -> None:
        door = ClockedController(window(target_ranks=2))
        fill(door, 2)
        door.turn()
        self.assertEqual([line for line in self.lines() if "moved" in line], [])


class EnvelopeTests(PumpedTestCase):
    """What WorldFormed carries."""

    def test_each_host_gets_its_own_envelope(self) -> None:
        door = ClockedController(window(target_ranks=3), token=TOKEN)
        dials = [door.dial(f"10.0.0.{number}", token=TOKEN) for number in (1, 2)]
        dials[0].join(host='ü "a"', local_devices=b"\5\2", gpus=())
        dials[1].join(host="b")
        door.turn()
        for dial, worker in zip(
            dials,
            (
                {"host": 'ü "a"', "ranks": [0, 1], "local_devices": [5, 2], "nccl_socket_ifname": "", "path": ""},
                {"host": "b", "ranks": [2], "local_devices": [0], "nccl_socket_ifname": "", "path": ""},
            ),
            strict=True,
        ):
            (formed,) = dial.messages()
            self.assertIsNone(formed.relay_spec_hex)
            self.assertEqual(formed.envelope_hex, formed.envelope_hex.lower())
            envelope = dial.talk.envelope
            salt = envelope.pop("salt")
            self.assertRegex(salt, r"\A[0-9a-f]{32}\Z")
            self.assertEqual(envelope.pop("flodl_tw")["group_rank"], dials.index(dial))
            self.assertEqual(
                envelope,
                {
                    "controller": {"host": "10.0.0.100", "port": 29500},
                    "world_size": 3,
                    "num_workers": 2,
                    "worker": worker,
                },
            )

    def test_the_worlds_salt_is_one_for_all_and_not_the_session_salt(self) -> None:
        door = ClockedController(window(target_ranks=2), token=TOKEN)
        dials = [door.dial(token=TOKEN) for _ in range(2)]
        for number, dial in enumerate(dials):
            dial.join(host=f"h{number}")
        door.turn()
        for dial in dials:
            dial.messages()
        salts = {dial.talk.envelope["salt"] for dial in dials}
        self.assertEqual(len(salts), 1)
        self.assertNotIn(TOKEN.hex(), salts)

    def run_ids(self, *stated: str | None) -> set[str]:
        """The run ids that the hosts of a world are told, each of which stated one or none."""
        door = ClockedController(window(target_ranks=len(stated)), token=TOKEN)
        dials = [door.dial(token=TOKEN) for _ in stated]
        for number, (dial, run_id) in enumerate(zip(dials, stated, strict=True)):
            dial.join(host=f"h{number}", run_id=run_id)
        door.turn()
        told = set()
        for number, dial in enumerate(dials):
            dial.messages()
            ours = dial.talk.envelope["flodl_tw"]
            self.assertEqual((ours["group_rank"], ours["group_world_size"]), (number, len(stated)))
            self.assertEqual(list(dial.talk.envelope)[-1], "flodl_tw")
            told.add(ours["run_id"])
        return told

    def test_the_run_id_is_the_members_own_where_one_states_it(self) -> None:
        for stated in (("publish-7",), (None, "publish-7", None), ("publish-7", "publish-7")):
            self.assertEqual(self.run_ids(*stated), {"publish-7"}, stated)

    def test_where_no_member_states_a_usable_one_each_world_gets_a_run_id_of_its_own(self) -> None:
        seen: set[str] = set()
        for stated in ((None, None), (None, None), ("", ""), ("a\0b", "a\0b")):
            (run_id,) = self.run_ids(*stated)
            self.assertRegex(run_id, r"\A[0-9a-f]{16}\Z")
            seen.add(run_id)
        self.assertEqual(len(seen), 4)


class LossTests(PumpedTestCase):
    """Lost hosts and failed ranks."""

    def world(self, hosts: int = 3, devices: int = 1, **fields: Any) -> tuple[ClockedController, list[FakeDial]]:
        door = ClockedController(window(target_ranks=hosts * devices, **fields))
        dials = fill(door, hosts, devices)
        door.turn()
        for dial in dials:
            self.assertEqual(types(dial), ["WorldFormed"])
        self.forget()
        return door, dials

    def test_a_lost_host_is_named_with_how_its_link_ended(self) -> None:
        table = (
            (FakeDial.hang_up, "host 'h1' is gone (link closed)"),
            (FakeDial.reset, "host 'h1' is gone (link reset)"),
            (FakeDial.vanish, "host 'h1' went silent"),
        )
        for end, reason in table:
            door, dials = self.world()
            end(dials[1])
            door.turn()
            for dial in (dials[0], dials[2]):
                (abort,) = dial.messages()
                self.assertIsInstance(abort, Abort)
                self.assertIn(reason, abort.reason)
                self.assertIn("rank 1", abort.reason)
                self.assertTrue(dial.closed)
            self.assertEqual(dials[1].messages(), [])
            self.line("lost", reason, level=LogLevel.warn)
            self.line("the run has failed", reason, level=LogLevel.error)
            self.assertEqual(door.state()["phase"], "failed")
            self.assertTrue(door.controller.run.over)

    def test_a_failed_rank_aborts_every_host_its_own_included(self) -> None:
        table = (
            (1, "code 1"),
            (-1, "code -1 (killed by a signal)"),
            (-9, "code -9 (killed by SIGKILL)"),
            (-11, "code -11 (killed by SIGSEGV)"),
            (-200, "code -200 (killed by signal 200)"),
            (139, "code 139"),
            (-(2**31), "code -2147483648"),
            (2**31 - 1, "code 2147483647"),
        )
        for code, text in table:
            door, dials = self.world(devices=2)
            dials[1].send(dials[1].talk.exited(3, code))
            self.line("'h1': rank 3 exited with " + text, level=LogLevel.warn)
            self.assertEqual(door.state()["phase"], "failed", code)
            door.turn()
            for dial in dials:
                (abort,) = dial.messages()
                self.assertIsInstance(abort, Abort, code)
                self.assertIn("rank 3 of host 'h1' exited with " + text, abort.reason)
                self.assertTrue(dial.closed)

    def test_the_log_line_of_an_exit_has_host_rank_and_code(self) -> None:
        _, dials = self.world(devices=2)
        dials[0].send(dials[0].talk.exited(1))
        self.line("'h0'", "rank 1", "code 0", level=LogLevel.info)
        dials[0].send(dials[0].talk.exited(0, 1))
        self.line("'h0': rank 0 exited with code 1", level=LogLevel.warn)

    def test_the_first_cause_is_the_one_that_is_named(self) -> None:
        door, dials = self.world()
        dials[2].send(dials[2].talk.exited(2, 7))
        dials[0].send(dials[0].talk.exited(0, 8))
        dials[1].reset()
        door.turn()
        for dial in (dials[0], dials[2]):
            (abort,) = dial.messages()
            self.assertIn("rank 2 of host 'h2' exited with code 7", abort.reason)
        self.assertEqual(len([line for line in self.lines() if "the run has failed" in line]), 1)

    def test_a_rank_that_had_left_early_is_named_with_the_one_that_failed(self) -> None:
        door, dials = self.world(devices=2)
        dials[0].send(dials[0].talk.exited(1))
        dials[2].send(dials[2].talk.exited(4))
        dials[1].send(dials[1].talk.exited(3, 7))
        door.turn()
        (abort,) = dials[0].messages()
        reason = "rank 3 of host 'h1' exited with code 7; before that ranks 1, 4 had exited with code 0"
        self.assertEqual(abort.reason, reason)
        told = door.controller.run.why()
        self.assertEqual((told["failure"], told["exited_ranks"]), (reason, 3))

    def test_a_link_that_ends_by_its_abort_is_no_reset(self) -> None:
        door, dials = self.world()
        dials[1].reset()
        door.turn()
        dials[0].reset()
        dials[2].hang_up()
        door.turn()
        ends = {member.host: end for member, end in door.controller.run.ends.items()}
        self.assertEqual(ends, {"h0": LinkEnd.ABORTED, "h1": LinkEnd.RESET, "h2": LinkEnd.ABORTED})

    def test_an_abort_is_the_last_frame_on_its_link_and_is_insisted_on(self) -> None:
        door = ClockedController(window(target_ranks=2))
        slow, other = door.dial(reads=False), door.dial("10.0.0.2")
        slow.join(host="slow")
        other.join(host="other")
        door.turn()
        slow.messages()
        other.reset()
        door.turn()
        self.assertEqual(types(slow), ["Abort"])
        self.assertTrue(slow.transport.disconnecting)
        slow.send(slow.talk.exited(0, 3))
        door.clock.advance(1.999)
        self.assertFalse(slow.transport.aborted)
        self.assertFalse(door.controller.run.over)
        self.assertEqual(door.state()["phase"], "failed")
        self.assertTrue(door.dial().join(host="new").reason.startswith("window-closed: "))
        door.clock.advance(0.001)
        door.turn()
        self.assertTrue(slow.closed)
        self.assertTrue(door.controller.run.over)
        self.assertEqual(slow.received(), b"")
        self.assertEqual([line for line in self.lines() if "code 3" in line], [])

    def test_a_link_may_close_once_all_its_ranks_have_reported(self) -> None:
        door, dials = self.world(hosts=2, devices=2)
        dials[0].send(dials[0].talk.exited(0) + dials[0].talk.exited(1))
        dials[0].hang_up()
        door.turn()
        self.assertEqual(door.state()["phase"], "training")
        self.assertEqual(dials[1].messages(), [])
        dials[1].send(dials[1].talk.exited(2))
        dials[1].send(dials[1].talk.exited(3))
        self.assertEqual(door.state()["phase"], "training")
        dials[1].hang_up()
        door.turn()
        self.assertEqual(door.state()["phase"], "done")
        self.line("the run is done", level=LogLevel.info)

    def test_a_link_that_closes_with_one_rank_unreported_is_lost(self) -> None:
        door, dials = self.world(hosts=2, devices=2)
        dials[0].send(dials[0].talk.exited(1))
        dials[0].hang_up()
        door.turn()
        (abort,) = dials[1].messages()
        self.assertIn("rank 0", abort.reason)
        self.assertNotIn("rank 0, 1", abort.reason)

    def test_continue_bears_losses_and_ends_as_failed(self) -> None:
        door, dials = self.world(on_loss=OnLoss.CONTINUE)
        dials[0].reset()
        dials[1].send(dials[1].talk.exited(1, 5))
        door.turn()
        self.assertEqual((dials[1].messages(), dials[2].messages()), ([], []))
        self.assertEqual(door.state()["phase"], "training")
        dials[2].send(dials[2].talk.exited(2))
        for dial in dials[1:]:
            dial.hang_up()
        door.turn()
        self.assertEqual(door.state()["phase"], "failed")
        self.assertTrue(door.controller.run.over)

    def test_a_world_of_zero_exits_is_done_under_continue_too(self) -> None:
        door, dials = self.world(on_loss=OnLoss.CONTINUE)
        for rank, dial in enumerate(dials):
            dial.send(dial.talk.exited(rank))
            dial.hang_up()
        door.turn()
        self.assertEqual(door.state()["phase"], "done")

    def test_a_run_is_not_over_while_a_link_is_open(self) -> None:
        door, dials = self.world(hosts=1)
        dials[0].send(dials[0].talk.exited(0))
        door.clock.advance(59)
        self.assertEqual(door.state()["phase"], "training")
        self.assertFalse(door.controller.run.over)


class LargeWorldTests(PumpedTestCase):
    """A large world is shipped in parts."""

    HOSTS = 600

    def shipped(self, dials: list[FakeDial]) -> int:
        return sum(bool(dial.transport.value()) for dial in dials)

    def joined(self) -> tuple[ClockedController, list[FakeDial]]:
        door = ClockedController(window(target_ranks=self.HOSTS))
        return door, fill(door, self.HOSTS)

    def test_it_takes_several_turns_with_the_phase_forming(self) -> None:
        door, dials = self.joined()
        seen: list[tuple[str, int]] = []
        turns(door, lambda turn: seen.append((door.state()["phase"], self.shipped(dials))), 3)
        self.assertEqual(seen, [("forming", 256), ("forming", 512), ("training", 600)])
        for number in (0, 255, 256, 599):
            self.assertEqual(types(dials[number]), ["WorldFormed"])
            self.assertEqual(dials[number].talk.envelope["worker"]["ranks"], [number])
            self.assertEqual(dials[number].talk.envelope["world_size"], self.HOSTS)

    def test_a_host_that_is_lost_in_between_ends_the_run(self) -> None:
        for lost in (0, 599):
            door, dials = self.joined()

            def look(turn: int, door: ClockedController = door, gone: FakeDial = dials[lost]) -> None:
                if turn == 1:
                    gone.reset()
                self.assertEqual(door.state()["phase"], "forming" if turn < 1 else "failed")

            turns(door, look, 3)
            self.assertEqual(door.state()["joined_ranks"], self.HOSTS)
            kinds = {number: types(dial) for number, dial in enumerate(dials) if number != lost}
            self.assertEqual(kinds[1], ["WorldFormed", "Abort"])
            self.assertEqual(kinds[598], ["Abort"])
            self.assertEqual(sum(kind[-1] == "Abort" for kind in kinds.values()), self.HOSTS - 1)
            self.assertTrue(door.controller.run.over)

    def test_under_continue_the_rest_is_shipped(self) -> None:
        door = ClockedController(window(target_ranks=self.HOSTS, on_loss=OnLoss.CONTINUE))
        dials = fill(door, self.HOSTS)
        turns(door, lambda turn: dials[599].reset() if turn == 1 else None, 4)
        self.assertEqual(door.state()["phase"], "training")
        self.assertEqual(self.shipped(dials), self.HOSTS - 1)

    def test_a_host_that_reports_an_exit_before_its_world_came_breaks_the_rule(self) -> None:
        door, dials = self.joined()
        turns(door, lambda turn: dials[599].send(dials[599].talk.exited(599)) if turn == 1 else None, 2)
        self.line("'h599'", "before its world was formed", "its link is closed")
        self.assertEqual(door.state()["phase"], "failed")

    def test_one_that_has_its_world_may_report_while_others_wait(self) -> None:
        door, dials = self.joined()
        turns(door, lambda turn: dials[0].send(dials[0].talk.exited(0)) if turn == 1 else None, 4)
        self.assertEqual(door.state()["phase"], "training")
        self.line("'h0': rank 0 exited with code 0")

    def test_a_fleet_that_leaves_a_large_window_costs_little(self) -> None:
        door = ClockedController(window(min_rank_start=5000, max_rejects=0))
        dials = fill(door, 1000)
        for dial in dials:
            dial.reset()
        door.turn()
        self.assertEqual((door.state()["joined_ranks"], door.state()["members"]), (0, []))


class WhyTests(PumpedTestCase):
    """What ``run.json`` says of a run that has failed, and the store of its world."""

    def test_what_ranks_died_of_is_told_by_their_rank_and_only_the_first(self) -> None:
        door = ClockedController(window(target_ranks=100, on_loss=OnLoss.CONTINUE))
        dial = door.dial()
        dial.join(devices=100)
        door.turn()
        dial.messages()
        for rank in reversed(range(100)):
            dial.send(dial.talk.reported(rank, RankError("E", str(rank), "")) + dial.talk.exited(rank, 1))
        told = door.controller.run.why()
        self.assertEqual((told["phase"], told["failure"]), ("training", None))
        self.assertEqual([each["rank"] for each in told["rank_errors"]], list(range(SHOWN_ERRORS)))
        self.assertEqual(told["rank_errors"][7], {"rank": 7, "type": "E", "message": "7", "line": ""})
        dial.hang_up()
        door.turn()
        failure = "rank 99 of host 'gpu-a' exited with code 1 (E: 99)"
        told = door.controller.run.why()
        self.assertEqual((told["phase"], told["failure"]), ("failed", failure))

    def test_a_host_that_was_told_to_end_and_did_so_politely_is_lost_by_the_signal_s_name(self) -> None:
        door = ClockedController(window(target_ranks=2))
        dial = door.dial()
        dial.join(devices=2)
        door.turn()
        dial.messages()
        stopped = RankError("stopped", "flodl-tw on its host got SIGTERM", "")
        dial.send(dial.talk.reported(0, stopped) + dial.talk.reported(1, stopped))
        dial.hang_up()
        door.turn()
        failure = (
            "host 'gpu-a' is gone (link closed) before ranks 0-1 had reported an exit "
            "(stopped: flodl-tw on its host got SIGTERM)"
        )
        self.assertEqual(door.controller.run.why()["failure"], failure)

    def test_a_run_that_rearms_forgets_what_ranks_died_of(self) -> None:
        door = ClockedController(window(target_ranks=1), after_run=AfterRun.REARM)
        dial = door.dial()
        dial.join()
        door.turn()
        dial.messages()
        dial.send(dial.talk.reported(0, RankError("E", "boom", "")) + dial.talk.exited(0, 1))
        door.turn()
        run_id = door.controller.run.run_id
        why = {"run_id": run_id, "phase": "waiting", "failure": None, "exited_ranks": 0, "rank_errors": []}
        self.assertEqual(door.controller.run.why(), why)
        self.assertEqual(door.controller.last_outcome, "failed: rank 0 of host 'gpu-a' exited with code 1 (E: boom)")

    def test_a_world_has_a_store_from_its_formation_on_where_there_is_one(self) -> None:
        for limits in (None, StoreLimits()):
            door = ClockedController(replace(window(target_ranks=1), store=limits))
            dial = door.dial()
            dial.join()
            self.assertIsNone(door.controller.run.store)
            door.turn()
            self.assertEqual(door.controller.run.store is not None, limits is not None)
            dial.messages()
            self.assertIs(dial.talk.envelope["flodl_tw"]["store"], limits is not None)
            self.assertIs(dial.talk.envelope["flodl_tw"]["reports"], True)


class LingerTests(PumpedTestCase):
    """A link that stays open after all ranks have reported keeps no run for ever."""

    def reported(self, code: int = 0, on_loss: OnLoss = OnLoss.ABORT) -> tuple[ClockedController, list[FakeDial]]:
        door = ClockedController(window(target_ranks=2, on_loss=on_loss))
        dials = fill(door, 2)
        door.turn()
        door.clock.advance(1000)
        for rank, dial in enumerate(dials):
            dial.send(dial.talk.exited(rank, code))
        door.turn()
        self.forget()
        return door, dials

    def test_a_run_ends_by_its_reports_60_s_after_the_last_and_names_who_stays(self) -> None:
        door, (first, second) = self.reported()
        first.hang_up()
        door.clock.advance(59)
        self.assertEqual(door.state()["phase"], "training")
        door.clock.advance(1)
        door.turn()
        self.assertEqual(door.state()["phase"], "done")
        self.line("'h1' at 10.0.0.2 keeps its link open 60 s", level=LogLevel.warn)
        self.assertNotIn(b"Abort", second.received())
        self.assertTrue(second.closed)
        door.clock.advance(2)
        self.assert_idle(door)

    def test_it_has_failed_where_a_rank_has(self) -> None:
        door, _ = self.reported(code=3, on_loss=OnLoss.CONTINUE)
        door.clock.advance(60)
        door.turn()
        self.assertEqual(door.state()["phase"], "failed")

    def test_while_a_rank_runs_nothing_is_cut(self) -> None:
        door = ClockedController(window(target_ranks=2))
        dials = fill(door, 2)
        door.turn()
        dials[0].send(dials[0].talk.exited(0, 0))
        door.clock.advance(3600)
        door.turn()
        self.assertEqual((door.state()["phase"], dials[0].closed), ("training", False))
