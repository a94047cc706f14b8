"""The store of one world: its keys, who may reach them, and what people see of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from flodl_tw.core.addresses import Address, classify
from flodl_tw.core.ledger import Member
from flodl_tw.core.log_text import shortened
from flodl_tw.core.phrases import counted, out_of
from flodl_tw.core.store.keys import KeySpace
from flodl_tw.core.store.wire import StoreLimits

SHOWN_WAITS = 20
"""Keys that are shown of those that somebody waits for: the ones waited for longest."""
SHOWN_AWAITED = 4
"""Hosts that a refusal names."""
KEY_CHARS = 200
"""Characters of such a key that people are shown; it may have some thousand."""


class StoreClient(Protocol):
    """A connection to the store, as its world sees it."""

    def give_up(self, why: str) -> None:
        """Close it, for the sake of others."""


class WorldStore:
    """One key space for the world of ``members``.  ``seconds`` is a monotonic clock.

    The store has no authentication of its own, and torch unpickles some of
    what is in it, so it is open to the addresses that the members joined from.
    """

    def __init__(
        self, members: Iterable[Member], world_size: int, seconds: Callable[[], float], limits: StoreLimits
    ) -> None:
        self.keys = KeySpace(seconds, limits)
        self.clients: set[StoreClient] = set()
        """The connections that are open."""
        self.unread: dict[StoreClient, bytes] = {}
        """The long values that clients are being sent, who began first before the others."""
        self._world_size = world_size
        members = list(members)
        self._addresses = {member.offer.address for member in members}
        self._loopback = any(classify(address).loopback for address in self._addresses)
        self._awaited = {member.offer.address: member.host for member in members}
        """The hosts by address, the last of each, that nobody came from yet."""

    def admits(self, address: Address) -> bool:
        """Whether the peer is at one of the world's hosts."""
        self._awaited.pop(address.shown, None)
        return address.shown in self._addresses or (address.loopback and self._loopback)

    def awaited(self) -> str:
        """The hosts that nobody came from yet: an address that is let in nowhere may be another one of theirs."""
        hosts = [f"{host!r} at {address}" for address, host in self._awaited.items()]
        return ", ".join(hosts[:SHOWN_AWAITED]) + (" or others" if len(hosts) > SHOWN_AWAITED else "")

    def reads(self, client: StoreClient, value: bytes) -> None:
        """A client begins to be sent a long value: a value that is replaced meanwhile lives on for it.

        All values that are being sent may be as large as all that is stored and
        as much again; past that, the one that began first is given up.
        """
        self.unread.pop(client, None)
        self.unread[client] = value
        while sum({id(each): len(each) for each in self.unread.values()}.values()) > 2 * self.keys.limits.total_bytes:
            slowest = next(iter(self.unread))
            del self.unread[slowest]
            slowest.give_up("it does not read a long value, which has been replaced, and others need the room")

    def view(self) -> dict[str, object]:
        """What ``store.json`` says of it: counts, bytes, and what is waited for, the longest (in seconds) first.

        ``held_bytes`` is what waits and unfinished queries count, which the cap of bytes covers, too.
        """
        keys = self.keys
        return {
            "world_size": self._world_size,
            "connected": len(self.clients),
            "workers": keys.workers,
            "keys": keys.key_count,
            "queue_items": keys.items,
            "bytes": keys.stored,
            "held_bytes": keys.held,
            "max_keys": keys.limits.total_keys,
            "max_bytes": keys.limits.total_bytes,
            "waiting": [
                {"key": each.key, "clients": each.clients, "seconds": int(each.seconds)}
                for each in keys.waiting(SHOWN_WAITS)
            ],
        }

    def told(self) -> list[str]:
        """The same for people: a line, and one for each key that is waited for."""
        keys = self.keys
        lines = [
            f"{out_of(keys.workers, self._world_size, 'rank')} came to the store; it has "
            f"{counted(len(self.clients), 'connection')}, {counted(keys.key_count, 'key')} and "
            f"{counted(keys.stored, 'byte')}"
        ]
        for each in keys.waiting(SHOWN_WAITS):
            noun = "client has" if each.clients == 1 else "clients have"
            key = shortened(each.key, KEY_CHARS)
            lines.append(f"{each.clients} {noun} been waiting for {key}, the first for {int(each.seconds)} s")
        return lines
