"""A step of the wall clock moves no deadline of a real ``twistd``."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from sys import executable

from flodl_tw.core.messages import WorldFormed
from tests.loopback.process import PATIENT, WAIT, ProcessTestCase, Twistd, ends, until

# A twistd whose wall clock steps by an hour, forth or back, when it is told to.
STEPPED = """
import signal, sys, time
real, offset = time.time, 0.0
time.time = lambda: real() + offset
def step(hours):
    def on_signal(number, frame):
        global offset
        offset += 3600.0 * hours
        open("stepped", "w").close()
    return on_signal
signal.signal(signal.SIGUSR1, step(1))
signal.signal(signal.SIGUSR2, step(-1))
from twisted.scripts.twistd import run
sys.argv[0] = "twistd"
run()
"""
FORTH, BACK = signal.SIGUSR1, signal.SIGUSR2


class SteppedClock(ProcessTestCase):
    """An hour forth, an hour back: the window and the deadlines go by elapsed time."""

    def begin(self, *options: str, scale: float) -> Twistd:
        """A controller whose wall clock can be stepped."""
        return self.start(*options, scale=scale, command=(executable, "-c", STEPPED))

    def step(self, controller: Twistd, number: int) -> None:
        """Step the clock, and see that the process has done it."""
        controller.send_signal(number)
        until(Path(controller.folder / "stepped").exists, "the step")

    def test_a_step_forth_neither_closes_a_window_nor_drops_a_young_dial(self) -> None:
        # A window of less than an hour, and of much more than the test takes.
        controller = self.begin("--join-timeout", "25", "--min-rank-start", "2", scale=PATIENT)
        self.joined(controller, "gpu-a")
        silent = self.connect(controller)
        self.step(controller, FORTH)
        state = controller.state()
        self.assertEqual((state["phase"], state["joined_hosts"]), ("waiting", 1))
        self.assertGreaterEqual(state["window_remaining_secs"], 2500 - 10 * WAIT)
        self.assertFalse(ends(silent, 0.3))

    def test_a_step_back_neither_holds_a_window_nor_keeps_a_silent_dial(self) -> None:
        controller = self.begin("--join-timeout", "20", "--min-rank-start", "1", scale=0.1)
        host = self.joined(controller, "gpu-a")
        silent = self.connect(controller)
        self.step(controller, BACK)
        # By the wall clock it would be an hour.
        self.assertTrue(ends(silent))
        self.assertIsInstance(host.next(), WorldFormed)
        self.assertGreaterEqual(time.monotonic() - controller.started_at, 2.0)
        host.exit_all(0)
        host.close()
        self.assertEqual(controller.ended(), 0)
