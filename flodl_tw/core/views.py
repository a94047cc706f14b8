"""The run as data for ``state.json``, and what the page and the log both show.

The state's keys and their order are part of the contract with ``fdl``; nothing is added.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

from flodl_tw.core.ledger import Ledger, Member

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def compact(value: Any) -> str:
    """JSON without blanks, text as it is, the way the reference writes it."""
    return _ENCODER.encode(value)


def member_view(member: Member, ranks: range) -> dict[str, Any]:
    """One member's object in ``state.json``."""
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
        """The array as it stands."""
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


def join_commands(endpoint: str, credentialed: bool, file: str = "FILE") -> tuple[str, str]:
    """The commands that join a worker, this project's and fdl's; neither ever has the token itself."""
    token_file, token = (f" --token-file {file}", " --token …") if credentialed else ("", "")
    return f"flodl-tw join {endpoint}{token_file} -- PROGRAM", f"fdl join {endpoint} --bin PROGRAM{token}"


def state_json(head: dict[str, Any], members: str) -> bytes:
    """The whole body: the head's keys in their order, then the members."""
    return f'{compact(head)[:-1]},"members":{members}}}'.encode()
