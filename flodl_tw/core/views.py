"""The hosts of a run as data for ``state.json``, and as lines for the log.

The state's keys and their order are part of the contract with ``fdl``; nothing is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from typing import Final

from flodl_tw.core.exits import Exits
from flodl_tw.core.fields import compact
from flodl_tw.core.join_window import JoinWindow
from flodl_tw.core.ledger import Ledger, Member
from flodl_tw.core.phrases import rank_list
from flodl_tw.core.window import Phase

NEWCOMERS_A_LINE: Final = 16
"""Hosts that share a log line, where so many join in one turn."""
MOVED_SHOWN: Final = 8
SHOWN_ERRORS: Final = 64
"""Exceptions of ranks that are told: a world's ranks mostly die of one cause."""


def member_view(member: Member, ranks: range) -> dict[str, object]:
    hello = member.offer.hello
    return {
        "host": hello.host,
        "ranks": list(ranks),
        "local_devices": list(hello.local_devices),
        "gpus": hello.gpus,
        "libtorch": hello.libtorch,
        "joined_at_secs": int(member.joined_at),
    }


class MembersJson:
    """The ``members`` array of a ledger, rendered at most once a change.

    While hosts only join, each is rendered once, so that polling a window that
    fills costs no more the fuller it is.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._changes = self._departures = -1
        self._rendered: list[str] = []
        self._text = "[]"

    def text(self) -> str:
        ledger = self._ledger
        if self._changes == ledger.changes:
            return self._text
        if self._departures != ledger.departures:
            self._rendered.clear()
        for member, ranks in islice(ledger.roster(), len(self._rendered), None):
            self._rendered.append(compact(member_view(member, ranks)))
        self._changes, self._departures = ledger.changes, ledger.departures
        self._text = f"[{','.join(self._rendered)}]"
        return self._text


def state_json(head: Mapping[str, object], members: str) -> bytes:
    """The whole body: the head's keys in their order, then the members."""
    return f'{compact(head)[:-1]},"members":{members}}}'.encode()


class Newcomers:
    """The hosts that joined in this turn.  A line a host is a third of a join's cost where a fleet dials at once."""

    def __init__(self) -> None:
        self._told: list[str] = []

    def add(self, member: Member) -> None:
        offer = member.offer
        self._told.append(
            f"{member.host!r} from {offer.address} with {rank_list(member.accepted_ranks)} ({offer.hello.libtorch!r})"
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
        f"{member.host!r} from {rank_list(member.accepted_ranks)} to {rank_list(ranks)}"
        for member, ranks in gone[:MOVED_SHOWN]
    )
    return shown + (f" and {len(gone) - MOVED_SHOWN} more" if len(gone) > MOVED_SHOWN else "")


def state_head(window: JoinWindow, phase: Phase, *, is_open: bool) -> dict[str, object]:
    """The keys of ``state.json`` before ``members``, in order; a window that is closed has no time left."""
    window_secs, cap_secs = window.countdowns() if is_open else (None, None)
    return {
        "phase": phase.value,
        "joined_ranks": window.ledger.joined_ranks,
        "joined_hosts": window.ledger.joined_hosts,
        "min_rank_start": window.settings.min_rank_start,
        "target_ranks": window.settings.target_ranks,
        "window_remaining_secs": window_secs,
        "cap_remaining_secs": cap_secs,
        "start_mode": window.settings.start_mode.value,
        "start_armed": window.armed,
    }


def run_json(phase: Phase, failure: str | None, exits: Exits | None) -> dict[str, object]:
    """The body of ``run.json``: the phase, why the run failed, how many ranks ended, and what some died of."""
    errors = {} if exits is None else exits.errors
    told = [{"rank": rank, **asdict(error)} for rank, error in sorted(errors.items())[:SHOWN_ERRORS]]
    exited = 0 if exits is None else exits.count
    return {"phase": phase.value, "failure": failure, "exited_ranks": exited, "rank_errors": told}
