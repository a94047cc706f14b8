"""Starting a host's children: each in a session of its own, and none before the guardian knows of it."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from twisted.internet.interfaces import IProcessProtocol
from twisted.internet.process import Process, _listOpenFDs
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from flodl_tw import sockets
from flodl_tw.agent import guardian
from flodl_tw.agent import rank_files as error_files
from flodl_tw.agent.guardian import Sessions

GO: Final = 3
"""The child's descriptor at which it waits for the word to go."""
PASSED_ON: Final = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
ENDING: Final = (signal.SIGTERM, signal.SIGINT)
SHORT_LIFE_SECS: Final = 1.0
MOST_SHORT_LIVES: Final = 5
"""Guardians in a row that end within a second of their start, before no other is tried."""
UNGUARDED: Final = "nothing will end the ranks, should this agent be killed"
NOT_FOUND: Final = 127
NOT_RUN: Final = 126
"""Exit codes of a child whose program could not be started, as shells have them."""


class SessionProcess(Process):
    """A child that leads a session of its own and waits there for one byte before it runs its program.

    Twisted offers ``_setupChild`` to subclasses and no other way to a session.
    """

    inherited: tuple[int, int] | None = None
    """The descriptor limits to give to children, where ours were raised."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # A signal that comes between the fork and the child's own handlers must neither be lost
        # nor be handled by what the agent has installed.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*PASSED_ON, *ENDING))
        try:
            super().__init__(*arguments, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _trySpawnInsteadOfFork(self, *arguments: Any) -> bool:
        return False

    def _setupChild(self, fdmap: dict[int, int]) -> None:
        try:
            self._prepare(fdmap)
        except OSError as error:
            os.write(2, f"flodl-tw: a process cannot be prepared: {error.strerror}\n".encode())
            os._exit(NOT_RUN)

    def _prepare(self, fdmap: dict[int, int]) -> None:
        signal.set_wakeup_fd(-1)
        for number in (*PASSED_ON, *ENDING, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        # Before our copy of the guardian's pipe is closed: until then it sees no end of the pipe,
        # so it cannot look for this session before there is one.
        os.setsid()
        super()._setupChild(fdmap)
        if self.inherited is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, self.inherited)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        if os.read(GO, 1) != b"g":
            # The agent died before the guardian knew of this session.
            os._exit(NOT_RUN)
        os.close(GO)

    def _execChild(
        self, path: Any, uid: Any, gid: Any, executable: str, args: list[str], environment: dict[str, str]
    ) -> NoReturn:
        try:
            os.execve(executable, args, environment)  # noqa: S606
        except OSError as error:
            os.write(2, f"flodl-tw: {executable} cannot be run: {error.strerror}\n".encode())
            os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUN)


def raise_descriptor_limit() -> None:
    """Have room for many children's output; they themselves get the limit that we came with."""
    SessionProcess.inherited = resource.getrlimit(resource.RLIMIT_NOFILE)
    sockets.raise_descriptor_limit()


def spawn(
    reactor: Any,
    watch: Guardian,
    protocol: IProcessProtocol,
    words: Sequence[str],
    environ: Mapping[str, str],
) -> SessionProcess:
    """Start ``words`` (an absolute path and its arguments) with exactly ``environ``; its pid is its session's id.

    Its input is empty; its output and errors come to ``protocol``.  Raises
    OSError where the system has no process or descriptor left.
    """
    ours, theirs = _go_pipe()
    try:
        with open(os.devnull, "rb") as nothing:
            process = SessionProcess(
                reactor,
                words[0],
                list(words),
                dict(environ),
                None,
                protocol,
                childFDs={0: nothing.fileno(), 1: "r", 2: "r", GO: theirs},
            )
        assert process.pid is not None
        watch.record(process.pid)
        os.write(ours, b"g")
    finally:
        os.close(ours)
        os.close(theirs)
    return process


def _go_pipe() -> tuple[int, int]:
    theirs, ours = os.pipe()
    return ours, theirs


class Guardian(ProcessProtocol):
    """The process that ends our sessions when we cannot, and the record that it is told.

    Started with the first session, and again should it die.  ``grace`` is what
    sessions have between SIGTERM and SIGKILL, in seconds.
    """

    def __init__(
        self, reactor: Any, grace: float, environ: Mapping[str, str], say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.sessions = Sessions()
        self._say = say
        self._started = 0.0
        self._short_lives = 0
        self._reactor = reactor
        self._grace = grace
        self._environ = {name: environ[name] for name in ("PATH", "LANG", "TZ", "LD_LIBRARY_PATH") if name in environ}
        self._pipe: int | None = None
        self._closing = False

    def start(self) -> None:
        """Have it run, if it doesn't yet: it is small, and ready before the first rank is.

        Raises OSError where the system has no process or descriptor left.
        """
        if self._pipe is not None or self._closing or self._short_lives >= MOST_SHORT_LIVES:
            return
        try:
            self._start()
        except OSError:
            self._close_pipe()
            raise

    def _start(self) -> None:
        self._started = self._reactor.seconds()
        # Twisted finds out how to list descriptors once a process, and a child's finding is lost to the next child.
        _listOpenFDs()
        theirs, self._pipe = os.pipe()
        ours, go = _go_pipe()
        folders = error_files.beginning()
        words = [sys.executable, "-I", "-S", str(Path(guardian.__file__)), str(self._grace)]
        words += [] if folders is None else [folders]
        try:
            SessionProcess(
                self._reactor,
                words[0],
                words,
                self._environ,
                None,
                self,
                childFDs={0: theirs, 1: 1, 2: 2, GO: go},
            )
            os.write(ours, b"g")
        finally:
            for descriptor in (theirs, ours, go):
                os.close(descriptor)

    def record(self, session: int) -> None:
        """A session begins; it is told before this returns."""
        try:
            self.start()
        except OSError as error:
            self._say(f"no guardian can be started ({error.strerror}): {UNGUARDED}")
        self.sessions.record(session)
        self._tell("+", session)

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
            self._reactor.callLater(0.05 * self._short_lives, self._take_over)

    def _take_over(self) -> None:
        try:
            self.start()
        except OSError as error:
            self._say(f"no guardian can be started ({error.strerror}): {UNGUARDED}")
        else:
            for session, reaped in self.sessions.known():
                self._tell("+", session)
                if reaped:
                    self._tell(".", session)

    def _tell(self, what: str, session: int) -> None:
        if self._pipe is None:
            return
        try:
            os.write(self._pipe, f"{what}{session}\n".encode())
        except OSError:
            # It has just died, and processExited is on its way.
            return

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
