"""The run as data for ``state.json`` and for the page.

Keys and their order are part of the contract with ``fdl``; nothing is added.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from flodl_tw.core.ledger import Member

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
Seats = Iterable[tuple[Member, range]]


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


def members_json(seats: Seats) -> str:
    """The ``members`` array.  Costs a few microseconds a host: keep it until the ledger changes."""
    return compact([member_view(member, ranks) for member, ranks in seats])


def state_json(head: dict[str, Any], members: str) -> bytes:
    """The whole body: the head's keys in their order, then the members."""
    return f'{compact(head)[:-1]},"members":{members}}}'.encode()
