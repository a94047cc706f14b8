"""A simulated host against a controller on a clock: each step has a Deferred, and nothing is left behind."""

from __future__ import annotations

from functools import partial
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.error import ConnectionLost, ConnectionRefusedError  # noqa: A004  Twisted's own
from twisted.internet.protocol import Factory
from twisted.internet.task import Clock

from flodl_tw.core.messages import Abort, Accept, JoinMessage, Reject, WorldFormed, encode_join
from flodl_tw.core.run_settings import RunSettings
from flodl_tw.testing import ClockedController, HostEndedError, SimulatedHost, make_hello
from tests.agent.links import HandReactor
from tests.pumped import TOKEN, PumpedTestCase, window
from tests.wires import Wire, pump

HELLO = make_hello("gpu-a", devices=2)


class HostTestCase(PumpedTestCase):
    """Simulated hosts, each with a connection to one controller."""

    def connect(self, door: ClockedController, hello: Any = HELLO, **options: Any) -> SimulatedHost:
        """A host whose hello is under way."""
        self.door = door
        self.clock = Clock()
        host = SimulatedHost(self.clock, hello, **options)
        self.wire = Wire(door, host)
        self.addCleanup(self.wire.near.handle.close)
        return host

    def pump(self, secs: float = 0) -> None:
        """Time passes, and everything arrives that is under way."""
        self.clock.advance(secs)
        self.door.clock.advance(secs)
        pump(self.door, [self.wire])

    def ended(self, host: SimulatedHost) -> HostEndedError:
        """Why it ended without a finish; its connection is gone, and nothing of it waits."""
        self.successResultOf(host.gone)
        self.assertEqual(self.clock.getDelayedCalls(), [])
        assert host.failure is not None
        self.assertIs(self.successResultOf(host.when_ended()), host.failure)
        return host.failure


class TestSteps(HostTestCase):
    """What happens to a host, in order."""

    def test_it_joins_trains_and_leaves_with_its_exits(self) -> None:
        for token in (None, TOKEN):
            with self.subTest(token):
                host = self.connect(ClockedController(window(target_ranks=2), token=token), token=token, train_secs=5)
                accepted, formed, ended = host.when_accepted(), host.when_formed(), host.when_ended()
                self.assertNoResult(accepted)
                self.pump()
                self.assertEqual((self.successResultOf(accepted).ranks, host.ranks), ((0, 1), (0, 1)))
                world = self.successResultOf(formed)
                self.assertEqual((world.world_size, world.num_workers, world.ranks), (2, 1, (0, 1)))
                self.pump(4.9)
                self.assertNoResult(ended)
                self.pump(0.1)
                self.assertIsNone(self.successResultOf(ended))
                self.assertEqual((host.finished, host.failure, self.clock.getDelayedCalls()), (True, None, []))
                self.assertEqual(self.door.state()["phase"], "done")
                # Who asks late is told all the same.
                self.assertEqual(self.successResultOf(host.when_accepted()).ranks, (0, 1))
                self.successResultOf(host.when_formed())

    def test_its_ranks_exit_with_the_code(self) -> None:
        self.connect(ClockedController(window(target_ranks=2)), code=-9)
        self.pump()
        self.pump(1)
        self.assertIn("exited with code -9 (killed by SIGKILL)", str(self.door.controller.run.failure))

    def test_without_a_time_it_trains_until_it_is_told_to_finish(self) -> None:
        host = self.connect(ClockedController(window(target_ranks=2)), train_secs=None)
        self.pump()
        self.pump(9999)
        self.assertNoResult(host.when_ended())
        host.finish()
        host.finish()
        self.pump()
        self.successResultOf(host.when_ended())
        self.assertEqual(self.door.state()["phase"], "done")

    def test_who_gives_up_waiting_takes_nothing_from_the_others(self) -> None:
        host = self.connect(ClockedController(window(target_ranks=2)))
        first, second, third = (host.when_formed() for _ in range(3))
        self.assertIsNot(first, second)
        first.cancel()
        self.failureResultOf(first, CancelledError)
        second.addCallback(lambda formed: third.cancel())
        self.pump()
        self.successResultOf(second)
        self.failureResultOf(third, CancelledError)


class TestEnds(HostTestCase):
    """Whoever waits hears of an end that comes before."""

    def test_a_refusal(self) -> None:
        host = self.connect(ClockedController(RunSettings(dataset_sig=b"\xab" * 32)))
        accepted, formed = host.when_accepted(), host.when_formed()
        self.pump()
        error = self.ended(host)
        self.assertRegex(str(error), "^gpu-a was refused: dataset-mismatch: ")
        self.assertIsInstance(error.event, Reject)
        for waiting in (accepted, formed, host.when_formed()):
            self.assertIs(self.failureResultOf(waiting, HostEndedError).value, error)

    def test_an_abort_while_it_trains(self) -> None:
        host = self.connect(ClockedController(window(target_ranks=2)))
        self.pump()
        self.door.controller.run.abort("fire drill", "10.0.0.9")
        self.pump()
        error = self.ended(host)
        self.assertEqual(str(error), "the run was aborted: aborted by the operator: fire drill")
        self.assertEqual(error.event, Abort("aborted by the operator: fire drill"))
        self.assertFalse(host.finished)

    def test_an_abort_before_the_world(self) -> None:
        host = self.connect(ClockedController(window(min_rank_start=9)))
        self.pump()
        self.pump(600)
        self.assertRegex(str(self.ended(host)), "^the run was aborted: quorum not met: ")
        self.failureResultOf(host.when_formed(), HostEndedError)
        self.successResultOf(host.when_accepted())

    def test_a_connection_that_is_lost(self) -> None:
        for settings, step in ((window(min_rank_start=9), "the world had formed"), (window(), "its ranks had ended")):
            with self.subTest(step):
                host = self.connect(ClockedController(settings), train_secs=None)
                self.pump()
                self.pump(300)
                self.wire.near.lose(ConnectionLost())
                self.assertEqual(str(self.ended(host)), f"the controller ended the link of gpu-a before {step} (lost)")

    def test_a_wrong_token(self) -> None:
        host = self.connect(ClockedController(token=TOKEN))
        self.pump()
        self.assertEqual(
            str(self.ended(host)),
            "the controller ended the link of gpu-a before it was accepted (closed); "
            "most likely its token is not the run's",
        )

    def test_what_no_controller_of_ours_says(self) -> None:
        accept, world, abort = Accept((0, 1), None, 600), WorldFormed("7b7d", None), Abort("over")
        table: tuple[tuple[tuple[JoinMessage, ...], str], ...] = (
            ((world, accept), "the controller sent gpu-a WorldFormed before it was accepted, which is out of its turn"),
            ((accept, HELLO), "the controller sent gpu-a Hello before the world had formed, which is out of its turn"),
            (
                (accept, world),
                "the controller's world cannot be used: the envelope's world_size is missing: "
                "it must be a whole number from 1 to 2147483648",
            ),
            ((accept, abort, world), "the run was aborted: over"),
            (
                (accept, accept),
                "what gpu-a dialed does not answer as a controller does: "
                "closed by us, for the Accept came after an Accept",
            ),
        )
        for messages, text in table:
            with self.subTest(text):
                host = self.connect(ClockedController(token=TOKEN), token=TOKEN)
                for message in messages:
                    host.dataReceived(encode_join(TOKEN, 4, message))
                self.door.clock.advance(0)
                self.assertEqual(str(self.ended(host)), text)
                self.assertIsNone(host.world)


class TestEndpoints(PumpedTestCase):
    """One is dialed as any protocol is."""

    def setUp(self) -> None:
        super().setUp()
        self.reactor = HandReactor()
        self.endpoint = TCP4ClientEndpoint(self.reactor, "10.0.0.100", 29500)

    def test_a_join_gives_the_host_once_it_is_accepted(self) -> None:
        host = SimulatedHost(self.reactor, HELLO, token=TOKEN)
        joined = host.join(self.endpoint)
        transport = self.reactor.take()
        self.addCleanup(transport.handle.close)
        self.assertEqual(transport.value(), host.talk.hello(HELLO))
        self.assertNoResult(joined)
        host.dataReceived(encode_join(TOKEN, 4, Accept((0, 1), None, 600)))
        self.assertIs(self.successResultOf(joined), host)

    def test_a_join_fails_where_nobody_listens_and_where_it_is_refused(self) -> None:
        refused = SimulatedHost(self.reactor, HELLO).join(self.endpoint)
        self.reactor.refuse(ConnectionRefusedError())
        self.failureResultOf(refused, ConnectionRefusedError)
        host = SimulatedHost(self.reactor, HELLO, token=TOKEN)
        joined = host.join(self.endpoint)
        transport = self.reactor.take()
        self.addCleanup(transport.handle.close)
        host.dataReceived(encode_join(TOKEN, 4, Reject("window-closed: late")))
        error = self.failureResultOf(joined, HostEndedError).value
        self.assertEqual(str(error), "gpu-a was refused: window-closed: late")

    def test_a_factory_makes_one(self) -> None:
        made: Deferred[Any] = self.endpoint.connect(Factory.forProtocol(partial(SimulatedHost, self.reactor, HELLO)))
        transport = self.reactor.take()
        self.addCleanup(transport.handle.close)
        self.assertEqual(transport.value(), self.successResultOf(made).talk.hello(HELLO))
