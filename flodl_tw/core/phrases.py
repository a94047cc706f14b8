"""What a run's log lines say of its hosts, as text."""

from __future__ import annotations

from itertools import islice
from typing import Final

from flodl_tw.core.ledger import Member, rank_span

NEWCOMERS_A_LINE: Final = 16
"""Hosts that share a log line, where so many join in one turn."""
MOVED_SHOWN: Final = 8
RANKS_SHOWN: Final = 8


class Newcomers:
    """The hosts that joined in this turn.  A line a host is a third of a join's cost where a fleet dials at once."""

    def __init__(self) -> None:
        self._told: list[str] = []

    def add(self, member: Member) -> None:
        """A host has joined."""
        offer = member.offer
        self._told.append(
            f"{member.host!r} from {offer.address} with {rank_span(member.accepted_ranks)} ({offer.hello.libtorch!r})"
        )

    def lines(self) -> list[str]:
        """Who joined since the last call, a line's worth each."""
        told, self._told = self._told, []
        return ["; ".join(told[first : first + NEWCOMERS_A_LINE]) for first in range(0, len(told), NEWCOMERS_A_LINE)]


def moved(assignments: tuple[tuple[Member, range], ...]) -> str | None:
    """Whose ranks are others than its Accept named, or None where nobody's are."""
    gone = [(member, ranks) for member, ranks in assignments if ranks != member.accepted_ranks]
    if not gone:
        return None
    shown = ", ".join(
        f"{member.host!r} from {rank_span(member.accepted_ranks)} to {rank_span(ranks)}"
        for member, ranks in islice(gone, MOVED_SHOWN)
    )
    return shown + (f" and {len(gone) - MOVED_SHOWN} more" if len(gone) > MOVED_SHOWN else "")


def named_ranks(ranks: list[int]) -> str:
    """Ranks that need not be contiguous: ``rank 3``, or ``ranks 3, 5`` and how many more."""
    named = ", ".join(map(str, ranks[:RANKS_SHOWN]))
    more = f" and {len(ranks) - RANKS_SHOWN} more" if len(ranks) > RANKS_SHOWN else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more}"
