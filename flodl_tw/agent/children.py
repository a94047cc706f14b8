"""A host's children together: their output, their exits, and the end of all that they started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from signal import SIGCONT, SIGKILL, SIGTERM
from typing import Final

from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.process import Process
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from flodl_tw.agent.output import ERR, OUT, LineCutter, Sink
from flodl_tw.agent.spawn import Guardian

PARTIAL_SECS: Final = 1.0
"""How long an unfinished line waits for its end."""
TAIL_BYTES: Final = 8192
"""How much of a rank's errors is kept for the reason of its failure."""
PIPE_READS: Final = 16
"""Reads that empty a pipe, for sure."""
DRAIN_SECS: Final = 2.0
"""How long output may stand still after everything of the host has ended; a process that got away may hold it open."""
POLL_SECS: Final = 0.1
"""How often sessions that are ending are looked at."""
KERNEL_SECS: Final = 30.0
"""After SIGKILL: a process that is still there waits in the kernel, and is given up."""


class Child(ProcessProtocol):
    """One child: a rank or the relay.  ``files`` are descriptors that get its bytes as they are."""

    process: Process
    session = 0
    """The id of its session: its first process's."""

    def __init__(self, children: Children, prefix: str, files: Mapping[int, int]) -> None:
        self.running = True
        self.ended = False
        """Whether its output has ended, too."""
        self.tail = b""
        """The end of its errors so far."""
        self._children = children
        self._files = files
        self._cutters = {number: LineCutter(prefix.encode("utf-8", "surrogateescape")) for number in (OUT, ERR)}
        self._timers: dict[int, IDelayedCall] = {}

    def childDataReceived(self, number: int, data: bytes) -> None:
        self._children.received += len(data)
        if number in self._files:
            self._children.sink.write(self._files[number], data)
        if number == ERR:
            self.tail = (self.tail + data)[-TAIL_BYTES:]
        cutter = self._cutters[number]
        lines = cutter.feed(data)
        if lines:
            self._children.sink.write(number, lines)
        timer = self._timers.get(number)
        if timer is not None and timer.active():
            if not lines:
                return
            # Another line has begun, and waits from now on.
            timer.cancel()
        if cutter.partial:
            self._timers[number] = self._children.clock.callLater(PARTIAL_SECS, self._flush, number)

    def processExited(self, reason: Failure) -> None:
        self.running = False
        how = reason.value
        assert isinstance(how, ProcessDone | ProcessTerminated)
        self._read_errors()
        self._children.child_exited(self, -how.signal if how.signal else how.exitCode or 0)

    def processEnded(self, reason: Failure) -> None:
        self.ended = True
        for timer in self._timers.values():
            if timer.active():
                timer.cancel()
        for number, cutter in self._cutters.items():
            self._children.sink.write(number, cutter.end())

    def _read_errors(self) -> None:
        """Take what it said at last: its exit may be known before its pipe was read."""
        reader = self.process.pipes.get(ERR)
        for _ in range(PIPE_READS):
            before = self._children.received
            if reader is None or reader.doRead() is not None or self._children.received == before:
                return

    def _flush(self, number: int) -> None:
        self._children.sink.write(number, self._cutters[number].flush_partial())


class Children:
    """The children of one host in one world.

    ``exited`` gets each child and its exit code (-N for signal N) at once;
    ``all_gone`` is called after the last, when no process of their sessions
    is left.  ``grace`` is in seconds, from SIGTERM to SIGKILL.
    """

    def __init__(
        self,
        clock: IReactorTime,
        guardian: Guardian,
        sink: Sink,
        grace: float,
        *,
        exited: Callable[[Child, int], None],
        all_gone: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self.clock = clock
        self.sink = sink
        self._guardian = guardian
        self._grace = grace
        self._exited = exited
        self._all_gone = all_gone
        self._say = say
        self._children: list[Child] = []
        self._sessions: set[int] = set()
        self.received = 0
        """Bytes of output so far."""
        self.killed = False
        """Whether the grace is over, so that a SIGKILL is ours."""
        self._left_behind: set[int] = set()
        """The sessions whose child has gone, and whose other processes were asked to end."""
        self._kill_at: float | None = None
        self._poll: IDelayedCall | None = None

    def start(
        self,
        prefix: str,
        words: Sequence[str],
        environ: Mapping[str, str],
        files: Mapping[int, int],
        stdin: int | None = None,
    ) -> Child:
        """Start one child, its input empty or ``stdin``; OSError where the system has no room for it."""
        child = Child(self, prefix, files)
        child.process = self._guardian.spawn(child, words, environ, stdin)
        child.session = child.process.pid or 0
        self._children.append(child)
        self._sessions.add(child.session)
        if self.sink.paused:
            child.process.pauseProducing()
        return child

    @property
    def running(self) -> int:
        """How many children have not exited."""
        return sum(child.running for child in self._children)

    @staticmethod
    def signal(number: int, children: Iterable[Child]) -> None:
        """Pass a signal on to each of the children itself: what it started may not expect it."""
        for child in children:
            if child.running:
                with suppress(OSError):
                    os.kill(child.session, number)

    def stop(self, only: Child | None = None, number: int = SIGTERM) -> None:
        """Ask every child (or one alone) to end, by a signal to its own process; the grace begins.

        What a child leaves behind gets SIGTERM once the child has gone: its helpers must not go before it has saved
        its work.  After the grace their whole sessions get SIGKILL.
        """
        children = self._children if only is None else [only]
        self.signal(number, children)
        # One that was stopped acts on it once it goes on.
        self._guardian.sessions.signal(SIGCONT, {child.session for child in children})
        if self._kill_at is None or only is None:
            self._kill_at = self.clock.seconds() + self._grace
        self._watch()

    def kill(self) -> None:
        """The grace is over now."""
        self._kill_at = self.clock.seconds()
        self._watch()

    def pause(self) -> None:
        """Leave output where it is: nobody takes it from us."""
        for child in self._children:
            if not child.ended:
                child.process.pauseProducing()

    def resume(self) -> None:
        """Go on reading."""
        for child in self._children:
            if not child.ended:
                child.process.resumeProducing()

    def child_exited(self, child: Child, code: int) -> None:
        """Called by a child when it was reaped."""
        self._guardian.leader_gone(child.session)
        self._exited(child, code)
        if not self.running:
            self._watch()

    def _watch(self) -> None:
        if self._poll is None or not self._poll.active():
            self._poll = self.clock.callLater(0, self._look)

    def _look(self) -> None:
        left = self._guardian.sessions.left(self._sessions)
        now = self.clock.seconds()
        if not left and not self.running:
            self._drain()
            return
        if self._kill_at is None and not self.running:
            count = sum(map(len, left.values()))
            if count:
                self._say(f"the ranks have exited and left {count} processes behind: ending them")
                self.stop()
            else:
                # Nothing that can be seen, and it is not kept long.
                self._poll = self.clock.callLater(POLL_SECS, self._look)
            return
        if self._kill_at is not None and now >= self._kill_at:
            if now >= self._kill_at + KERNEL_SECS:
                self._say(f"giving up processes that even SIGKILL does not end: {sorted(chain(*left.values()))}")
                self._drain()
                return
            self.killed = True
            self._guardian.sessions.signal(SIGKILL, self._sessions)
        if self._kill_at is not None:
            self._end_left_behind(left)
            self._poll = self.clock.callLater(POLL_SECS, self._look)

    def _end_left_behind(self, left: Iterable[int]) -> None:
        running = {child.session for child in self._children if child.running}
        sessions = set(left) - running - self._left_behind
        if sessions:
            self._left_behind |= sessions
            for number in (SIGTERM, SIGCONT):
                self._guardian.sessions.signal(number, sessions)

    def _drain(self) -> None:
        for session in self._sessions:
            self._guardian.forget(session)
        self._poll = self.clock.callLater(0, self._drained, self.clock.seconds(), self._progress())

    def _progress(self) -> int:
        """Goes up while output moves: into us, or out of us to a reader that is slower."""
        return self.received + self.sink.written

    def _drained(self, since: float, progress: int) -> None:
        open_ones = [child for child in self._children if not child.ended]
        now = self.clock.seconds()
        if self._progress() != progress and self._kill_at is None:
            since, progress = now, self._progress()
        if open_ones and now < since + DRAIN_SECS:
            self._poll = self.clock.callLater(POLL_SECS / 4, self._drained, since, progress)
            return
        for child in open_ones:
            child.process.loseConnection()
            child.processEnded(Failure(Exception()))
        self._all_gone()
