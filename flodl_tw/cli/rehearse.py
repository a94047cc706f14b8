"""``flodl-tw rehearse``: simulated hosts that join a running controller, so that what watches it can be tried.

Behind them is neither a GPU nor a process, only what a host says.
``Rehearsal._play`` is the whole story, in one reading.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Final, NoReturn

from twisted.internet.defer import CancelledError, Deferred, DeferredList, FirstError, gatherResults, succeed
from twisted.internet.defer import TimeoutError as NoAnswerError
from twisted.internet.interfaces import IReactorTime
from twisted.internet.protocol import Factory
from twisted.internet.task import deferLater

from flodl_tw import sockets
from flodl_tw.agent.agent import CHECK, REPLY_SECS
from flodl_tw.agent.dial import ATTEMPTS, Dialer, DialError
from flodl_tw.agent.outcome import MAX_REASON_CHARS, signal_name
from flodl_tw.cli.terminal import Printer, controller_of, make_reactor, run_to_end, say
from flodl_tw.core.addresses import show_endpoint
from flodl_tw.core.log_text import printable, shortened
from flodl_tw.core.messages import SIGNATURE_BYTES, Hello, Reject
from flodl_tw.core.phrases import counted
from flodl_tw.core.refusals import RefusalCode
from flodl_tw.limits import SCALE_VARIABLE, Limits, parse_scale, scaled
from flodl_tw.options import OptionReader
from flodl_tw.resolver import ThreadResolver
from flodl_tw.state_folder import given_token
from flodl_tw.testing import HostEndedError, SimulatedHost, make_hello

NAME: Final = "rehearsal"
"""What every host's name begins with, so that nobody takes one for a machine."""
AT_ONCE: Final = 64
"""Hosts that dial at the same time: far below the pending connections that a controller takes from one address."""
BAD: Final[Mapping[str, tuple[RefusalCode, Callable[[Hello], Hello]]]] = {
    "nccl": (RefusalCode.NCCL_MISMATCH, lambda hello: replace(hello, nccl_version=(2, 26, 5))),
    "vendor": (
        RefusalCode.VENDOR_MISMATCH,
        lambda hello: replace(hello, gpus=("AMD Instinct MI300X (192GB, gfx942)",), libtorch="precompiled/rocm6.4"),
    ),
    "dataset": (
        RefusalCode.DATASET_MISMATCH,
        lambda hello: replace(hello, dataset_sig=b"\xba\xdd" * (SIGNATURE_BYTES // 2)),
    ),
    "duplicate": (RefusalCode.DUPLICATE_HOST, lambda hello: hello),
}
"""The kinds of hosts that a controller is to refuse: with which word, and how their hello differs from a good one's."""


@dataclass(slots=True, eq=False)
class Player:
    """One simulated host, and how it fares.  ``bad`` is the kind of one that is to be refused."""

    hello: Hello
    bad: str | None = None
    link: SimulatedHost | None = None
    refusal: str = ""
    """The Reject's reason."""

    @property
    def name(self) -> str:
        """The host, for people."""
        return f"a second {self.hello.host}" if self.bad == "duplicate" else self.hello.host

    @property
    def is_in(self) -> bool:
        """Whether the controller has accepted it."""
        return self.link is not None and self.link.ranks != ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What is rehearsed.  ``secs`` is how long the ranks train; ``token`` is 16 bytes."""

    controller: tuple[str, int]
    hosts: int = 4
    gpus: int = 8
    bad: tuple[str, ...] = ()
    secs: float = 60.0
    token: bytes | None = field(default=None, repr=False)
    scale: float = 1.0

    def good_hosts(self) -> list[Player]:
        """Those that are to be in."""
        digits = max(2, len(str(self.hosts)))
        names = (f"{NAME}-{number:0{digits}}" for number in range(1, self.hosts + 1))
        return [Player(make_hello(name, self.gpus, nccl_version=(2, 27, 3))) for name in names]

    def bad_hosts(self) -> list[Player]:
        """Those that are to be refused, with a GPU each: one that is let in shall not fill the world by itself."""
        first = self.good_hosts()[0].hello
        alike = replace(first, local_devices=b"\0", gpus=first.gpus[:1])
        names = {kind: first.host if kind == "duplicate" else f"{NAME}-bad-{kind}" for kind in self.bad}
        return [Player(BAD[kind][1](replace(alike, host=name)), kind) for kind, name in names.items()]


def rehearse(options: Mapping[str, object], program: list[str], environ: Mapping[str, str]) -> int:
    """Join simulated hosts to a controller, train for a while, and tell whether all went as it should."""
    plan = read_plan(options, environ)
    sockets.raise_descriptor_limit()
    reactor = make_reactor()
    dialer = Dialer(
        reactor,
        *plan.controller,
        attempts=scaled(ATTEMPTS, plan.scale),
        connect_secs=Limits.at(plan.scale).connect,
        resolver=ThreadResolver(reactor),
        # Many hosts meet with the same fault, and it is told once.
        say=cache(say),
    )
    printer = Printer()
    rehearsal = Rehearsal(reactor, plan, dialer.dial, printer.show, say)
    status = run_to_end(reactor, rehearsal.run, signalled=lambda number: rehearsal.stop(signal_name(number)))
    return 1 if printer.failed else status


def read_plan(options: Mapping[str, object], environ: Mapping[str, str]) -> Plan:
    """What is to be rehearsed; SettingError for the first option that cannot be used."""
    texts = OptionReader(options, environ)
    controller = controller_of(texts)
    scale, warning = parse_scale(texts.variable(SCALE_VARIABLE))
    if warning is not None:
        say(warning)
    return Plan(
        controller,
        hosts=texts.whole("hosts", 1, 4096, 4),
        gpus=texts.whole("gpus", 1, 256, 8),
        bad=_kinds(texts),
        secs=texts.decimal("secs", 7 * 24 * 3600, 60.0),
        token=given_token(texts, say)[0],
        scale=scale,
    )


def _kinds(texts: OptionReader) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in (texts.get("bad") or "").split(",")))
    if words == ("",):
        return ()
    if not set(words) <= set(BAD):
        raise texts.wrong("bad", f"the kinds are {', '.join(BAD)}", "give some of them, with commas between")
    return words


@dataclass(eq=False)
class Rehearsal:
    """Plays a plan against a controller.

    ``dial`` gives a connection of the factory's.  ``say`` gets a line at each
    step, and ``complain`` one for each thing that did not go as it should.
    """

    clock: IReactorTime
    plan: Plan
    dial: Callable[[Factory[SimulatedHost]], Awaitable[SimulatedHost]]
    say: Callable[[str], None]
    complain: Callable[[str], None]

    def __post_init__(self) -> None:
        self._good = self.plan.good_hosts()
        self._bad = self.plan.bad_hosts()
        self._reply_secs = scaled(REPLY_SECS, self.plan.scale)
        self._endpoint = show_endpoint(*self.plan.controller)
        self._world_due = 0.0
        self._training: Deferred[None] | None = None
        self._story: Deferred[None] = succeed(None)
        self._leaving: Deferred[list[tuple[bool, None]]] = succeed([])
        self._wrong: list[str] = []
        self._broken = False
        """Whether the story does not go on to its end."""
        self._stops = 0

    async def run(self) -> int:
        """Play it; gives the exit status: 0 where all went as it should."""
        self._story = Deferred.fromCoroutine(self._play())
        try:
            await self._story
        except (CancelledError, FirstError, HostEndedError):
            if not self._broken:
                raise
        await self._leave()
        for fault in self._wrong:
            self.complain(printable(f"not as it should be: {fault}"))
        if not self._wrong:
            self.say("all went as it should")
        return 1 if self._wrong else 0

    def stop(self, signal_name: str) -> None:
        """End the training early, with clean exits; a second time, end at once."""
        self._stops += 1
        if self._stops > 1:
            self._break_off(f"ended at once by {signal_name}")
            self._leaving.cancel()
        elif self._training is None:
            self._break_off(f"stopped by {signal_name} before the world had formed")
        elif not self._training.called:
            self.say(f"{signal_name}: the training ends now; a second one leaves without a word")
            self.clock.callLater(0, self._training.callback, None)

    async def _play(self) -> None:
        plan = self.plan
        first, *others = self._good
        hosts = counted(plan.hosts, "host")
        self.say(f"{hosts} with {counted(plan.gpus, 'GPU')}{' each' if others else ''}: dialing {self._endpoint}")
        # The first finds out what all would.  The last waits for those that are to be refused: with it the world may
        # be complete, and its window closed.
        await self._admit([first])
        await self._admit(others[:-1])
        if self._members():
            await self._admit(self._bad)
            for host in self._bad:
                self._judge(host)
        await self._admit(others[-1:])
        refused = [host for host in self._good if host.refusal]
        if refused:
            # Most often it is one reason for all.
            told = f"{counted(len(refused), 'host')} refused, {refused[0].name} first: {refused[0].refusal}"
            self._tell(told, wrong=True)
        joined = sum(host.is_in for host in self._good)
        told = f"all joined: {hosts}" if joined == plan.hosts else f"{joined} of {hosts} joined,"
        self.say(f"{told} with {counted(joined * plan.gpus, 'rank')}")
        if self._members():
            await self._form()
            self._training = Deferred()
            await self._training.addTimeout(plan.secs, self.clock, onTimeoutCancel=lambda result, secs: None)
            await self._part()

    def _members(self) -> list[SimulatedHost]:
        return [host.link for host in (*self._good, *self._bad) if host.link is not None and host.is_in]

    def _tell(self, line: str, *, wrong: bool) -> None:
        self.say(printable(line))
        if wrong:
            self._wrong.append(line)

    def _judge(self, host: Player) -> None:
        """Tell how a bad host fared."""
        due = BAD[host.bad or ""][0].value
        well = host.refusal.partition(":")[0] == due
        if host.is_in:
            self._tell(f"{host.name} is in, and was to be refused with {due}", wrong=True)
        else:
            how = "as it should be" if well else f"and not with {due}"
            self._tell(f"{host.name} is refused, {how}: {host.refusal}", wrong=not well)

    async def _admit(self, hosts: Sequence[Player]) -> None:
        """Have these hosts dial, not too many at once, until each has its answer."""
        left = iter(hosts)

        async def dial_on() -> None:
            for host in left:
                await self._join(host)

        await gatherResults([Deferred.fromCoroutine(dial_on()) for _ in hosts[:AT_ONCE]], consumeErrors=True)

    async def _join(self, host: Player) -> None:
        """One host's dial, hello and answer."""
        token, limits = self.plan.token, Limits.at(self.plan.scale)
        make = partial(SimulatedHost, self.clock, host.hello, token=token, train_secs=None, limits=limits)
        try:
            host.link = await self.dial(Factory.forProtocol(make))
            accept = await host.link.when_accepted().addTimeout(self._reply_secs, self.clock)
        except DialError as error:
            await self._fail(f"{error}: {CHECK}")
        except NoAnswerError:
            await self._fail(f"{self._endpoint} said nothing in time, though it holds the connection")
        except HostEndedError as why:
            if not isinstance(why.event, Reject):
                await self._fail(str(why))
            host.refusal = shortened(why.event.reason, MAX_REASON_CHARS)
        else:
            host.link.when_ended().addCallback(self._break_off)
            self._world_due = max(self._world_due, self.clock.seconds() + accept.formation_wait_secs)

    async def _form(self) -> None:
        """Until the last host has its world, at most as long as real hosts wait for it."""
        members = self._members()
        secs = max(0.0, self._world_due - self.clock.seconds())
        if any(link.world is None for link in members):
            self.say(f"waiting for the world, {secs:.0f} s at most")
        deadline = self.clock.seconds() + secs + self._reply_secs
        try:
            for link in members:
                left = max(0.0, deadline - self.clock.seconds())
                world = await link.when_formed().addTimeout(left, self.clock)
        except NoAnswerError:
            await self._fail("the controller has neither formed the world nor aborted it in time")
        others = world.world_size - sum(len(link.ranks) for link in members)
        self.say(
            f"the world has formed: {counted(world.world_size, 'rank')} on {counted(world.num_workers, 'host')}"
            f"{f', {others} of the ranks not from here' if others else ''}; training for {self.plan.secs:g} s"
        )

    async def _part(self) -> None:
        """Every rank ends with 0, and every connection with its last rank."""
        for link in self._members():
            link.finish()
            # Thousands of hosts take long enough for a signal to come in between.
            await deferLater(self.clock, 0)
        self.say("the training has ended: every rank has exited with 0")

    async def _leave(self) -> None:
        """Leave no connection open; each has a moment to end by itself, unless we are to end at once."""
        links = [host.link for host in (*self._good, *self._bad) if host.link is not None]
        for link in links:
            link.close()
        if self._stops <= 1:
            self._leaving = DeferredList([link.gone for link in links], consumeErrors=True)
            await self._leaving

    def _break_off(self, why: object) -> None:
        """End the story, unless it is the end of a host that is as it should be; the first cause is told."""
        if why is not None and not self._broken:
            self._broken = True
            self._wrong.append(str(why))
            # The story may be what called us, so it is ended in the next turn.
            self.clock.callLater(0, self._end_story)

    def _end_story(self) -> None:
        self._story.cancel()

    async def _fail(self, why: str) -> NoReturn:
        """Go no further."""
        self._break_off(why)
        await Deferred()
        raise AssertionError("nothing but a cancel ends this wait")
