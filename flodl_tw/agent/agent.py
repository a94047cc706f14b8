"""One host's agent: it dials, joins, waits for the world, runs the host's ranks, and may begin again.

``Agent._attempt`` is the story of one attempt, from the dial to its outcome.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from signal import SIGINT, SIGTERM, SIGUSR1, SIGUSR2
from typing import Final, TypeVar

from twisted.internet import defer
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater

from flodl_tw.agent.assignment import Assignment, read_world
from flodl_tw.agent.children import Children
from flodl_tw.agent.devices import Choice
from flodl_tw.agent.dial import ATTEMPTS, PAUSE_SECS, Dialer, DialError
from flodl_tw.agent.host import HostRun
from flodl_tw.agent.link import Event, JoinLink, LinkEnded, LinkFactory
from flodl_tw.agent.outcome import SILENT_CLOSES, Outcome, aborted, closed_silently, rejected, stopped, transient
from flodl_tw.agent.output import ERR, Sink
from flodl_tw.agent.rank_environ import stale
from flodl_tw.agent.rank_files import LogFiles
from flodl_tw.agent.settings import AgentSettings
from flodl_tw.agent.spawn import Guardian
from flodl_tw.agent.waiting import Waiting, ask
from flodl_tw.core.addresses import DEFAULT_PORT, FDL_PORT
from flodl_tw.core.log_text import printable
from flodl_tw.core.messages import Abort, Accept, Reject, WorldFormed
from flodl_tw.core.phrases import counted, rank_list
from flodl_tw.limits import Limits, scaled
from flodl_tw.reactor import IReactor
from flodl_tw.resolver import ThreadResolver

REPLY_SECS: Final = 30
"""What a controller has for its reply to a hello, and beyond the formation wait; scaled."""
LEAST_DELAY: Final = 5.0
MOST_DELAY: Final = 60.0
"""Seconds between two attempts under ``--persist``: each failure doubles them."""
LONG_RUN_SECS: Final = 120.0
"""A run that lasted as long begins the delays anew."""
ORPHAN_SECS: Final = 0.5
"""Between two looks at what a killed agent has left."""
CHECK: Final = (
    f"check that the controller runs, and its port ({DEFAULT_PORT} unless it was told otherwise; "
    f"flodl's own launcher has {FDL_PORT})"
)
FOREIGN: Final = (
    "in a row without a reply, and answers no question over HTTP as a controller does: most likely it is none, or "
    "what is in front of it speaks TLS or HTTP/2, or sends PROXY protocol headers (HAProxy's send-proxy), where it "
    "is to pass TCP through"
)

Result = TypeVar("Result")


@dataclass(eq=False)
class Agent:
    """The agent of one host.  ``choice`` has its devices, ``environ`` what its children inherit."""

    reactor: IReactor
    settings: AgentSettings
    choice: Choice
    environ: Mapping[str, str]
    sink: Sink
    guardian: Guardian
    jitter: Callable[[], float] = random.random
    resolver: ThreadResolver | None = None

    def __post_init__(self) -> None:
        self._limits = Limits.at(self.settings.scale)
        self._logs = LogFiles(self.settings.log_dir, self.say)
        self._dialer = Dialer(
            self.reactor,
            *self.settings.controller,
            attempts=scaled(ATTEMPTS, self.settings.scale),
            connect_secs=self._limits.connect,
            say=self.say,
            jitter=self.jitter,
            resolver=self.resolver or ThreadResolver(self.reactor),
        )
        self._host: HostRun | None = None
        self._interrupt: Callable[[], None] | None = None
        """Ends the step that is waited for."""
        self._stop: Outcome | None = None
        self._ran_secs = 0.0

    def say(self, line: str) -> None:
        text = printable(f"{self.settings.host}: {line}")
        self.sink.write(ERR, f"flodl-tw: {text}\n".encode("utf-8", "backslashreplace"))

    async def run(self) -> Outcome:
        """Attempt after attempt, under ``--persist``; gives the last one's outcome."""
        await self._interruptible(Deferred.fromCoroutine(self._old_ranks_gone()))
        delay = LEAST_DELAY
        while self._stop is None:
            outcome = await self._interruptible(Deferred.fromCoroutine(self._attempt()))
            self.say(f"{outcome.text} (status {outcome.status})")
            if not (self.settings.persist and outcome.retry) or self._stop is not None:
                return outcome
            if self._ran_secs >= LONG_RUN_SECS:
                delay = LEAST_DELAY
            self.say(f"dialing again in {delay:g} s (--persist)")
            await self._interruptible(deferLater(self.reactor, delay))
            delay = min(2 * delay, MOST_DELAY)
        return self._stop

    async def _old_ranks_gone(self) -> None:
        """Wait for the ranks of an agent that was killed here: in their grace they could write into the next world."""
        if self.guardian.orphans():
            self.say("ranks of an agent that was killed here still have their grace; joining once they are gone")
        while self.guardian.orphans():
            await deferLater(self.reactor, ORPHAN_SECS)

    def signalled(self, number: int, *, known: bool = False) -> None:
        """A signal came to the agent: SIGTERM and SIGINT end it, any other is its ranks', where it has any.

        ``known``: its sender has reached the ranks already.
        """
        if number not in (SIGTERM, SIGINT) and self._host is not None:
            if not known:
                self._host.signal(number)
            return
        if number in (SIGUSR1, SIGUSR2):
            return
        first, self._stop = self._stop, self._stop or stopped(number)
        if self._host is not None:
            self._host.end(self._stop, signalled=number)
        elif first is None and self._interrupt is not None:
            self._interrupt()

    def pause(self) -> None:
        if self._host is not None:
            self._host.children.pause()

    def resume(self) -> None:
        if self._host is not None:
            self._host.children.resume()

    async def _interruptible(self, step: Deferred[Result]) -> Result | Outcome:
        """Wait for a step that the first SIGTERM ends; gives its result, or why we stop."""
        self._interrupt = step.cancel
        try:
            return await step
        except CancelledError:
            if self._stop is None:
                raise
            return self._stop
        finally:
            self._interrupt = None

    async def _attempt(self) -> Outcome:
        self._ran_secs = 0.0
        link: JoinLink | None = None
        try:
            link, answer = await self._joined()
            if not isinstance(answer, Accept):
                return await self._not_accepted(link, answer)
            return await self._member(link, answer)
        except DialError as error:
            return transient(f"{error}: {CHECK}")
        except defer.TimeoutError:
            return transient(f"{self.settings.endpoint} said nothing in time, though it holds the connection")
        finally:
            if link is not None:
                link.close()
                if self._stop is None and not link.ended:
                    await link.gone

    async def _joined(self) -> tuple[JoinLink, Event]:
        """A link with the answer to its hello.  A hello that is closed without a word is sent again, a few times."""
        hello = self.settings.hello(self.choice.devices, self.choice.libtorch)
        factory = LinkFactory(partial(JoinLink, self.reactor, self._limits, hello, self.settings.token))
        for time in range(SILENT_CLOSES):
            if time:
                self.say(f"{self.settings.endpoint} closed the hello without a reply; trying again")
                # Whoever is to stay is not to give up for a proxy whose controller is being started again.
                pause = LEAST_DELAY if self.settings.persist else PAUSE_SECS
                await deferLater(self.reactor, pause * (0.5 + self.jitter()))
            link: JoinLink = await self._dialer.dial(factory)
            link.greet()
            try:
                answer = await link.next(scaled(REPLY_SECS, self.settings.scale))
            except BaseException:
                link.close()
                raise
            if not isinstance(answer, LinkEnded) or answer.fault:
                break
        return link, answer

    async def _not_accepted(self, link: JoinLink, answer: Event) -> Outcome:
        if isinstance(answer, Reject):
            return rejected(answer.reason)
        if not isinstance(answer, LinkEnded):
            return transient(f"{self.settings.endpoint} answered a hello with {type(answer).__name__}")
        if answer.fault:
            return transient(f"{self.settings.endpoint} does not answer as a controller does: {answer.how}")
        if await ask(self.reactor, *link.peer) is None:
            return transient(f"{self.settings.endpoint} closed {SILENT_CLOSES} hellos {FOREIGN}")
        return closed_silently(self.settings.endpoint, has_token=self.settings.token is not None)

    async def _member(self, link: JoinLink, accept: Accept) -> Outcome:
        """From the Accept to the end: wait for the world, and live in it."""
        count = len(self.choice.devices)
        if len(accept.ranks) != count:
            return transient(f"the controller gave {len(accept.ranks)} ranks for {count} devices")
        wait = accept.formation_wait_secs
        ranks = rank_list(accept.ranks)
        self.say(f"joined {self.settings.endpoint} with {ranks}; waiting for the world, {wait} s at most")
        try:
            # It is ready before the ranks are.
            self.guardian.start()
        except OSError as error:
            return transient(f"the system cannot start another process: {error.strerror}")
        waiting = Waiting(self.reactor, link, self.say, self.jitter)
        try:
            event = await link.next(min(wait, 1 << 31) + scaled(REPLY_SECS, self.settings.scale))
        finally:
            waiting.stop()
        if isinstance(event, Abort):
            return aborted(event.reason)
        if isinstance(event, LinkEnded):
            return transient(f"the controller ended the link before the world formed ({event.how})")
        if not isinstance(event, WorldFormed):
            return transient(f"the controller sent {type(event).__name__} where the world was due")
        settings = self.settings
        try:
            assignment = read_world(
                event,
                devices=count,
                dialed=link.peer,
                data_path=settings.data_path,
                gpu_ram_share=settings.gpu_ram_share,
            )
        except ValueError as error:
            return transient(f"the controller's world cannot be used: {error}")
        return await self._live(link, assignment)

    async def _live(self, link: JoinLink, assignment: Assignment) -> Outcome:
        self.say(
            f"the world has formed: {counted(assignment.world_size, 'rank')} on "
            f"{counted(assignment.num_workers, 'host')}, here {rank_list(assignment.ranks)}"
        )
        names = stale(self.environ, assignment, own_store=self.settings.own_store)
        if names:
            self.say(f"variables that were set already are replaced or removed for the ranks: {', '.join(names)}")
        if assignment.group is None:
            self.say("the controller is flodl's own: ranks get flodl's variables, and none of torchrun's")
        elif assignment.group.heartbeats:
            link.beat()
        if self.settings.own_store and not (assignment.group and assignment.group.rank0_address):
            self.say("the controller does not tell where rank 0 is: MASTER_ADDR stays as it is set")
        self.sink.mend()
        started = self.reactor.seconds()
        make = partial(Children, self.reactor, self.guardian, self.sink, self.settings.stop_grace, say=self.say)
        self._host = HostRun(
            self.reactor,
            self.settings,
            self.choice.devices,
            assignment,
            link,
            make,
            self._logs,
            self.environ,
            self.say,
        )
        try:
            self._host.start()
            outcome = await self._host.done
        finally:
            self._host = None
            self._ran_secs = self.reactor.seconds() - started
        return outcome
