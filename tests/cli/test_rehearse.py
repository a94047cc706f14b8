"""A rehearsal against a controller on a clock: who is let in, who is refused, and what is told of it."""

from __future__ import annotations

import unittest
from collections.abc import Awaitable, Callable
from typing import Any

from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionLost
from twisted.internet.protocol import Factory

from flodl_tw.agent.dial import DialError
from flodl_tw.cli.rehearse import AT_ONCE, BAD, Plan, Rehearsal, read_plan
from flodl_tw.core.errors import SettingError
from flodl_tw.core.messages import Abort, Accept, JoinMessage, WorldFormed, encode_join
from flodl_tw.core.run_settings import RunSettings
from flodl_tw.limits import CLOSE_GRACE
from flodl_tw.testing import ClockedController, SimulatedHost, make_hello
from tests.pumped import TOKEN, PumpedTestCase, window
from tests.wires import Wire, pump

AT = ("gpu-head", 29500)
HERE = IPv4Address("TCP", "10.0.0.100", 29500)
DIALING = "2 hosts with 2 GPUs each: dialing gpu-head:29500"
JOINED = "all joined: 2 hosts with 4 ranks"
WAITING = "waiting for the world, 600 s at most"
FORMED = "the world has formed: 4 ranks on 2 hosts; training for 60 s"
OVER = "the training has ended: every rank has exited with 0"
WELL = "all went as it should"
WRONG = "not as it should be: "


class RehearsalTestCase(PumpedTestCase):
    """A rehearsal of two hosts with two GPUs each, unless a test says otherwise."""

    def begin(
        self,
        door: ClockedController,
        *,
        dial: Callable[[Factory], Awaitable[SimulatedHost]] | None = None,
        hosts: int = 2,
        **fields: Any,
    ) -> None:
        """The rehearsal begins; nothing has arrived anywhere."""
        self.door = door
        self.wires: list[Wire] = []
        self.addCleanup(lambda: [wire.near.handle.close() for wire in self.wires])
        self.said: list[str] = []
        self.rehearsal = Rehearsal(
            door.clock,
            Plan(AT, hosts=hosts, gpus=2, **fields),
            dial or self.connect,
            self.said.append,
            self.said.append,
        )
        self.ran: Deferred[int] = Deferred.fromCoroutine(self.rehearsal.run())

    async def connect(self, factory: Factory) -> SimulatedHost:
        """A dial that the controller's door takes."""
        return self.connected(factory)

    def connected(self, factory: Factory) -> SimulatedHost:
        """A host with a connection to the controller's door."""
        link = factory.buildProtocol(HERE)
        assert isinstance(link, SimulatedHost)
        self.wires.append(Wire(self.door, link))
        return link

    def pump(self) -> None:
        """Let everything arrive that is under way, with no time passing."""
        pump(self.door, self.wires)

    def wait(self, secs: float) -> None:
        """Time passes."""
        self.door.clock.advance(secs)
        self.pump()

    def play(self, door: ClockedController, **fields: Any) -> None:
        """Begin, up to where only time goes on."""
        self.begin(door, **fields)
        self.pump()

    def ended(self) -> int:
        """Its exit status; nothing of it is left open, or waits for its time."""
        status = self.successResultOf(self.ran)
        self.assertEqual([wire for wire in self.wires if not wire.near.lost], [])
        self.assertEqual([str(call) for call in self.door.clock.getDelayedCalls() if "Rehearsal" in str(call)], [])
        return status

    def receive(self, *messages: JoinMessage, key: bytes = TOKEN, wire: int = 0) -> None:
        """A controller that is not ours sends these to a host."""
        self.wires[wire].link.dataReceived(b"".join(encode_join(key, 4, message) for message in messages))
        self.door.turn()


def small(**fields: Any) -> ClockedController:
    """A controller whose window closes with the last of the hosts."""
    return ClockedController(window(min_rank_start=4, target_ranks=4), **fields)


class TestItGoesWell(RehearsalTestCase):
    """What a controller that does its duty is seen to do."""

    def test_the_hosts_join_train_and_exit_clean(self) -> None:
        self.play(small())
        self.assertEqual(self.said, [DIALING, JOINED, WAITING, FORMED])
        self.wait(59.9)
        self.assertEqual(self.door.state()["phase"], "training")
        self.wait(0.1)
        self.assertEqual(self.said, [DIALING, JOINED, WAITING, FORMED, OVER, WELL])
        self.assertEqual(self.ended(), 0)
        self.assertEqual(self.door.state()["phase"], "done")

    def test_nobody_takes_them_for_machines(self) -> None:
        self.play(small())
        told = [(member["host"], member["ranks"], member["gpus"]) for member in self.door.state()["members"]]
        gpus = ["NVIDIA H100 (80GB, sm_90)"] * 2
        self.assertEqual(told, [("rehearsal-01", [0, 1], gpus), ("rehearsal-02", [2, 3], gpus)])

    def test_each_kind_of_bad_host_is_refused_with_its_word(self) -> None:
        table = (
            ("nccl", "rehearsal-bad-nccl", "nccl-mismatch", "has NCCL version 2.26, this run has 2.27"),
            ("vendor", "rehearsal-bad-vendor", "vendor-mismatch", "has GPU vendor 'AMD', this run has 'NVIDIA'"),
            ("dataset", "rehearsal-bad-dataset", "dataset-mismatch", "baddbadd…, this run has 00000000…"),
            ("duplicate", "a second rehearsal-01", "duplicate-host", "'rehearsal-01' is in already"),
        )
        for bad, name, word, why in table:
            # With one host alone, and so that the last one completes the world.
            for hosts, settings in ((1, window()), (2, window(target_ranks=4)), (5, window(target_ranks=10))):
                with self.subTest(word, hosts=hosts):
                    self.play(ClockedController(settings), hosts=hosts, bad=(bad,))
                    line = self.said[1]
                    self.assertTrue(line.startswith(f"{name} is refused, as it should be: {word}: "), line)
                    self.assertIn(why, line)
                    self.wait(300)
                    self.wait(60)
                    self.assertEqual((self.said[-1], self.ended()), (WELL, 0))
                    refused = [each.refusal.code.value for each in self.door.controller.run.window.refused_hosts]
                    self.assertEqual(refused, [word])

    def test_all_kinds_in_one_rehearsal_are_told_in_the_order_asked_for(self) -> None:
        self.play(small(), bad=tuple(BAD))
        words = [line.split(": ")[1] for line in self.said[1:5]]
        self.assertEqual(words, ["nccl-mismatch", "vendor-mismatch", "dataset-mismatch", "duplicate-host"])
        self.wait(60)
        self.assertEqual((self.said[5:], self.ended()), ([JOINED, WAITING, FORMED, OVER, WELL], 0))

    def test_with_a_token_it_is_the_same(self) -> None:
        self.play(small(token=TOKEN), token=TOKEN, bad=("duplicate",))
        self.wait(60)
        self.assertEqual((self.said[-1], self.ended()), (WELL, 0))

    def test_ranks_of_others_are_told_apart(self) -> None:
        door = ClockedController(window(target_ranks=6))
        door.dial().join(make_hello("gpu-a", 2))
        self.play(door)
        self.assertEqual(
            self.said[-1],
            "the world has formed: 6 ranks on 3 hosts, 2 of the ranks not from here; training for 60 s",
        )

    def test_a_window_that_does_not_close_is_waited_for(self) -> None:
        self.play(ClockedController(window(min_rank_start=4)))
        self.wait(299)
        self.assertEqual(self.said, [DIALING, JOINED, WAITING])
        self.wait(1)
        self.assertEqual(self.said[-1], FORMED)

    def test_what_dials_at_once_is_bounded(self) -> None:
        dials: list[Deferred[SimulatedHost]] = []

        def dial(factory: Factory) -> Deferred[SimulatedHost]:
            dials.append(Deferred())
            if len(dials) == 1:
                dials[0].callback(self.connected(factory))
            return dials[-1]

        self.play(ClockedController(), dial=dial, hosts=3 * AT_ONCE)
        self.assertEqual(len(dials), 1 + AT_ONCE)
        dials[9].errback(DialError("gpu-head:29500 did not answer in 60 attempts (refused)"))
        self.pump()
        self.assertEqual((len(dials), self.ended()), (1 + AT_ONCE, 1))


class TestItGoesWrong(RehearsalTestCase):
    """What keeps it from its end, or is not as it should be, is told, and the status is 1."""

    def wrong(self, *lines: str) -> None:
        """It has ended with these faults."""
        self.assertEqual(self.ended(), 1)
        self.assertEqual(self.said[-len(lines) :], [WRONG + line for line in lines])

    def test_a_pinned_dataset_refuses_all_and_says_so_once(self) -> None:
        self.play(ClockedController(RunSettings(dataset_sig=b"\xab" * 32)), bad=("nccl",))
        self.assertEqual(
            self.said[1:3],
            [
                "2 hosts refused, rehearsal-01 first: dataset-mismatch: 'rehearsal-01' has dataset "
                "signature 00000000…, this run has abababab…, set by the operator: the data must be sharded the same "
                "everywhere: rebuild or fetch it again on the host that differs",
                "0 of 2 hosts joined, with 0 ranks",
            ],
        )
        self.wrong(self.said[1])
        self.assertEqual(len(self.wires), 2)

    def test_a_world_that_forms_too_early_leaves_hosts_out(self) -> None:
        self.play(ClockedController(window(target_ranks=2)), bad=("dataset",))
        verdict = "rehearsal-bad-dataset is refused, and not with dataset-mismatch: window-closed: "
        self.assertTrue(self.said[1].startswith(verdict), self.said)
        self.assertTrue(self.said[2].startswith("1 host refused, rehearsal-02 first: window-closed: "), self.said)
        self.assertEqual(self.said[3], "1 of 2 hosts joined, with 2 ranks")
        self.wait(60)
        self.wrong(self.said[1], self.said[2])
        self.assertEqual(self.door.state()["phase"], "done")

    def test_a_bad_host_that_is_let_in_goes_along(self) -> None:
        self.play(ClockedController(RunSettings(nccl=False)), bad=("vendor", "dataset"))
        fault = "rehearsal-bad-vendor is in, and was to be refused with vendor-mismatch"
        self.assertEqual(self.said[1], fault)
        self.wait(300)
        self.assertTrue(self.said[-1].startswith("the world has formed: 5 ranks on 3 hosts; "), self.said)
        self.wait(60)
        self.wrong(fault)
        self.assertEqual(self.door.state()["phase"], "done")

    def test_an_abort_before_the_world_gives_its_reason(self) -> None:
        self.play(ClockedController(window(min_rank_start=9)))
        self.wait(600)
        self.wrong("the run was aborted: quorum not met: 4 of 9 ranks joined within the hard cap (600 s)")

    def test_an_abort_in_training_gives_its_reason(self) -> None:
        self.play(small())
        self.door.controller.run.abort("fire\ndrill", "10.0.0.9")
        self.pump()
        self.wrong("the run was aborted: aborted by the operator: fire\\ndrill")

    def test_a_controller_that_goes_is_told_with_the_first_link(self) -> None:
        for settings, when in ((window(min_rank_start=9), "the world had formed"), (window(), "its ranks had ended")):
            with self.subTest(when):
                self.play(ClockedController(settings))
                self.wait(300)
                for wire in self.wires:
                    wire.near.lose(ConnectionLost())
                self.pump()
                self.wrong(f"the controller ended the link of rehearsal-01 before {when} (lost)")

    def test_a_hello_that_is_closed_without_a_word_blames_the_token(self) -> None:
        for token in (None, bytes(16)):
            with self.subTest(token):
                self.play(small(token=TOKEN), token=token)
                self.wrong(
                    "the controller ended the link of rehearsal-01 before it was accepted (closed); most likely its "
                    "token is not the run's"
                )

    def test_a_controller_that_says_nothing_is_given_up(self) -> None:
        self.begin(small())
        self.door.clock.advance(30)
        self.pump()
        self.wrong("gpu-head:29500 said nothing in time, though it holds the connection")

    def test_a_world_that_never_comes_is_waited_for_as_real_hosts_would(self) -> None:
        self.play(small(token=TOKEN), dial=self.unanswered, hosts=1, token=TOKEN)
        self.receive(Accept((0, 1), None, 100))
        self.door.clock.advance(129.9)
        self.assertEqual(self.said[-1], "waiting for the world, 100 s at most")
        self.door.clock.advance(0.1)
        self.door.turn()
        self.wrong("the controller has neither formed the world nor aborted it in time")

    async def unanswered(self, factory: Factory) -> SimulatedHost:
        """A dial that nobody answers but the test."""
        link = await self.connect(factory)
        self.wires[-1].far.transport.aborted = True
        return link

    def test_what_no_controller_of_ours_says_ends_it(self) -> None:
        accept = Accept((0, 1), None, 600)
        no_world = WorldFormed("7b7d", None)
        table: tuple[tuple[tuple[JoinMessage, ...], str], ...] = (
            ((Abort("no"),), "the run was aborted: no"),
            ((accept, no_world), "the controller's world cannot be used: "),
            ((accept, accept), "what rehearsal-01 dialed does not answer as a controller does: closed by us, for "),
            (
                (accept, make_hello()),
                "the controller sent rehearsal-01 Hello before the world had formed, which is out of its turn",
            ),
        )
        for messages, text in table:
            with self.subTest(text):
                self.play(small(token=TOKEN), dial=self.unanswered, hosts=1, token=TOKEN)
                self.receive(*messages)
                self.assertEqual(self.ended(), 1)
                self.assertTrue(self.said[-1].startswith(WRONG + text), self.said)

    def test_a_world_that_forms_twice_ends_it(self) -> None:
        self.play(small())
        self.assertEqual(self.said[-1], FORMED)
        salt = self.wires[0].link.talk.salt
        assert salt is not None
        self.receive(WorldFormed("7b7d", None), key=salt)
        self.pump()
        self.wrong("the controller sent rehearsal-01 WorldFormed before its ranks had ended, which is out of its turn")

    def test_a_dial_that_fails_is_told_once(self) -> None:
        dials = []

        async def dial(factory: Factory) -> SimulatedHost:
            dials.append(factory)
            raise DialError("gpu-head:29500 did not answer in 60 attempts (10.0.0.1: connection refused)")

        self.play(small(), dial=dial, hosts=32)
        self.assertEqual(len(dials), 1)
        self.wrong(
            "gpu-head:29500 did not answer in 60 attempts (10.0.0.1: connection refused): check that the controller "
            "runs, and its port (29500 unless it was told otherwise; flodl's own launcher has 1337)"
        )


class TestItIsStopped(RehearsalTestCase):
    """Signals, by name."""

    def test_the_first_ends_the_training_with_clean_exits(self) -> None:
        self.play(small())
        self.wait(10)
        self.rehearsal.stop("SIGINT")
        self.pump()
        self.assertEqual(
            self.said[-3:], ["SIGINT: the training ends now; a second one leaves without a word", OVER, WELL]
        )
        self.assertEqual((self.ended(), self.door.state()["phase"]), (0, "done"))

    def test_the_second_leaves_and_the_controller_sees_a_lost_host(self) -> None:
        self.play(small())
        for _ in range(2):
            self.rehearsal.stop("SIGINT")
        # Both come before the turn's end, so no rank has exited.
        self.door.clock.advance(0)
        self.assertEqual(self.successResultOf(self.ran), 1)
        self.assertEqual(self.said[-1], WRONG + "ended at once by SIGINT")
        self.pump()
        self.assertEqual(self.door.state()["phase"], "failed")
        self.assertIn("is gone (link closed)", self.door.controller.run.failure or "")

    def test_before_the_world_it_leaves_the_window(self) -> None:
        self.play(ClockedController(window(min_rank_start=9)))
        self.rehearsal.stop("SIGTERM")
        self.pump()
        self.assertEqual(self.ended(), 1)
        self.assertEqual(self.said[-1], WRONG + "stopped by SIGTERM before the world had formed")
        self.assertEqual((self.door.state()["phase"], self.door.state()["joined_hosts"]), ("waiting", 0))

    def test_while_it_dials_it_ends(self) -> None:
        waiting: list[Deferred[SimulatedHost]] = []

        def dial(factory: Factory) -> Deferred[SimulatedHost]:
            waiting.append(Deferred())
            return waiting[-1]

        self.play(small(), dial=dial)
        self.rehearsal.stop("SIGTERM")
        self.pump()
        self.assertEqual((self.ended(), len(waiting)), (1, 1))

    def test_a_link_that_does_not_close_is_closed_by_force_in_the_end(self) -> None:
        self.play(ClockedController(window(min_rank_start=9)))
        self.wires[0].near.reads = False
        self.rehearsal.stop("SIGTERM")
        self.pump()
        self.assertNoResult(self.ran)
        self.wait(CLOSE_GRACE - 0.1)
        self.assertNoResult(self.ran)
        self.wait(0.1)
        self.assertEqual(self.ended(), 1)
        self.assertTrue(self.wires[0].near.aborted)

    def test_a_second_signal_waits_for_no_link(self) -> None:
        self.play(ClockedController(window(min_rank_start=9)))
        self.wires[0].near.reads = False
        self.rehearsal.stop("SIGTERM")
        self.pump()
        self.rehearsal.stop("SIGTERM")
        self.assertEqual(self.successResultOf(self.ran), 1)
        self.wait(CLOSE_GRACE)


class TestPlans(unittest.TestCase):
    """Who takes part."""

    def test_names_sort_as_they_count(self) -> None:
        for hosts, first, last in ((1, "01", "01"), (99, "01", "99"), (100, "001", "100"), (4096, "0001", "4096")):
            with self.subTest(hosts):
                names = [host.name for host in Plan(AT, hosts=hosts).good_hosts()]
                self.assertEqual((names[0], names[-1]), (f"rehearsal-{first}", f"rehearsal-{last}"))
                self.assertEqual((sorted(names), len(set(names))), (names, hosts))

    def test_each_bad_host_differs_in_its_fact_alone(self) -> None:
        plan = Plan(AT, gpus=1, bad=tuple(BAD))
        good = plan.good_hosts()[0].hello
        differs = [
            {name for name in good.__slots__ if getattr(host.hello, name) != getattr(good, name)}
            for host in plan.bad_hosts()
        ]
        self.assertEqual(
            differs, [{"host", "nccl_version"}, {"host", "gpus", "libtorch"}, {"host", "dataset_sig"}, set()]
        )

    def test_the_token_is_in_no_text(self) -> None:
        self.assertNotIn("token", repr(Plan(AT, token=TOKEN)))


class TestOptions(unittest.TestCase):
    """From texts to a plan; the command line wins over the environment."""

    def test_what_is_not_given_has_its_default(self) -> None:
        self.assertEqual(read_plan({}, {}), Plan(("127.0.0.1", 29500), hosts=4, gpus=8, bad=(), secs=60.0))

    def test_options_and_variables(self) -> None:
        options = {"address": "[::1]:7", "hosts": "4096", "secs": "0", "bad": "duplicate, nccl,duplicate"}
        environ = {
            "FLODL_TW_HOSTS": "2",
            "FLODL_TW_GPUS": "256",
            "FLODL_TW_BAD": "vendor",
            "FLODL_JOIN_TOKEN": TOKEN.hex(),
            "FLODL_NET_TIMEOUT_SCALE": "2",
        }
        wanted = Plan(("::1", 7), 4096, 256, ("duplicate", "nccl"), 0.0, TOKEN, 2.0)
        self.assertEqual(read_plan(options, environ), wanted)
        self.assertEqual(read_plan({}, environ).bad, ("vendor",))

    def test_what_cannot_be_used_names_the_limit_and_the_way_out(self) -> None:
        number = "give a whole number between them"
        kinds = "the kinds are nccl, vendor, dataset, duplicate; give some of them, with commas between"
        for options, environ, text in (
            ({"hosts": "0"}, {}, f"--hosts '0': the limits are 1 and 4096; {number}"),
            ({"hosts": "4097"}, {}, f"--hosts '4097': the limits are 1 and 4096; {number}"),
            ({}, {"FLODL_TW_GPUS": "257"}, f"FLODL_TW_GPUS '257': the limits are 1 and 256; {number}"),
            ({"gpus": "0"}, {}, f"--gpus '0': the limits are 1 and 256; {number}"),
            ({"secs": "-1"}, {}, "--secs '-1': the limits are 0 and 604800; give a number between them"),
            ({"bad": "nccl,mode"}, {}, f"--bad 'nccl,mode': {kinds}"),
            ({"bad": "nccl,"}, {}, f"--bad 'nccl,': {kinds}"),
            ({}, {"FLODL_TW_BAD": "NCCL"}, f"FLODL_TW_BAD 'NCCL': {kinds}"),
        ):
            with self.subTest(text), self.assertRaises(SettingError) as caught:
                read_plan(options, environ)
            self.assertEqual(str(caught.exception), text)
