"""The controller: the current run, the one place where verdicts are taken, and the run that follows.

Protocols and pages hold a ``Controller``; it holds no socket.  Whatever happens
asks for one evaluation at the end of the reactor's turn.
"""

from __future__ import annotations

import secrets
from collections import deque
from typing import Final

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from flodl_tw.core.run_settings import RunSettings
from flodl_tw.core.window import forming_text, opened_text
from flodl_tw.core.wire import SALT_BYTES
from flodl_tw.core.world import World
from flodl_tw.deadlines import Wait, after, guarded
from flodl_tw.run import Run, RunEnd

PAST_RUNS: Final = 16
"""Ends of earlier runs that are told: who asks once in a while shall not miss one."""
_log = Logger()


class NoWorldError(Exception):
    """The run ended before its world had formed; the text is the reason."""


class Controller:
    """Opens runs, one at a time, and has each evaluated once a turn.

    ``token`` (16 bytes) is the session salt of every run under credentialed
    admission; None is open admission, where each run makes a salt of its own.
    Where it is changed, links that there are keep theirs.
    With ``rearm`` a new window opens when a run is over.
    """

    def __init__(
        self, clock: IReactorTime, settings: RunSettings, *, token: bytes | None = None, rearm: bool = False
    ) -> None:
        self.clock = clock
        self.settings = settings
        self.token = token
        self._rearm = rearm
        self.run = self._new_run()
        self._past: deque[RunEnd] = deque(maxlen=PAST_RUNS)
        self._turn_end: IDelayedCall | None = None
        self._window: Wait | None = None
        self._stopped = False

    @property
    def credentialed(self) -> bool:
        return self.token is not None

    @property
    def last_outcome(self) -> str | None:
        """How the run before this one ended, for the page; None before the second run."""
        if not self._past:
            return None
        end = self._past[-1]
        return end.phase.value if end.failure is None else f"{end.phase.value}: {end.failure}"

    def why(self) -> dict[str, object]:
        """The body of ``run.json``: the current run, and how the ones before it ended."""
        past = [{"run_id": end.run_id, "phase": end.phase.value, "failure": end.failure} for end in self._past]
        return {**self.run.why(), "previous": past}

    @property
    def salt(self) -> bytes:
        """What keys the link of a host that joins now, and what an operator's request is asked for."""
        return self.token or self.run.session_salt

    def when_formed(self) -> Deferred[World]:
        """Fires with the current run's world; with NoWorldError where that run ends without one."""
        return self.run.formed.wait()

    def when_over(self) -> Deferred[RunEnd]:
        """Fires with how the current run ended, once every link of it is closed or the controller is stopped."""
        return self.run.ended.wait()

    def start(self) -> None:
        """Open the first window: to be called in the turn in which the port listens."""
        self._open_run()

    def stop(self, why: str = "the controller was stopped") -> None:
        """Tell every joined host that it is over.  The door closes what is still open."""
        self._stopped = True
        self._stop_watching()
        if self._turn_end is not None:
            self._turn_end.cancel()
        if self.run.is_open or (self.run.links and self.run.failure is None):
            self.run.fail(why)
        # An Abort may be due from this very turn.
        self.run.evaluate()
        self._tell(self.run)

    def happened(self) -> None:
        """Have the run evaluated at the end of this turn, once."""
        if self._turn_end is None and not self._stopped:
            self._turn_end = self.clock.callLater(0, guarded, self._end_of_turn)

    def _new_run(self) -> Run:
        salt = self.token or secrets.token_bytes(SALT_BYTES)
        return Run(self.settings, salt, self.clock.seconds, self.happened, rearms=self._rearm)

    def _open_run(self) -> None:
        self.run.window.open()
        window = self.settings.window
        _log.info(
            "the join window is {until}, with a hard cap of {cap:g} s, start {start}, "
            "admission {admission}: {standing}",
            until=opened_text(window),
            cap=window.cap_secs,
            start=window.start_mode.value,
            admission="credentialed" if self.credentialed else "open",
            standing=self.run.window.progress(),
        )
        _log.info("{forms}", forms=forming_text(window))
        self._watch_clock()

    def _end_of_turn(self) -> None:
        self._turn_end = None
        run = self.run
        run.evaluate()
        if run.over and self._rearm:
            self._next_run(run)
        self._tell(run)
        self._watch_clock()

    def _next_run(self, last: Run) -> None:
        self._past.append(last.end)
        # A clock that runs is the old run's.
        self._stop_watching()
        self.run = self._new_run()
        self._open_run()
        # Whoever remembers the old run (a log event does) shall not hold all that its store has.
        last.store = None

    def _tell(self, run: Run) -> None:
        """Tell those who wait for the run what it has come to."""
        if run.world is not None:
            run.formed.happened(run.world)
        if run.over or self._stopped:
            run.formed.happened(Failure(NoWorldError(run.failure)))
            run.ended.happened(run.end)

    def _watch_clock(self) -> None:
        """Keep one timer on the moment at which the clock alone may change the verdict."""
        secs = self.run.secs_to_deadline()
        if secs is None:
            self._stop_watching()
        elif self._window is None:
            self._window = after(self.clock, secs, self._clock_came)

    def _clock_came(self) -> None:
        self._window = None
        self.happened()

    def _stop_watching(self) -> None:
        if self._window is not None:
            self._window.cancel()
            self._window = None
