"""The native rendezvous: how the ranks of one world agree on a communicator's unique id.

Events go in, and effects come out in the order in which they are to be carried
out.  A peer is whatever the caller uses for a connection; nothing here touches
one.  Every rank dials and says Hello.  When all have, one is told to generate
the id and the others to wait; the id goes from that one to all the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum

from flodl_tw.core.ledger import Member
from flodl_tw.core.log_text import quoted
from flodl_tw.core.messages import RendezvousHello, RendezvousMessage, Role, RoleGiven, Uid
from flodl_tw.core.refusals import short_id

Peer = Hashable


class Timer(Enum):
    """The deadlines of a rendezvous, of which one runs at a time: of the next new rank, and of the id."""

    QUIET = "quiet"
    UID = "uid"


@dataclass(frozen=True, slots=True)
class Send:
    """Write a message to a peer."""

    peer: Peer
    message: RendezvousMessage


@dataclass(frozen=True, slots=True)
class Close:
    """Close a peer's connection once what was sent has left; ``why`` is for the log, None where it is the end."""

    peer: Peer
    why: str | None = None


@dataclass(frozen=True, slots=True)
class StartTimer:
    """Start this deadline in place of the one that runs; ``timed_out`` is the event that it leads to."""

    timer: Timer


@dataclass(frozen=True, slots=True)
class Fail:
    """The rendezvous, and so the run, has failed; no deadline runs any more."""

    why: str


@dataclass(frozen=True, slots=True)
class Complete:
    """Every rank has the id; no deadline runs any more."""


Effect = Send | Close | StartTimer | Fail | Complete


class RendezvousState(Enum):
    """Where a rendezvous stands."""

    GATHERING = "gathering"
    GENERATING = "generating"
    COMPLETE = "complete"
    FAILED = "failed"
    OVER = "over"


class Rendezvous:
    """One world's rendezvous.

    ``assignments`` are the world's members with their ranks; ``own_host`` is this
    machine's name, whose first rank generates if it is a member.
    """

    def __init__(self, assignments: Sequence[tuple[Member, range]], own_host: str) -> None:
        self.state = RendezvousState.GATHERING
        self._owner = {rank: member.host for member, ranks in assignments for rank in ranks}
        first = assignments[0][1][0]
        self._generator = next((ranks[0] for member, ranks in assignments if member.host == own_host), first)
        self._slots: dict[int, Peer] = {}
        self._ranks: dict[Peer, int] = {}
        self._seen: set[int] = set()
        self._dataset_sig: bytes | None = None
        self._first_rank = 0

    @property
    def missing(self) -> list[int]:
        """The ranks that have not said Hello, in order."""
        return [rank for rank in self._owner if rank not in self._slots]

    def hello(self, peer: Peer, hello: RendezvousHello) -> list[Effect]:
        """An authenticated Hello came on a connection that had said nothing before."""
        if self.state is not RendezvousState.GATHERING:
            return [Close(peer, f"rank {hello.global_rank} dialed, the rendezvous is {self.state.value}")]
        rank = hello.global_rank
        owner = self._owner.get(rank)
        if owner is None:
            return self._fail(f"a host said it holds rank {rank}, the world has {len(self._owner)} ranks from 0", peer)
        if hello.host_name != owner:
            return [
                Close(peer, f"host {quoted(hello.host_name)} said it holds rank {rank}, which is of host {owner!r}")
            ]
        if self._dataset_sig is None:
            self._dataset_sig, self._first_rank = hello.dataset_sig, rank
        elif hello.dataset_sig != self._dataset_sig:
            return self._fail(
                f"rank {rank} of host {owner!r} has dataset signature {short_id(hello.dataset_sig.hex())}, "
                f"rank {self._first_rank} came first with {short_id(self._dataset_sig.hex())}",
                peer,
            )
        return self._slot(rank, peer)

    def uid(self, peer: Peer, uid: Uid) -> list[Effect]:
        if self.state is not RendezvousState.GENERATING or self._ranks.get(peer) != self._generator:
            return self.broke(peer, "it sent a Uid that nobody asked it for")
        self.state = RendezvousState.COMPLETE
        effects: list[Effect] = []
        for rank, other in self._slots.items():
            if rank != self._generator:
                effects.append(Send(other, uid))
            effects.append(Close(other))
        self._forget()
        return [*effects, Complete()]

    def broke(self, peer: Peer, why: str) -> list[Effect]:
        """A peer sent what it may not; where a role depends on it, all depend on it."""
        return [Close(peer, why), *self.ended(peer)]

    def ended(self, peer: Peer) -> list[Effect]:
        rank = self._ranks.pop(peer, None)
        if rank is None:
            return []
        del self._slots[rank]
        if self.state is RendezvousState.GENERATING:
            return self._fail(f"rank {rank} of host {self._owner[rank]!r} left before it had the communicator's id")
        return []

    def end(self) -> None:
        """The run is over, and with it its rendezvous: nobody is given a role any more."""
        self.state = RendezvousState.OVER
        self._forget()

    def timed_out(self) -> list[Effect]:
        if self.state is RendezvousState.GENERATING:
            owner = self._owner[self._generator]
            return self._fail(
                f"rank {self._generator} of host {owner!r} was to generate the communicator's id, and did not in time"
            )
        missing = self.missing
        named = ", ".join(f"{rank} of {self._owner[rank]!r}" for rank in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        return self._fail(
            f"{len(self._slots)} of {len(self._owner)} ranks have dialed the rendezvous, and no new one came in time; "
            f"missing: {named}{more}"
        )

    def _slot(self, rank: int, peer: Peer) -> list[Effect]:
        effects: list[Effect] = []
        old = self._slots.get(rank)
        if old is not None:
            del self._ranks[old]
            effects.append(Close(old, f"rank {rank} dialed again, and its new connection counts"))
        self._slots[rank] = peer
        self._ranks[peer] = rank
        if len(self._slots) == len(self._owner):
            self.state = RendezvousState.GENERATING
            for each, other in self._slots.items():
                effects.append(Send(other, RoleGiven(Role.GENERATE if each == self._generator else Role.WAIT)))
            effects.append(StartTimer(Timer.UID))
        elif rank not in self._seen:
            # A rank that leaves and comes again is no progress.
            self._seen.add(rank)
            effects.append(StartTimer(Timer.QUIET))
        return effects

    def _fail(self, why: str, *also: Peer) -> list[Effect]:
        self.state = RendezvousState.FAILED
        peers = [*self._slots.values(), *also]
        self._forget()
        return [*(Close(peer) for peer in peers), Fail(f"the rendezvous failed: {why}")]

    def _forget(self) -> None:
        self._slots.clear()
        self._ranks.clear()
