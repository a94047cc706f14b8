"""Starting a host's children: each in a session of its own, and none before the guardian knows of it."""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, cast

from twisted.internet.interfaces import IProcessProtocol
from twisted.internet.process import Process
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from flodl_tw.agent import guardian, launcher, rank_files
from flodl_tw.agent.guardian import Sessions
from flodl_tw.reactor import IReactor

PASSED_ON: Final = guardian.WITNESSED
ENDING: Final = (signal.SIGTERM, signal.SIGINT)
SHORT_LIFE_SECS: Final = 1.0
MOST_SHORT_LIVES: Final = 5
"""Guardians in a row that end within a second of their start, before no other is tried."""
UNGUARDED: Final = "nothing will end the ranks, should this agent be killed"


class Guardian(ProcessProtocol):
    """Starts sessions, and has a process that ends them when we cannot.

    That process is started with the first session, and again should it die.
    ``grace`` is what sessions have between SIGTERM and SIGKILL, in seconds;
    ``descriptors`` are the limits (soft, hard) that their programs get.
    """

    def __init__(
        self,
        reactor: IReactor,
        grace: float,
        environ: Mapping[str, str],
        say: Callable[[str], None] = lambda line: None,
        descriptors: tuple[int, int] | None = None,
    ) -> None:
        self.sessions = Sessions()
        self._say = say
        self._started = 0.0
        self._short_lives = 0
        self._reactor = reactor
        self._grace = grace
        self.controller = ""
        """Whom our agents dial, for who comes after us."""
        self._environ = {name: environ[name] for name in ("PATH", "LANG", "TZ", "LD_LIBRARY_PATH") if name in environ}
        self._descriptors = descriptors or resource.getrlimit(resource.RLIMIT_NOFILE)
        self._pipe: int | None = None
        self._closing = False
        self._witnessed: dict[int, float] = {}

    def spawn(
        self, protocol: IProcessProtocol, words: Sequence[str], environ: Mapping[str, str], stdin: int | None = None
    ) -> Process:
        """Start ``words`` (an absolute path and its arguments) with exactly ``environ``; its pid is its session's id.

        Its input is ``stdin`` or empty; its output and errors come to ``protocol``.  Raises
        OSError where the system has no process or descriptor left.
        """
        self._try_to_start()
        with open(os.devnull, "rb") as nothing:
            empty = nothing.fileno()
            held = empty if self._pipe is None else self._pipe
            given: dict[int, int | str] = {
                **{0: empty if stdin is None else stdin, 1: "r", 2: "r"},
                **{launcher.GO: "w", launcher.GUARDIAN: held},
            }
            process = self._run(protocol, [launcher.__file__, *words], environ, given)
        assert process.pid is not None
        with suppress(OSError):
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, self._descriptors)
        self.sessions.record(process.pid)
        self._tell("+", process.pid)
        process.writeToChild(launcher.GO, b"g")
        process.closeChildFD(launcher.GO)
        return process

    def start(self) -> None:
        """Have the guardian run, if it doesn't yet: it is small, and ready before the first rank is.

        Raises OSError where the system has no process or descriptor left.
        """
        if self._pipe is not None or self._closing or self._short_lives >= MOST_SHORT_LIVES:
            return
        self._started = self._reactor.seconds()
        words = [guardian.__file__, str(self._grace), rank_files.beginning() or "", str(os.getpid()), self.controller]
        theirs, self._pipe = os.pipe()
        try:
            self._run(self, words, self._environ, {0: theirs, 1: "r", 2: 2})
        except OSError:
            self._close_pipe()
            raise
        finally:
            os.close(theirs)

    def orphans(self) -> list[int]:
        """The guardians that still end ranks of agents that are gone, and had dialed whom ours dial."""
        return guardian.orphans(self.controller)

    def leader_gone(self, session: int) -> None:
        """The session's leader has exited and was reaped."""
        self.sessions.leader_gone(session)
        self._tell(".", session)

    def forget(self, session: int) -> None:
        """Nothing of the session is left."""
        self.sessions.forget(session)
        self._tell("-", session)

    def close(self) -> None:
        """We end in an orderly way: it ends, too, and with it what is still recorded."""
        self._closing = True
        self._close_pipe()

    def childDataReceived(self, number: int, data: bytes) -> None:
        self._witnessed |= dict.fromkeys(data, self._reactor.seconds())

    def witnessed(self, number: int, since: float) -> bool:
        """Whether a signal has come to the guardian, too, so that its sender has reached the ranks."""
        return self._witnessed.get(number, -math.inf) >= since

    def processExited(self, reason: Failure) -> None:
        self._close_pipe()
        if self._closing:
            return
        short = self._reactor.seconds() < self._started + SHORT_LIFE_SECS
        self._short_lives = self._short_lives + 1 if short else 0
        if self._short_lives == MOST_SHORT_LIVES:
            self._say(f"the guardian does not stay: {UNGUARDED}")
        elif len(self.sessions):
            # Somebody ended it; another takes over what is recorded.
            self._reactor.callLater(0.05 * self._short_lives, self._try_to_start)

    def _try_to_start(self) -> None:
        """Start one where there is none, and tell it what is recorded."""
        if self._pipe is not None:
            return
        try:
            self.start()
        except OSError as error:
            self._say(f"no guardian can be started ({error.strerror}): {UNGUARDED}")
        for session, reaped in self.sessions.known():
            self._tell("+", session)
            if reaped:
                self._tell(".", session)

    def _run(
        self,
        protocol: IProcessProtocol,
        words: Sequence[str],
        environ: Mapping[str, str],
        descriptors: Mapping[int, int | str],
    ) -> Process:
        """Start a Python program of ours.

        Signals are held back until it takes the mask away: what came before
        would meet with Python's own handlers, or end a guardian that is to
        ignore it.
        """
        arguments = [os.fsencode(word) for word in (sys.executable, "-I", "-S", *words)]
        given = {os.fsencode(name): os.fsencode(value) for name, value in environ.items()}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*PASSED_ON, *ENDING))
        try:
            process = self._reactor.spawnProcess(protocol, sys.executable, arguments, given, childFDs=descriptors)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return cast(Process, process)

    def _tell(self, what: str, session: int) -> None:
        if self._pipe is not None:
            # One that has just died cannot be told, and processExited is on its way.
            with suppress(OSError):
                os.write(self._pipe, f"{what}{session}\n".encode())

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
