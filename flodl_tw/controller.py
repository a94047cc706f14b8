"""The controller: the current run, the one place where verdicts are taken, and what comes after a run.

Protocols and pages hold a ``Controller``; it holds no socket.  Whatever happens
asks for one ``evaluate`` at the end of the reactor's turn.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from enum import Enum

from twisted.application.service import Service
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from flodl_tw.core.window import Phase, forming_text
from flodl_tw.core.wire import SALT_BYTES
from flodl_tw.deadlines import guarded
from flodl_tw.run import Run, RunSettings


class AfterRun(Enum):
    """What follows when a run is over."""

    EXIT = "exit"
    HOLD = "hold"
    REARM = "rearm"


class Controller(Service):
    """Opens runs, one at a time, and has each identified once a turn.

    ``token`` (16 bytes) is the session salt of every run under credentialed
    admission; None is open admission, where each run makes a salt of its own.
    ``finished`` is called with the outcome when a run is over under ``exit``.
    """

    log = Logger()

    def __init__(
        self,
        clock: IReactorTime,
        settings: RunSettings,
        *,
        token: bytes | None = None,
        after_run: AfterRun = AfterRun.HOLD,
        finished: Callable[[Phase], None] = lambda phase: None,
    ) -> None:
        self.clock = clock
        self.settings = settings
        self.token = token
        self.after_run = after_run
        self.run = self._new_run()
        self.last_outcome: str | None = None
        """How the run before this one ended, for the page; None before the second run."""
        self._finished = finished
        self._turn_end: IDelayedCall | None = None
        self._deadline: IDelayedCall | None = None
        self._handled: Run | None = None
        self._stopping = False

    @property
    def credentialed(self) -> bool:
        """Whether a host needs the token to join."""
        return self.token is not None

    def startService(self) -> None:
        """Open the first window: to be called in the turn in which the port listens."""
        super().startService()
        self._open_run()

    def stopService(self) -> None:
        """Tell every joined host that it is over.  The door closes what is still open."""
        super().stopService()
        self._stopping = True
        for timer in (self._turn_end, self._deadline):
            if timer is not None and timer.active():
                timer.cancel()
        if self.run.is_open or (self.run.links and self.run.failure is None):
            self.run.fail("the controller was stopped")
        # An Abort may be due from this very turn.
        self.run.evaluate()

    def happened(self) -> None:
        """Have the run settled at the end of this turn, once."""
        if self._turn_end is None and not self._stopping:
            self._turn_end = self.clock.callLater(0, self._end_of_turn)

    def _new_run(self) -> Run:
        salt = self.token or secrets.token_bytes(SALT_BYTES)
        return Run(self.settings, salt, self.clock.seconds, self.happened)

    def _open_run(self) -> None:
        self.run = self._new_run()
        if self._deadline is not None and self._deadline.active():
            # It was the old run's.
            self._deadline.cancel()
        window = self.settings.window
        self.log.info(
            "the join window is open for {window:g} s, with a hard cap of {cap:g} s, start {start}, "
            "admission {admission}: {standing}",
            window=window.window_secs,
            cap=window.cap_secs,
            start=window.start_mode.value,
            admission="credentialed" if self.credentialed else "open",
            standing=self.run.progress(),
        )
        self.log.info("{forms}", forms=forming_text(window))
        self._watch_clock()

    def _end_of_turn(self) -> None:
        self._turn_end = None
        guarded(self._evaluate)

    def _evaluate(self) -> None:
        run = self.run
        run.evaluate()
        if run.over and self._handled is not run:
            self._handled = run
            self._after(run)
        self._watch_clock()

    def _after(self, run: Run) -> None:
        if self.after_run is AfterRun.REARM:
            self.last_outcome = run.phase.value if run.failure is None else f"{run.phase.value}: {run.failure}"
            self._open_run()
            # Whoever remembers the old run (a log event does) shall not hold all that its store has.
            run.store = None
        elif self.after_run is AfterRun.EXIT:
            self._finished(run.phase)

    def _watch_clock(self) -> None:
        """Keep one timer on the moment at which the clock alone may change the verdict."""
        watching = self._deadline is not None and self._deadline.active()
        secs = self.run.secs_to_deadline()
        if secs is None:
            if self._deadline is not None and watching:
                self._deadline.cancel()
        elif not watching:
            self._deadline = self.clock.callLater(secs, self.happened)
