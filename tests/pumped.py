"""What the pumped tests share: a controller on a clock, and all that was logged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.logger import LogLevel, formatEvent, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase

from flodl_tw.core.run_settings import OnLoss, RunSettings
from flodl_tw.core.window import StartMode, WindowSettings
from flodl_tw.testing import ClockedController, FakeDial, make_hello

TOKEN = bytes.fromhex("00112233445566778899aabbccddeeff")


def window(
    *, join_timeout: int = 300, max_join_timeout: int = 600, on_loss: OnLoss = OnLoss.ABORT, **fields: Any
) -> RunSettings:
    """A run's settings, by those of its window, unscaled."""
    times = {"join_timeout": join_timeout, "max_join_timeout": max_join_timeout}
    secs = {"window_secs": float(join_timeout), "cap_secs": float(max_join_timeout)}
    return RunSettings(window=WindowSettings(**{**times, **secs, **fields}), on_loss=on_loss)


MANUAL = StartMode.MANUAL
HYBRID = StartMode.HYBRID


class PumpedTestCase(SynchronousTestCase):
    """Keeps every event that was logged during a test; no time passes but on the clock."""

    def setUp(self) -> None:
        self.events: list[dict[str, Any]] = []
        observer = self.events.append
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)

    def lines(self, least: LogLevel = LogLevel.info) -> list[str]:
        """The logged lines of at least that level, in order."""
        return [formatEvent(event) for event in self.events if event["log_level"] >= least]

    def line(self, *parts: str, level: LogLevel | None = None) -> str:
        """The one line, of at least info, that has all the parts; it has the level, if one is named."""
        found = [event for event in self.events if event["log_level"] >= LogLevel.info]
        found = [event for event in found if all(part in formatEvent(event) for part in parts)]
        self.assertEqual(len(found), 1, f"lines with {parts}, of {self.lines()}")
        if level is not None:
            self.assertIs(found[0]["log_level"], level)
        return formatEvent(found[0])

    def forget(self) -> None:
        """Forget what was logged so far."""
        self.events.clear()

    def assert_idle(self, door: ClockedController) -> None:
        """Nothing waits on the clock."""
        self.assertEqual([str(call) for call in door.clock.getDelayedCalls()], [])


def turns(door: ClockedController, look: Callable[[int], object], count: int) -> None:
    """Run ``count`` reactor turns with no time passing, and call ``look(n)`` after the nth (from 1)."""
    turn = 0

    def after() -> None:
        nonlocal turn
        turn += 1
        look(turn)
        if turn < count:
            door.clock.callLater(0, after)

    door.clock.callLater(0, after)
    door.clock.advance(0)


def fill(door: ClockedController, hosts: int, devices: int = 1) -> list[FakeDial]:
    """Hosts ``h0``, ``h1``, … join, with no turn in between."""
    dials = []
    for number in range(hosts):
        dial = door.dial(f"10.0.{number // 250}.{number % 250 + 1}")
        dial.join(make_hello(f"h{number}", devices))
        dials.append(dial)
    return dials
