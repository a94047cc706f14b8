"""The store of one world: its keys, who may reach them, and what people see of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from flodl_tw.core.addresses import Address, classify
from flodl_tw.core.ledger import Member
from flodl_tw.core.log_text import shortened
from flodl_tw.core.phrases import counted, out_of
from flodl_tw.core.store.keys import KeySpace
from flodl_tw.core.store.wire import StoreLimits

SHOWN_WAITS = 20
"""Keys that are shown of those that somebody waits for: the ones waited for longest."""
KEY_CHARS = 200
"""Characters of such a key that people are shown; it may have some thousand."""


class Unread:
    """Long values that clients have asked for and not read yet; each counts once, however many ask for it.

    A value that is replaced meanwhile lives on for those who read the old one,
    beyond any cap of the store, so who has read longest at one gives way.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: dict[Any, bytes] = {}
        """By client, the oldest first."""
        self._readers: Counter[int] = Counter()
        self.size = 0

    def add(self, client: Any, value: bytes) -> list[Any]:
        """A client begins to read a value; gives those that are to be closed for it."""
        self.remove(client)
        self._values[client] = value
        self._readers[id(value)] += 1
        if self._readers[id(value)] == 1:
            self.size += len(value)
        given_up = []
        while self.size > self._limit:
            given_up.append(next(iter(self._values)))
            self.remove(given_up[-1])
        return given_up

    def remove(self, client: Any) -> None:
        """It has read its value, or is gone."""
        value = self._values.pop(client, None)
        if value is None:
            return
        self._readers[id(value)] -= 1
        if not self._readers[id(value)]:
            del self._readers[id(value)]
            self.size -= len(value)


class WorldStore:
    """One key space for the world of ``members``.  ``seconds`` is a monotonic clock.

    The store has no authentication of its own, and torch unpickles some of
    what is in it, so it is open to the addresses that the members joined from.
    """

    def __init__(
        self, members: Iterable[Member], world_size: int, seconds: Callable[[], float], limits: StoreLimits
    ) -> None:
        self.keys = KeySpace(seconds, limits)
        self.clients: set[Any] = set()
        """The connections that are open."""
        # What is stored now may all be read at once, and as much that has been replaced.
        self.unread = Unread(2 * limits.total_bytes)
        self._world_size = world_size
        self._addresses = {member.offer.address for member in members}
        self._loopback = any(classify(address).loopback for address in self._addresses)

    def admits(self, address: Address) -> bool:
        """Whether the peer is at one of the world's hosts."""
        return address.shown in self._addresses or (address.loopback and self._loopback)

    def view(self) -> dict[str, Any]:
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
        view = self.view()
        lines = [
            f"{out_of(view['workers'], view['world_size'], 'rank')} came to the store; it has "
            f"{counted(view['connected'], 'connection')}, {counted(view['keys'], 'key')} and "
            f"{counted(view['bytes'], 'byte')}"
        ]
        for each in view["waiting"]:
            noun = "client has" if each["clients"] == 1 else "clients have"
            key = shortened(each["key"], KEY_CHARS)
            lines.append(f"{each['clients']} {noun} been waiting for {key}, the first for {each['seconds']} s")
        return lines
