"""A host's time in one world: its ranks are started, watched and reported, and everything is ended together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from signal import SIGINT, SIGKILL, SIGTERM
from typing import Final

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from flodl_tw.agent.assignment import Assignment
from flodl_tw.agent.children import Child, Children
from flodl_tw.agent.devices import Device
from flodl_tw.agent.gpu_view import GpuView, rank_view
from flodl_tw.agent.link import Event, JoinLink, LinkEnded
from flodl_tw.agent.memory_events import OomKills
from flodl_tw.agent.outcome import ALL_CLEAN, Outcome, aborted, rank_failed, signal_name, transient
from flodl_tw.agent.rank_environ import rank_environ, relay_environ
from flodl_tw.agent.rank_files import ErrorFiles, LogFiles
from flodl_tw.agent.settings import AgentSettings
from flodl_tw.core.exits import exit_text
from flodl_tw.core.messages import Abort
from flodl_tw.core.reports import RankError, last_words

RELAY_SECS: Final = 5.0
"""What a relay has to end by itself after the last rank."""
EARLY_SECS: Final = 5.0
"""After an exit with 0, while other ranks of the host run on: what an ordinary end never takes."""


@dataclass(eq=False)
class HostRun:
    """From WorldFormed to the end of the host's last process.

    ``done`` gives the outcome: the first thing that went wrong, or that all
    was clean.  ``environ`` is the agent's own.
    """

    clock: IReactorTime
    settings: AgentSettings
    devices: Sequence[Device]
    assignment: Assignment
    link: JoinLink
    make_children: Callable[..., Children]
    logs: LogFiles
    environ: Mapping[str, str]
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.done: Deferred[Outcome] = Deferred()
        self._errors = ErrorFiles()
        self._ranks: dict[Child, int] = {}
        """The index of each rank's child on this host."""
        self._relay: Child | None = None
        self._timers: list[IDelayedCall] = []
        self._cause: Outcome | None = None
        self._stopping = False
        self._signals = 0
        """How many have come to the agent that ask for the end."""
        self._passed = SIGTERM
        """What the ranks were asked to end by."""
        group = self.assignment.group
        self._takes_reports = group is not None and group.reports
        self._oom_kills = OomKills()
        self._told: RankError | None = None
        """What is said for ranks that we end, where it is no fault of theirs nor of the world's."""
        self.children = self.make_children(exited=self._exited, all_gone=self._all_gone)

    def start(self) -> None:
        """Start the relay, then the ranks; then listen to the link."""
        assignment = self.assignment
        words = self.settings.program
        if self._takes_reports:
            self._errors.open(self.say)
        try:
            if assignment.relay_hex is not None:
                environ = relay_environ(self.environ, assignment.relay_hex, assignment.host)
                self._relay = self.children.start(f"[{assignment.host}:relay] ", words, environ, {})
            # A controller without our object is flodl's own, and so is the program.
            view = GpuView.OWN if assignment.group is None else self.settings.gpu_view
            for index, rank in enumerate(assignment.ranks):
                mask, local = rank_view(self.devices, index, view)
                environ = rank_environ(
                    self.environ,
                    assignment,
                    index,
                    mask,
                    self._errors.path(rank),
                    local_rank=local,
                    own_store=self.settings.own_store,
                )
                prefix = f"[{assignment.host}:r{rank}] "
                stdin = 0 if self.settings.terminal and not rank else None
                child = self.children.start(prefix, words, environ, self.logs.files(rank), stdin)
                self._ranks[child] = index
        except OSError as error:
            self.end(transient(f"the system cannot start another process: {error.strerror}"))
        self.link.deliver_to(self._heard)
        if not self.children.running:
            self._all_gone()

    def end(self, cause: Outcome, *, signalled: int | None = None) -> None:
        """End every process of this host; the first cause is the outcome.

        ``signalled`` is the signal that has come to the agent, where one is the cause: SIGINT is passed on as it is,
        any other as SIGTERM.  Only a second signal hurries: it is SIGTERM after SIGINT, else the end of the grace.
        """
        self._signals += signalled is not None
        if self._stopping:
            if signalled is not None:
                self._asked_again(signal_name(signalled))
            return
        self._cause = self._cause or cause
        self._stopping = True
        self._passed = SIGINT if signalled == SIGINT else SIGTERM
        if signalled is not None and self._takes_reports:
            self._told = RankError("stopped", f"flodl-tw on its host got {signal_name(signalled)}", "")
        self._ask(cause.text)

    def _asked_again(self, name: str) -> None:
        if self._signals == 1:
            self.say(f"{name} came, too: the grace goes on, and another signal ends it")
        elif self._passed == SIGINT:
            self._passed = SIGTERM
            self._ask(f"{name} came, too")
        else:
            self.say("asked again: the grace is over")
            self.children.kill()

    def _ask(self, why: str) -> None:
        if self.children.running:
            count = self.children.running
            processes = f"{count} process{'' if count == 1 else 'es'}"
            how = f"with {signal_name(self._passed)}, and SIGKILL in {self.settings.stop_grace:g} s"
            self.say(f"{why}: ending {processes} {how}")
            self.children.stop(number=self._passed)

    def signal(self, number: int) -> None:
        """Pass a signal on to every rank; a relay has no use for it."""
        self.children.signal(number, self._ranks)

    def _heard(self, event: Event) -> None:
        if self._stopping:
            return
        if isinstance(event, Abort):
            self.end(aborted(event.reason))
        elif isinstance(event, LinkEnded):
            self.end(transient(f"the link to the controller has ended ({event.how})"))
        else:
            self.end(transient(f"the controller sent {type(event).__name__} in the middle of a run"))
            self.link.close()

    def _exited(self, child: Child, code: int) -> None:
        if child is self._relay:
            self._relay_exited(code)
            return
        index = self._ranks.get(child)
        if index is None:
            # One that came about while the system refused what it needed.
            return
        rank = self.assignment.ranks[index]
        error = self._errors.read(rank) if code else None
        if error is not None:
            self.say(f"rank {rank} left an exception: {error.text}")
        elif self._stopping or not code:
            error = self._told
        elif code == -SIGKILL:
            error = RankError("not by its agent", self._oom_kills.explained(), "")
            self.say(f"rank {rank} was killed {error.text}")
        else:
            error = last_words(child.tail)
        if error is not None and self._takes_reports:
            self.link.explain(self.link.talk.ranks[index], error)
        if code or not self._stopping:
            # One that was told to end and did so politely has not done its part of the world's work: unreported,
            # it is a loss, and the other hosts do not wait for it.
            self.link.report(self.link.talk.ranks[index], code)
        others = sum(other.running for other in self._ranks)
        self.say(f"rank {rank} exited with {exit_text(code)}")
        if others and not code:
            self._timers.append(self.clock.callLater(EARLY_SECS, self._left_early, rank))
        if code and not self._stopping:
            self._cause = self._cause or rank_failed(rank, code)
        if not others and self._relay is not None and self._relay.running:
            self._timers.append(self.clock.callLater(RELAY_SECS, self.children.stop, self._relay))

    def _left_early(self, rank: int) -> None:
        others = sum(other.running for other in self._ranks)
        if others and not self._stopping:
            self.say(f"rank {rank} left early: it exited with code 0, and {others} of this host's ranks run on")

    def _relay_exited(self, code: int) -> None:
        if any(child.running for child in self._ranks):
            self.end(
                transient(f"the relay exited with {exit_text(code)} while ranks run, and they cannot go on without")
            )

    def _all_gone(self) -> None:
        if self.done.called:
            return
        for timer in self._timers:
            if timer.active():
                timer.cancel()
        self._errors.close()
        self.done.callback(self._cause or ALL_CLEAN)
