"""Which ranks of a world have reported their exit, and how; frozen membership in, answers out."""

from __future__ import annotations

import signal

from flodl_tw.core.ledger import Member, rank_span


class ViolationError(Exception):
    """A member sent what its place in the run does not allow."""


def exit_text(code: int) -> str:
    """A RankExited's code for people; it always has ``code N``."""
    if code == -1:
        return "code -1 (killed by a signal)"
    if code < 0:
        try:
            return f"code {code} (killed by {signal.Signals(-code).name})"
        except ValueError:
            return f"code {code} (killed by signal {-code})"
    return f"code {code}"


class Exits:
    """The reports of one world's ranks.  An agent names its ranks as its Accept did; the world has its own numbers."""

    def __init__(self, seats: dict[Member, range]) -> None:
        self._seats = seats
        self._unreported = {member: (1 << member.size) - 1 for member in seats}
        """Bit N is the member's Nth rank."""
        self._failed: dict[int, int] = {}

    def report(self, member: Member, accepted_rank: int, code: int) -> int:
        """A rank has ended; gives its number in the world.  Raises ViolationError where it cannot have."""
        if accepted_rank not in member.accepted_ranks:
            raise ViolationError(
                f"RankExited for rank {accepted_rank}, its Accept gave it {rank_span(member.accepted_ranks)}"
            )
        index = accepted_rank - member.accepted_from
        if not self._unreported[member] >> index & 1:
            raise ViolationError(f"RankExited for rank {accepted_rank} twice")
        self._unreported[member] ^= 1 << index
        rank = self._seats[member][index]
        if code:
            self._failed[rank] = code
        return rank

    def missing(self, member: Member) -> list[int]:
        """The ranks of the member that have not reported, in order."""
        unreported = self._unreported[member]
        return [rank for index, rank in enumerate(self._seats[member]) if unreported >> index & 1]

    def text(self, member: Member) -> str:
        """What is known of the exits of a member's ranks, for people."""
        reported = member.size - self._unreported[member].bit_count()
        failed = [
            f"rank {rank} with {exit_text(self._failed[rank])}" for rank in self._seats[member] if rank in self._failed
        ]
        return ", ".join([f"{reported} of {member.size}", *failed])
