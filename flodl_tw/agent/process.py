"""Runs agents in a process of their own: the reactor, the signals, the one output, and the exit status."""

from __future__ import annotations

import math
import os
import resource
import select
import signal
from collections.abc import Callable, Mapping
from typing import Final, cast

from twisted.internet.defer import Deferred, gatherResults
from twisted.logger import (
    FilteringLogObserver,
    ILogObserver,
    LogEvent,
    LogLevel,
    LogLevelFilterPredicate,
    eventAsText,
    globalLogBeginner,
)

from flodl_tw import sockets
from flodl_tw.agent.agent import Agent
from flodl_tw.agent.devices import Choice
from flodl_tw.agent.outcome import Outcome
from flodl_tw.agent.output import ERR, Sink
from flodl_tw.agent.settings import AgentSettings
from flodl_tw.agent.spawn import ENDING, PASSED_ON, Guardian
from flodl_tw.reactor import IReactor

FLUSH_SECS: Final = 5.0
"""How long a reader may take nothing of the rest of our output; for all of it, where a signal ended us."""
WITNESS_SECS: Final = 0.2
"""Within this the guardian has what was sent to every process of a job, before or after us."""
SIGNALS: Final = (*ENDING, *PASSED_ON)
"""The signals that mean something to an agent or to its ranks."""


class Agents:
    """One or more agents of this machine, that share guardian, output and signals."""

    def __init__(self, reactor: IReactor, environ: Mapping[str, str], stop_grace: float) -> None:
        self._reactor = reactor
        self._environ = environ
        self.sink = Sink(
            pause=lambda: self._each(Agent.pause),
            resume=lambda: self._each(Agent.resume),
            from_thread=reactor.callFromThread,
            broke=self._broke,
        )
        # Our children's output needs more descriptors than they themselves may be used to.
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        sockets.raise_descriptor_limit()
        self._guardian = Guardian(reactor, stop_grace, environ, self.say, before)
        self._agents: list[Agent] = []
        self._hurried = False

    def add(self, settings: AgentSettings, choice: Choice) -> Agent:
        """One more host."""
        agent = Agent(self._reactor, settings, choice, self._environ, sink=self.sink, guardian=self._guardian)
        self._agents.append(agent)
        self._guardian.controller = settings.endpoint
        return agent

    def say(self, line: str) -> None:
        """A line of ours that is no single host's."""
        self.sink.write(ERR, f"flodl-tw: {line}\n".encode("utf-8", "backslashreplace"))

    def show_log(self, least: str) -> None:
        """Show what is logged, from the level of this name on, among our lines."""
        chosen = LogLevelFilterPredicate(LogLevel.levelWithName(least))
        shown = FilteringLogObserver(cast(ILogObserver, self._show_event), [chosen])
        globalLogBeginner.beginLoggingTo([shown], redirectStandardIO=False)

    def _show_event(self, event: LogEvent) -> None:
        self.say(eventAsText(event, includeTimestamp=False, includeSystem=False))

    async def run(self) -> list[Outcome]:
        """All of them, until the last has ended; their outcomes in the order of ``add``."""
        outcomes: list[Outcome] = await gatherResults(
            [Deferred.fromCoroutine(agent.run()) for agent in self._agents], consumeErrors=True
        )
        return outcomes

    def signalled(self, number: int) -> None:
        """One of ``SIGNALS`` came to this process."""
        if number in ENDING:
            self._hurried = True
            self._each(lambda agent: agent.signalled(number))
        else:
            self._reactor.callLater(WITNESS_SECS, self._pass_on, number, self._reactor.seconds())

    def _pass_on(self, number: int, came: float) -> None:
        known = self._guardian.witnessed(number, came - WITNESS_SECS)
        self._each(lambda agent: agent.signalled(number, known=known))

    def close(self) -> None:
        """After the last: let the guardian go, and write what is left to write.  It may block for a few seconds."""
        self._guardian.close()
        for number in ENDING:
            # Nothing is left but to write, and who asks again does not want to wait for that.
            signal.signal(number, signal.SIG_DFL)
        left = self.sink.close(FLUSH_SECS, FLUSH_SECS if self._hurried else math.inf)
        if left and select.select([], [ERR], [], 0)[1]:
            os.write(ERR, f"flodl-tw: {left} bytes of output are lost: nobody took them\n".encode())

    def _broke(self, descriptor: int, error: OSError) -> None:
        if descriptor in (1, 2):
            # Nobody is there to be told, or nobody cares.
            return
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        self.say(f"--log-dir: {path} cannot be written ({error.strerror}); going on without it")

    def _each(self, do: Callable[[Agent], None]) -> None:
        for agent in self._agents:
            do(agent)
