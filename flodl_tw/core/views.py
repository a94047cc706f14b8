"""The hosts of a run as data for ``state.json``, and as lines for the log.

The state's keys and their order are part of the contract with ``fdl``; nothing is added.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """The ``members`` array of a ledger.

    While hosts only join, each is rendered once, so that polling a window that
    fills costs little more the fuller it is.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._departures = 0
        self._rendered: list[str] = []

    def text(self) -> str:
        ledger = self._ledger
        if self._departures != ledger.departures:
            self._departures = ledger.departures
            self._rendered.clear()
        for member, ranks in islice(ledger.roster(), len(self._rendered), None):
            self._rendered.append(compact(member_view(member, ranks)))
        return f"[{','.join(self._rendered)}]"


def joined(newcomers: Sequence[Member]) -> list[str]:
    """Who joined, many to a log line: one for each is a third of a join's cost where a fleet dials at once."""
    told = [
        f"{member.host!r} from {member.offer.address} with {rank_list(member.accepted_ranks)} "
        f"({member.offer.hello.libtorch!r})"
        for member in newcomers
    ]
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


def state_json(window: JoinWindow, phase: Phase, members: str, *, is_open: bool) -> bytes:
    """The body of ``state.json``, its keys in order; a window that is closed has no time left."""
    window_secs, cap_secs = window.countdowns() if is_open else (None, None)
    head = {
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
    return f'{compact(head)[:-1]},"members":{members}}}'.encode()


def run_json(run_id: str, phase: Phase, failure: str | None, exits: Exits | None) -> dict[str, object]:
    """What ``run.json`` says of one run: its phase, why it failed, how many ranks ended, and what some died of."""
    errors = {} if exits is None else exits.errors
    told = [{"rank": rank, **asdict(error)} for rank, error in sorted(errors.items())[:SHOWN_ERRORS]]
    exited = 0 if exits is None else exits.count
    return {"run_id": run_id, "phase": phase.value, "failure": failure, "exited_ranks": exited, "rank_errors": told}
