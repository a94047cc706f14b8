"""Which ranks of a world have reported their exit, and how; frozen membership in, answers out."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from flodl_tw.core.errors import ViolationError
from flodl_tw.core.ledger import Member
from flodl_tw.core.phrases import rank_list
from flodl_tw.core.reports import RankError


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

    def __init__(self, assignments: dict[Member, range]) -> None:
        self._assignments = assignments
        self._unreported = {member: (1 << member.size) - 1 for member in assignments}
        """Bit N is the member's Nth rank."""
        self._failed: dict[int, int] = {}
        self.count = 0
        """How many ranks have reported."""
        self.errors: dict[int, RankError] = {}
        """The exceptions that ranks died of, by rank in the world, as far as their agents told."""

    def report(self, member: Member, accepted_rank: int, code: int) -> int:
        """A rank has ended; gives its number in the world.  Raises ViolationError where it cannot have."""
        index = self._running(member, accepted_rank, "RankExited")
        self._unreported[member] ^= 1 << index
        self.count += 1
        rank = self._assignments[member][index]
        if code:
            self._failed[rank] = code
        return rank

    def explain(self, member: Member, accepted_rank: int, error: RankError) -> None:
        """Why a rank is about to be reported as ended.  Raises ViolationError where it cannot be."""
        index = self._running(member, accepted_rank, "a report")
        rank = self._assignments[member][index]
        if rank in self.errors:
            raise ViolationError(f"a report for rank {accepted_rank}, which has been reported on before")
        self.errors[rank] = error

    def clean(self) -> list[int]:
        """The ranks that have ended with code 0, in order."""
        ended = (
            rank
            for member, ranks in self._assignments.items()
            for index, rank in enumerate(ranks)
            if not self._unreported[member] >> index & 1
        )
        return sorted(rank for rank in ended if rank not in self._failed)

    def how(self, rank: int, code: int) -> str:
        """How a rank of the world ended, with its exception where it told one."""
        error = self.errors.get(rank)
        return exit_text(code) + ("" if error is None else f" ({error.text})")

    def _running(self, member: Member, accepted_rank: int, what: str) -> int:
        """The place on its host of a rank that has not been reported as ended."""
        if accepted_rank not in member.accepted_ranks:
            raise ViolationError(
                f"{what} for rank {accepted_rank}, its Accept gave it {rank_list(member.accepted_ranks)}"
            )
        index = accepted_rank - member.accepted_from
        if not self._unreported[member] >> index & 1:
            raise ViolationError(f"{what} for rank {accepted_rank}, which has been reported as ended")
        return index

    def missing(self, member: Member) -> list[int]:
        """The ranks of the member that have not reported, in order."""
        unreported = self._unreported[member]
        return [rank for index, rank in enumerate(self._assignments[member]) if unreported >> index & 1]

    def runs_on(self, members: Iterable[Member]) -> bool:
        """Whether a rank of these members has not reported yet."""
        return any(self._unreported[member] for member in members)

    def text(self, member: Member, *, others_run_on: bool = False) -> str:
        """What is known of the exits of a member's ranks, for people.

        ``others_run_on``: ranks of the world still train, so one that ended with code 0 left them early.
        """
        ranks = self._assignments[member]
        ended = [rank for index, rank in enumerate(ranks) if not self._unreported[member] >> index & 1]
        failed = [f"rank {rank} with {self.how(rank, self._failed[rank])}" for rank in ended if rank in self._failed]
        told = [f"{len(ended)} of {member.size}", *failed]
        early = [rank for rank in ended if rank not in self._failed]
        if others_run_on and early:
            told.append(f"{rank_list(early)} left early")
        return ", ".join(told)
