"""``flodl-tw rehearse``: simulated hosts that join a running controller, so that what watches it can be tried.

Behind them is neither a GPU nor a process, only what a host says.
``Rehearsal._play`` is the whole story, in one reading.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from twisted.internet import defer
from twisted.internet.defer import CancelledError, Deferred, FirstError, gatherResults
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater

from flodl_tw.agent.agent import CHECK, REPLY_SECS
from flodl_tw.agent.assignment import read_envelope
from flodl_tw.agent.dial import PAUSE_SECS, DialError
from flodl_tw.agent.link import Event, JoinLink, LinkEnded, LinkFactory
from flodl_tw.agent.outcome import SILENT_CLOSES, aborted, closed_silently
from flodl_tw.cli.rehearsed import Plan, RehearsedHost, bad_lines, faults, good_lines
from flodl_tw.core.addresses import show_endpoint
from flodl_tw.core.log_text import counted, printable
from flodl_tw.core.messages import Abort, Accept, Hello, Reject, WorldFormed
from flodl_tw.limits import Limits, scaled

AT_ONCE: Final = 64
"""Hosts that dial at the same time: far below the pending connections that a controller takes from one address."""
LONGEST_WAIT: Final = 1 << 31


class BrokenOffError(Exception):
    """The rehearsal cannot go on; the text is for people."""


class Rehearsal:
    """Plays a plan against a controller.

    ``dial`` gives a link of the factory's.  ``say`` gets a line at each step,
    and ``complain`` one for each thing that did not go as it should.
    """

    def __init__(
        self,
        clock: IReactorTime,
        plan: Plan,
        dial: Callable[[LinkFactory], Awaitable[JoinLink]],
        say: Callable[[str], None],
        complain: Callable[[str], None],
    ) -> None:
        self._clock = clock
        self._plan = plan
        self._dial = dial
        self._print = say
        self._complain = complain
        self._good = plan.good_hosts()
        self._bad = plan.bad_hosts()
        self._members: list[RehearsedHost] = []
        """The hosts that are in."""
        self._links: set[JoinLink] = set()
        """The links that are open."""
        self._limits = Limits.at(plan.scale)
        self._reply_secs = scaled(REPLY_SECS, plan.scale)
        self._endpoint = show_endpoint(*plan.controller)
        self._world_due = 0.0
        self._unseated = 0
        """How many that are in have no world yet."""
        self._formed: Deferred[None] | None = None
        self._training: IDelayedCall | None = None
        self._waiting: Deferred[Any] | None = None
        self._broken: str | None = None
        """Why it did not go on to its end; the first cause."""
        self._stops = 0

    async def run(self) -> int:
        """Play it; gives the exit status: 0 where all went as it should."""
        self._waiting = Deferred.fromCoroutine(self._play())
        try:
            await self._waiting
        except CancelledError:
            if self._broken is None:
                raise
        except BrokenOffError as why:
            self._broken = self._broken or str(why)
        await self._leave()
        wrong = [*([] if self._broken is None else [self._broken]), *faults([*self._good, *self._bad])]
        for fault in wrong:
            self._complain(printable(f"not as it should be: {fault}"))
        if not wrong:
            self._say("all went as it should")
        return 1 if wrong else 0

    def stop(self, signal_name: str) -> None:
        """End the training early, with clean exits; a second time, end at once."""
        self._stops += 1
        if self._stops > 1:
            self._break_off(f"ended at once by {signal_name}")
        elif self._training is None:
            self._break_off(f"stopped by {signal_name} before the world had formed")
        elif self._training.active():
            self._say(f"{signal_name}: the training ends now; a second one leaves without a word")
            self._training.reset(0)

    # The story

    async def _play(self) -> None:
        plan = self._plan
        first, others = self._good[:1], self._good[1:]
        each = " each" if plan.hosts > 1 else ""
        self._say(f"{counted(plan.hosts, 'host')} with {counted(plan.gpus, 'GPU')}{each}: dialing {self._endpoint}")
        # The first finds out what all would.  The last waits for those that are to be refused: with it the world may
        # be complete, and its window closed.
        await self._admit(first)
        await self._admit(others[:-1])
        if self._members:
            await self._admit(self._bad)
            self._tell(bad_lines(self._bad))
        await self._admit(others[-1:])
        self._tell(good_lines(self._good))
        if self._members:
            await self._world()
            await self._train()
            await self._part()

    async def _admit(self, hosts: Sequence[RehearsedHost]) -> None:
        """Have these hosts dial, not too many at once, until each has its answer."""
        left = deque(hosts)

        async def dial_on() -> None:
            while left:
                await self._join(left.popleft())

        dialing = [Deferred.fromCoroutine(dial_on()) for _ in range(min(AT_ONCE, len(hosts)))]
        try:
            await gatherResults(dialing, consumeErrors=True)
        except FirstError as error:
            left.clear()
            for each in dialing:
                each.cancel()
            error.subFailure.raiseException()

    async def _join(self, host: RehearsedHost) -> None:
        """One host's dial, hello and answer."""
        try:
            link, answer = await self._greeted(host.hello)
        except DialError as error:
            raise BrokenOffError(f"{error}: {CHECK}") from None
        except defer.TimeoutError:
            raise BrokenOffError(f"{self._endpoint} said nothing in time, though it holds the connection") from None
        match answer:
            case Accept():
                self._accepted(host, link, answer)
            case Reject():
                host.refusal = answer.reason
                link.close()
            case LinkEnded(fault=False):
                raise BrokenOffError(closed_silently(self._endpoint, has_token=self._plan.token is not None).text)
            case LinkEnded():
                raise BrokenOffError(f"{self._endpoint} does not answer as a controller does: {answer.how}")
            case _:
                raise BrokenOffError(f"{self._endpoint} answered a hello with {type(answer).__name__}")

    async def _greeted(self, hello: Hello) -> tuple[JoinLink, Event]:
        """A link with the answer to its hello; one that is closed without a word is sent again, as real hosts do."""
        factory = LinkFactory(partial(JoinLink, self._clock, self._limits, hello, self._plan.token))
        for time in range(SILENT_CLOSES):
            if time:
                await deferLater(self._clock, PAUSE_SECS)
            link = await self._dial(factory)
            self._links.add(link)
            link.gone.addCallback(self._forget, link)
            link.greet()
            answer = await link.next(self._reply_secs)
            if not isinstance(answer, LinkEnded) or answer.fault:
                break
        return link, answer

    def _forget(self, gone: None, link: JoinLink) -> None:
        self._links.discard(link)

    def _accepted(self, host: RehearsedHost, link: JoinLink, accept: Accept) -> None:
        count = len(host.hello.local_devices)
        if len(accept.ranks) != count:
            raise BrokenOffError(f"the controller gave {host.name} {len(accept.ranks)} ranks for {count} devices")
        host.link = link
        self._members.append(host)
        self._unseated += 1
        wait = min(accept.formation_wait_secs, LONGEST_WAIT)
        self._world_due = max(self._world_due, self._clock.seconds() + wait)
        link.deliver_to(partial(self._happened, host))

    async def _world(self) -> None:
        """Until the last host has its world."""
        if self._unseated:
            secs = max(0.0, self._world_due - self._clock.seconds())
            self._say(f"waiting for the world, {secs:.0f} s at most")
            self._formed = Deferred()
            try:
                await self._formed.addTimeout(secs + self._reply_secs, self._clock)
            except defer.TimeoutError:
                raise BrokenOffError("the controller has neither formed the world nor aborted it in time") from None
        assignment = self._members[0].assignment
        assert assignment is not None
        ours = sum(len(host.hello.local_devices) for host in self._members)
        others = "" if ours == assignment.world_size else f", {assignment.world_size - ours} of the ranks not from here"
        self._say(
            f"the world has formed: {counted(assignment.world_size, 'rank')} on "
            f"{counted(assignment.num_workers, 'host')}{others}; training for {self._plan.secs:g} s"
        )

    async def _train(self) -> None:
        over: Deferred[None] = Deferred()
        self._training = self._clock.callLater(self._plan.secs, over.callback, None)
        try:
            await over
        finally:
            if self._training.active():
                self._training.cancel()

    async def _part(self) -> None:
        """Every rank ends with 0, and every link with its last rank."""
        for host in self._members:
            if self._broken is not None:
                raise BrokenOffError(self._broken)
            assert host.link is not None
            for rank in host.link.talk.ranks:
                host.link.report(rank, 0)
            host.parted = True
            host.link.close()
            # Thousands of hosts take long enough for a signal to come in between.
            await deferLater(self._clock, 0)
        self._say("the training has ended: every rank has exited with 0")

    async def _leave(self) -> None:
        """Leave no link open; each has a moment to end by itself, unless we are to end at once."""
        for host in self._members:
            host.parted = True
        links = list(self._links)
        for link in links:
            link.close()
        if self._stops > 1:
            return
        self._waiting = gatherResults([link.gone for link in links], consumeErrors=True)
        with suppress(CancelledError, FirstError):
            await self._waiting

    # What happens on a link that is in

    def _happened(self, host: RehearsedHost, event: Event) -> None:
        match event:
            case WorldFormed() if host.assignment is None:
                self._seated(host, event)
            case Abort():
                self._break_off(aborted(event.reason).text)
            case LinkEnded(fault=True):
                self._break_off(f"{self._endpoint} does not answer as a controller does: {event.how}")
            case LinkEnded():
                if not host.parted:
                    when = "the world had formed" if host.assignment is None else "its ranks had ended"
                    self._break_off(f"the controller ended the link of {host.name} before {when} ({event.how})")
            case _:
                self._break_off(f"the controller sent {host.name} {type(event).__name__}, which is out of its turn")

    def _seated(self, host: RehearsedHost, formed: WorldFormed) -> None:
        try:
            host.assignment = read_envelope(
                formed.envelope_hex,
                devices=len(host.hello.local_devices),
                dialed=self._plan.controller,
                data_path=None,
                gpu_ram_share=None,
            )
        except ValueError as error:
            self._break_off(f"the controller's world cannot be used: {error}")
            return
        self._unseated -= 1
        if not self._unseated and self._formed is not None and not self._formed.called:
            self._formed.callback(None)

    def _break_off(self, why: str) -> None:
        self._broken = self._broken or why
        # Not at once: the story may be what called us.
        self._clock.callLater(0, self._end_wait)

    def _end_wait(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    # What is said

    def _say(self, line: str) -> None:
        self._print(printable(line))

    def _tell(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._say(line)
