"""The pending connections: how many may wait, and who goes first when there are too many."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from flodl_tw.limits import YOUNG, YOUNG_FACTOR


class Dial(Protocol):
    """A pending connection, as the pending cap sees it."""

    @property
    def peer(self) -> str:
        """The address that it is counted under."""

    @property
    def from_loopback(self) -> bool:
        """Whether it comes from this host (or through its sshd)."""


Each = TypeVar("Each", bound=Dial)


class PendingConnections(Generic[Each]):
    """Connections that have not yet said what they want.

    At most ``most`` in all and ``most_per_host`` from one address (loopback
    is exempt from the second).  Past a cap the oldest of the address that has
    most goes, but none younger than ``YOUNG`` seconds unless ``YOUNG_FACTOR``
    times the cap are open: a young one's bytes may have arrived unread.
    Every operation costs O(1).
    """

    def __init__(self, seconds: Callable[[], float], most: int, most_per_host: int) -> None:
        self._seconds = seconds
        self._most = most
        self._most_per_host = most_per_host
        self._by_peer: dict[str, OrderedDict[Each, float]] = {}
        self._by_count: dict[int, OrderedDict[str, None]] = {}
        self._largest = 0
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def __iter__(self) -> Iterator[Each]:
        return (dial for dials in list(self._by_peer.values()) for dial in list(dials))

    def arrived(self, dial: Each) -> Each | None:
        """Count one in; gives the one that has to go, which the caller drops, or None."""
        dials = self._by_peer.setdefault(dial.peer, OrderedDict())
        dials[dial] = self._seconds()
        self._recount(dial.peer, len(dials) - 1, len(dials))
        self._total += 1
        if len(dials) > self._most_per_host and not dial.from_loopback:
            return self._oldest(dial.peer, len(dials) > self._most_per_host * YOUNG_FACTOR)
        if self._total > self._most:
            crowd = next(iter(self._by_count[self._largest]))
            return self._oldest(crowd, self._total > self._most * YOUNG_FACTOR)
        return None

    def remove(self, dial: Each) -> bool:
        """It has said what it wants, or is gone.  Gives whether it was pending until now."""
        dials = self._by_peer.get(dial.peer)
        if dials is None or dials.pop(dial, None) is None:
            return False
        self._total -= 1
        self._recount(dial.peer, len(dials) + 1, len(dials))
        if not dials:
            del self._by_peer[dial.peer]
        return True

    def _oldest(self, peer: str, even_young: bool) -> Each | None:
        dial, since = next(iter(self._by_peer[peer].items()))
        return dial if even_young or self._seconds() - since >= YOUNG else None

    def _recount(self, peer: str, before: int, after: int) -> None:
        if before:
            peers = self._by_count[before]
            del peers[peer]
            if not peers:
                del self._by_count[before]
        if after:
            self._by_count.setdefault(after, OrderedDict())[peer] = None
        if after > self._largest:
            self._largest = after
        elif before == self._largest and before not in self._by_count:
            self._largest = after if after in self._by_count else 0
