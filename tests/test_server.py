"""The server as an application has it: what it listens on, what it tells, and how it stops."""

from __future__ import annotations

import signal
from typing import Any

from twisted.internet.address import UNIXAddress
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IListeningPort, IProtocolFactory, IStreamServerEndpoint
from twisted.internet.task import Clock
from zope.interface import implementer

import flodl_tw
from flodl_tw.controller import NoWorldError
from flodl_tw.core.run_settings import AfterRun
from flodl_tw.core.window import Phase
from flodl_tw.run import RunEnd
from flodl_tw.server import ControllerServer
from flodl_tw.settings import ControllerSettings
from flodl_tw.testing import ClockedController, FakePort
from tests.pumped import PumpedTestCase, fill, window


@implementer(IStreamServerEndpoint)
class SlowEndpoint:
    """Listens when the test says so."""

    def __init__(self) -> None:
        self.listening: Deferred[IListeningPort] = Deferred()

    def listen(self, protocolFactory: IProtocolFactory) -> Deferred[IListeningPort]:  # noqa: N803  Twisted's name
        return self.listening


class UnixPort(FakePort):
    """A port on a Unix socket."""

    def getHost(self) -> Any:
        return UNIXAddress("/run/flodl.sock")


class ListeningTests(PumpedTestCase):
    """The window opens when the port is there."""

    def setUp(self) -> None:
        super().setUp()
        self.clock = Clock()
        self.endpoint = SlowEndpoint()
        self.server = ControllerServer(self.clock, ControllerSettings(), self.endpoint)

    def test_the_package_has_the_public_names(self) -> None:
        self.assertIs(flodl_tw.ControllerServer, ControllerServer)
        self.assertIs(flodl_tw.ControllerSettings, ControllerSettings)
        with self.assertRaisesRegex(AttributeError, "no attribute 'Controller'"):
            _ = flodl_tw.Controller  # type: ignore[attr-defined]

    def test_no_signal_of_its_application_s_is_handled_by_a_service(self) -> None:
        before = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self.server.startService()
        self.assertEqual({number: signal.getsignal(number) for number in before}, before)
        self.successResultOf(self.server.stopService())
        self.assertEqual({number: signal.getsignal(number) for number in before}, before)
        self.flushLoggedErrors(CancelledError)

    def test_no_window_is_open_before_it_listens(self) -> None:
        listening, over = self.server.when_listening(), self.server.when_over()
        self.server.startService()
        self.clock.advance(100)
        self.assertEqual(self.lines(), [])
        self.assertNoResult(listening)
        with self.assertRaisesRegex(RuntimeError, "wait for when_listening"):
            _ = self.server.port
        self.endpoint.listening.callback(FakePort())
        self.assertEqual(self.successResultOf(listening), FakePort().getHost())
        self.assertEqual(self.server.port, 29500)
        self.assertEqual(self.server.state()["window_remaining_secs"], 300)
        self.line("the join window is open")
        self.clock.advance(599)
        self.assertNoResult(over)
        self.clock.advance(1)
        self.assertEqual(self.successResultOf(over).phase, Phase.FAILED)

    def test_a_unix_socket_has_no_port_to_tell(self) -> None:
        self.server.startService()
        self.endpoint.listening.callback(UnixPort())
        self.assertEqual(self.successResultOf(self.server.when_listening()), UNIXAddress("/run/flodl.sock"))
        with self.assertRaisesRegex(RuntimeError, "does not listen on a TCP port"):
            _ = self.server.port

    def test_an_endpoint_that_cannot_listen_is_told_to_all_who_wait(self) -> None:
        waiting = [self.server.when_listening() for _ in range(2)]
        formed, over = self.server.when_formed(), self.server.when_over()
        self.server.startService()
        self.endpoint.listening.errback(CannotListenError("", 29500, OSError(98, "in use")))
        for each in (*waiting, self.server.when_listening()):
            self.failureResultOf(each, CannotListenError)
        self.assertIn("cannot listen", self.failureResultOf(formed, NoWorldError).getErrorMessage())
        self.assertEqual(self.successResultOf(over).phase, Phase.FAILED)
        self.assertEqual(len(self.flushLoggedErrors(CannotListenError)), 1)
        self.successResultOf(self.server.stopService())
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_it_may_stop_before_it_listens(self) -> None:
        self.server.startService()
        self.successResultOf(self.server.stopService())
        self.flushLoggedErrors(CancelledError)
        self.assertEqual(self.clock.getDelayedCalls(), [])


class WaitingTests(PumpedTestCase):
    """``when_formed`` and ``when_over``: each caller has a Deferred of its own."""

    def test_everybody_learns_of_the_world_and_of_the_end(self) -> None:
        door = ClockedController(window(target_ranks=2))
        formed = [door.server.when_formed() for _ in range(2)]
        over = [door.server.when_over() for _ in range(2)]
        dials = fill(door, 2)
        door.turn()
        self.assertEqual([self.successResultOf(each).world_size for each in formed], [2, 2])
        self.assertEqual(self.successResultOf(door.server.when_formed()).world_size, 2)
        self.assertNoResult(over[0])
        for rank, dial in enumerate(dials):
            dial.messages()
            dial.send(dial.talk.exited(rank))
            dial.hang_up()
        door.turn()
        for each in (*over, door.server.when_over()):
            self.assertEqual(self.successResultOf(each), RunEnd(Phase.DONE))

    def test_a_run_without_a_world_is_told_with_its_reason(self) -> None:
        door = ClockedController(window(min_rank_start=2))
        formed, over = door.server.when_formed(), door.server.when_over()
        fill(door, 1)
        door.clock.advance(600)
        door.turn()
        self.assertIn("quorum not met", self.failureResultOf(formed, NoWorldError).getErrorMessage())
        end = self.successResultOf(over)
        self.assertEqual(end.phase, Phase.FAILED)
        self.assertIn("quorum not met: 1 of 2", str(end.failure))

    def test_who_no_longer_waits_is_not_told_and_keeps_nobody_from_it(self) -> None:
        door = ClockedController(window(target_ranks=1))
        waits = door.server.when_formed(), door.server.when_over()
        others = door.server.when_formed(), door.server.when_over()
        for each in waits:
            each.cancel()
            self.failureResultOf(each, CancelledError)
        fill(door, 1)
        door.turn()
        self.successResultOf(others[0])
        self.assertNoResult(others[1])

    def test_a_stop_tells_those_who_wait_for_the_end(self) -> None:
        for ranks in (1, 9):
            door = ClockedController(window(target_ranks=ranks))
            fill(door, 1)
            door.turn()
            over = door.server.when_over()
            stopped = door.server.stopService()
            door.turn()
            self.assertEqual(self.successResultOf(over), RunEnd(Phase.FAILED, "the controller was stopped"))
            self.successResultOf(stopped)
            self.assertEqual(door.endpoint.port.asked, ["close"])
            self.assert_idle(door)

    def test_who_waits_again_under_rearm_waits_for_the_next_run(self) -> None:
        door = ClockedController(window(target_ranks=1), after_run=AfterRun.REARM)
        ends: list[RunEnd] = []

        def again(end: RunEnd) -> None:
            ends.append(end)
            door.server.when_over().addCallback(again)

        door.server.when_over().addCallback(again)
        for code in (0, 5):
            (dial,) = fill(door, 1)
            door.turn()
            dial.messages()
            dial.send(dial.talk.exited(0, code))
            dial.hang_up()
            door.turn()
        self.assertEqual([end.phase for end in ends], [Phase.DONE, Phase.FAILED])
