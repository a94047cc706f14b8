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
        self._text = "[]"

    def text(self) -> str:
        """The array; the same object while nothing has changed."""
        ledger = self._ledger
        if self._departures != ledger.departures:
            self._departures = ledger.departures
            self._rendered.clear()
            self._text = ""
        for member, ranks in islice(ledger.roster(), len(self._rendered), None):
            self._rendered.append(compact(member_view(member, ranks)))
            self._text = ""
        self._text = self._text or f"[{','.join(self._rendered)}]"
        return self._text


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


def state_head(window: JoinWindow, phase: Phase, *, is_open: bool) -> str:
    """``state.json`` without its members, its keys in order; a window that is closed has no time left."""
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
    return compact(head)


class StateJson:
    """The body of ``state.json``: one object for all who ask while it is the same, for they may be many."""

    def __init__(self, ledger: Ledger) -> None:
        self._members = MembersJson(ledger)
        self._of: tuple[str, str] = ("", "")
        self._body = b""

    def body(self, head: str) -> bytes:
        """The body with that head."""
        members = self._members.text()
        if self._of[0] != head or self._of[1] is not members:
            self._of = (head, members)
            self._body = f'{head[:-1]},"members":{members}}}'.encode()
        return self._body


def run_json(run_id: str, phase: Phase, failure: str | None, exits: Exits | None) -> dict[str, object]:
    """What ``run.json`` says of one run: its phase, why it failed, how many ranks ended, and what some died of."""
    errors = {} if exits is None else exits.errors
    told = [{"rank": rank, **asdict(error)} for rank, error in sorted(errors.items())[:SHOWN_ERRORS]]
    exited = 0 if exits is None else exits.count
    return {"run_id": run_id, "phase": phase.value, "failure": failure, "exited_ranks": exited, "rank_errors": told}
