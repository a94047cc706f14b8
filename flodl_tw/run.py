"""One run: from the opening of its window to the end of its last link.

Everything that a late frame may touch is here, so nothing of an old run can
reach the next one.  Protocols tell a run what happened; ``evaluate``, which the
controller calls once at the end of a turn, decides what follows.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from twisted.logger import Logger

from flodl_tw.core import views
from flodl_tw.core.ends import LinkEnd
from flodl_tw.core.errors import ViolationError
from flodl_tw.core.exits import Exits
from flodl_tw.core.facts import RUN_FACT, Offer
from flodl_tw.core.join_window import JoinWindow, closed
from flodl_tw.core.ledger import Member
from flodl_tw.core.phrases import counted, rank_list
from flodl_tw.core.refusals import Refusal
from flodl_tw.core.reports import RankError
from flodl_tw.core.run_settings import OnLoss, RunSettings
from flodl_tw.core.store.world import WorldStore
from flodl_tw.core.window import (
    Failed,
    Formed,
    Phase,
)
from flodl_tw.core.wire import SALT_BYTES
from flodl_tw.core.world import World
from flodl_tw.once import Once

SHIPPED_A_TURN: Final = 256
"""Envelopes written in one turn, so that a large world delays nobody else."""
RUN_ID_BYTES: Final = 8
"""Random bytes of a run's id."""


_log = Logger()


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended: ``done`` or ``failed``, and why it failed."""

    phase: Phase
    failure: str | None = None
    run_id: str = field(default="", compare=False)


class ControlLink(Protocol):
    """What a run asks of a member's connection.  Writing never fails; a loss comes as ``link_ended``."""

    def send_world(self, world: World, member: Member, ranks: range) -> None:
        """Write WorldFormed; RankExited may come from now on."""

    def send_abort(self, reason: str) -> None:
        """Write Abort, the link's last frame, and close."""

    def finish(self) -> None:
        """Close once what was written has left."""

    def read_end(self) -> None:
        """Where the peer has hung up and nothing but that is left to read, have it known now."""


class Run:
    """The state of one run.  ``seconds`` is a monotonic clock; ``happened`` asks for an ``evaluate``.

    ``session_salt`` (16 bytes) keys the control links of this run.  With
    ``rearms`` another run follows, so nobody has lost a window that nobody came to.
    """

    def __init__(
        self,
        settings: RunSettings,
        session_salt: bytes,
        seconds: Callable[[], float],
        happened: Callable[[], None],
        *,
        rearms: bool = False,
    ) -> None:
        self.settings = settings
        self.run_id = secrets.token_hex(RUN_ID_BYTES)
        """Tells this run from every other; its ranks have it, too, where their members state none of their own."""
        self.session_salt = session_salt
        self.window = JoinWindow(settings, seconds)
        self.ledger = self.window.ledger
        """Who is in; frozen at the verdict."""
        self.links: dict[Member, ControlLink] = {}
        """The links that are open, by member; after the verdict the ledger keeps members whose link is gone."""
        self.world: World | None = None
        self.failure: str | None = None
        """Why the run failed; set once, by the first cause."""
        self.first_casualty: str | None = None
        """The first lost host or failed rank."""
        self.ends: dict[Member, LinkEnd] = {}
        """How the links of the world's members ended, so far."""
        self.exits: Exits | None = None
        """What the ranks have reported; None before the verdict."""
        self.store: WorldStore | None = None
        """The world's keys, from its formation on; None where no store is served."""
        self.formed: Once[World] = Once()
        """For those who wait for its world."""
        self.ended: Once[RunEnd] = Once()
        """For those who wait for its end."""
        self._seconds = seconds
        self._happened = happened
        self._rearms = rearms
        self._closed_phase: Phase | None = None
        self._assignments: dict[Member, range] = {}
        self._to_ship: list[Member] = []
        self._abort_due = False
        self._ends_read = False
        self._last_report: float | None = None
        self._aborted: set[Member] = set()
        self._state_json = views.StateJson(self.ledger)
        self._newcomers: list[Member] = []
        self._parts: list[Callable[[], None]] = []

    # What is asked of a run

    @property
    def phase(self) -> Phase:
        return self._closed_phase or self.window.phase

    @property
    def is_open(self) -> bool:
        """Whether the window is open: no verdict was taken yet."""
        return self._closed_phase is None

    @property
    def over(self) -> bool:
        """Whether the run has ended: the window is closed, and so is every link."""
        return self._closed_phase in (Phase.DONE, Phase.FAILED) and not self.links

    @property
    def end(self) -> RunEnd:
        """How the run ended; of one that has not, how it stands."""
        return RunEnd(self.phase, self.failure, self.run_id)

    def secs_to_deadline(self) -> float | None:
        """Seconds until the clock alone may change the verdict, or None where it cannot."""
        if self.is_open:
            return self.window.secs_to_deadline()
        if self._last_report is None or self._closed_phase is not Phase.TRAINING:
            return None
        if self.exits is None or self.exits.runs_on(self.links):
            return None
        return max(0.0, self._last_report + self.settings.linger_secs - self._seconds())

    def state_json(self) -> bytes:
        """The body of ``state.json``; each member is rendered at most once between departures."""
        return self._state_json.body(views.state_head(self.window, self.phase, is_open=self.is_open))

    def why(self) -> dict[str, object]:
        return views.run_json(self.run_id, self.phase, self.failure, self.exits)

    def refusal(self, offer: Offer) -> Refusal | None:
        """Why the offer would be refused now, or None.  Changes nothing."""
        return self.window.refusal(offer) if self._closed_phase is None else closed(self._closed_phase)

    # What happened

    def hello(self, offer: Offer, link: ControlLink) -> Member | Refusal:
        """A host offers itself; it is a member from here on, or refused."""
        holder = self.ledger.member(offer.hello.host)
        if holder in self.links and self.is_open:
            # It may be the same host, which hung up and comes again.
            self.links[holder].read_end()
        if self.is_open and self.window.verdict() is not None:
            self._read_ends()
        refusal = self.refusal(offer)
        if refusal is not None:
            if self.window.refuse(offer, refusal):
                self._happened()
            return refusal
        member = self.window.enter(offer)
        self.links[member] = link
        self._newcomers.append(member)
        self._happened()
        return member

    def unheard(self, what: str) -> None:
        """A dial is closed without a word, since its frame does not verify: it has ``no token``, say."""
        if self.is_open:
            self.window.unheard[what] += 1

    def arm(self, address: str) -> None:
        """The operator started the run, from ``address``; it stays armed until the run ends."""
        if not self.is_open or self.window.armed:
            return
        self.window.armed = True
        _log.info("operator start from {address}: {standing}", address=address, standing=self.window.progress())
        self._happened()

    def abort(self, reason: str, address: str) -> None:
        """The operator ended the run, from ``address``; nothing comes of it where the run has ended or failed."""
        if self.phase in (Phase.DONE, Phase.FAILED):
            return
        self._tell_newcomers()
        _log.warn("operator abort from {address}: {standing}", address=address, standing=self.window.progress())
        self.fail(f"aborted by the operator: {reason}")
        self._happened()

    def link_ended(self, member: Member, end: LinkEnd) -> None:
        """A member's connection is gone: it departs from an open window, or may be lost to its world."""
        if self.links.pop(member, None) is None:
            return
        if self.is_open:
            self._tell_newcomers()
            self.ledger.depart(member)
            _log.info(
                "{host!r} left while the window is open (link {end}): {standing}",
                host=member.host,
                end=end.value,
                standing=self.window.progress(),
            )
        else:
            self.ends[member] = LinkEnd.ABORTED if member in self._aborted else end
            if self.failure is None and self.exits is not None and (missing := self.exits.missing(member)):
                self._lost(member, end, missing)
        self._happened()

    def rank_reported(self, member: Member, accepted_rank: int, error: RankError) -> None:
        """A rank of the member is about to exit, of this exception.  Raises ViolationError where it cannot."""
        if self.exits is None or member in self._to_ship:
            raise ViolationError("a report before its world was formed")
        self.exits.explain(member, accepted_rank, error)

    def rank_exited(self, member: Member, accepted_rank: int, code: int) -> None:
        """A rank of the member ended.  Raises ViolationError where it cannot have."""
        if self.exits is None or member in self._to_ship:
            raise ViolationError("RankExited before its world was formed")
        rank = self.exits.report(member, accepted_rank, code)
        self._last_report = self._seconds()
        text = self.exits.how(rank, code)
        alias = "" if rank == accepted_rank else f" (rank {accepted_rank} to its agent)"
        log = _log.warn if code else _log.info
        log("{host!r}: rank {rank}{alias} exited with {text}", host=member.host, rank=rank, alias=alias, text=text)
        if code:
            self._casualty(f"rank {rank} of host {member.host!r} exited with {text}")
        self._happened()

    # What follows

    def evaluate(self) -> None:
        """Decide on all that happened since the last call.  Called at the end of a turn, never inside a callback."""
        self._tell_newcomers()
        if self.is_open:
            judged = self.window.verdict()
            if judged is not None:
                self._read_ends()
                judged = self.window.verdict()
            if isinstance(judged, Formed):
                self._form(judged.why)
            elif isinstance(judged, Failed):
                self.fail(self.window.why_failed(judged), awaited=not self._rearms or self.window.somebody_came)
        if self._abort_due:
            self._abort_all()
        if self._closed_phase is Phase.FORMING:
            self._ship()
        if self.secs_to_deadline() == 0 and not self.is_open:
            self._let_go()
        self._ends_read = False
        if self._closed_phase in (Phase.FORMING, Phase.TRAINING) and not self.links:
            self._finish()

    def fail(self, why: str, *, awaited: bool = False) -> None:
        """The run has failed; every host whose link is open is told at the end of this turn.

        It is an error where somebody has lost it: a host that is in it, or
        whoever waits for its world, if it is ``awaited``.
        """
        lost = awaited or not self.is_open or bool(self.ledger.joined_hosts)
        self._closed_phase = Phase.FAILED
        self.failure = self.failure or why
        self._to_ship.clear()
        self._abort_due = True
        if lost:
            _log.error("the run has failed: {why}", why=self.failure)
        else:
            _log.info("the window closes, and no host was in it: {why}", why=self.failure)
        self._end_parts()

    def part_failed(self, why: str) -> None:
        """Something that the world cannot do without has failed, whatever ``on_loss`` says."""
        if self._closed_phase in (Phase.FORMING, Phase.TRAINING):
            self.fail(why)
            self._happened()

    def at_end(self, end: Callable[[], None]) -> None:
        """Have ``end`` called once, when this run is done or has failed."""
        self._parts.append(end)

    def _end_parts(self) -> None:
        parts, self._parts = self._parts, []
        for end in parts:
            end()

    def _tell_newcomers(self) -> None:
        newcomers, self._newcomers = self._newcomers, []
        for joined in views.joined(newcomers):
            _log.info("joined: {joined}: {standing}", joined=joined, standing=self.window.progress())

    def _form(self, why: str) -> None:
        assignments = tuple(self.ledger.roster())
        salt = self.session_salt if self.settings.one_salt else secrets.token_bytes(SALT_BYTES)
        limits = self.settings.store
        self.world = World(assignments, salt, self.settings.launch, self._world_run_id(), store=limits is not None)
        if limits is not None:
            self.store = WorldStore((member for member, _ in assignments), self.world.world_size, self._seconds, limits)
        self._closed_phase = Phase.FORMING
        self._assignments = dict(assignments)
        self.exits = Exits(self._assignments)
        self._to_ship = [member for member, _ in reversed(assignments)]
        _log.info(
            "the world forms: {ranks} on {hosts} after {secs} s ({why})",
            ranks=counted(self.world.world_size, "rank"),
            hosts=counted(len(assignments), "host"),
            secs=int(self.window.elapsed),
            why=why,
        )
        target = self.window.settings.target_ranks
        if target is not None and self.world.world_size > target:
            _log.warn(
                "that is more than the target of {ranks}: the last host was taken whole; "
                "--min-rank-start {target} has such a host refused",
                ranks=counted(target, "rank"),
                target=target,
            )
        if (shown := views.moved(assignments)) is not None:
            _log.info("hosts left the window, so ranks moved: {shown}", shown=shown)

    def _world_run_id(self) -> str:
        """The members' own, where they state one that an environment can hold; else this run's."""
        stated: str | None = self.ledger.expected(RUN_FACT)
        return stated if stated and stated.isprintable() else self.run_id

    def _ship(self) -> None:
        assert self.world is not None
        for _ in range(min(SHIPPED_A_TURN, len(self._to_ship))):
            member = self._to_ship.pop()
            link = self.links.get(member)
            if link is not None:
                link.send_world(self.world, member, self._assignments[member])
        if self._to_ship:
            self._happened()
        else:
            self._closed_phase = Phase.TRAINING
            _log.info("every host has its world: training")

    def _lost(self, member: Member, end: LinkEnd, ranks: list[int]) -> None:
        how = "went silent" if end is LinkEnd.SILENT else f"is gone (link {end.value})"
        assert self.exits is not None
        told = next((f" ({error.text})" for rank in ranks if (error := self.exits.errors.get(rank))), "")
        what = f"host {member.host!r} {how} before {rank_list(ranks)} had reported an exit{told}"
        _log.warn("lost {what}", what=what)
        self._casualty(what)

    def _casualty(self, what: str) -> None:
        if self.first_casualty is None:
            assert self.exits is not None
            # One that left the others early may be why they could not go on.
            clean = self.exits.clean()
            self.first_casualty = what + (f"; before that {rank_list(clean)} had exited with code 0" if clean else "")
        if self.settings.on_loss is OnLoss.ABORT and self.failure is None:
            self.fail(self.first_casualty)

    def _read_ends(self) -> None:
        """Have those depart that have hung up unnoticed, so that no world forms with them; once a turn."""
        if not self._ends_read:
            self._ends_read = True
            for link in list(self.links.values()):
                link.read_end()

    def _let_go(self) -> None:
        """End the links that stay open though all ranks have reported."""
        self._last_report = None
        for member, link in list(self.links.items()):
            _log.warn(
                "{host!r} at {address} keeps its link open {secs:g} s after the last rank has reported: "
                "the run ends by the reports, and the link is closed",
                host=member.host,
                address=member.offer.address,
                secs=self.settings.linger_secs,
            )
            link.finish()

    def _abort_all(self) -> None:
        self._abort_due = False
        assert self.failure is not None
        for member, link in list(self.links.items()):
            self._aborted.add(member)
            link.send_abort(self.failure)

    def _finish(self) -> None:
        if self.first_casualty is None:
            self._closed_phase = Phase.DONE
            _log.info("the run is done: every rank exited with code 0")
        else:
            self._closed_phase = Phase.FAILED
            self.failure = self.first_casualty
            _log.error("the run has failed: {why}", why=self.failure)
        self._end_parts()
