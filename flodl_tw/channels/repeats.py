"""Log lines that strangers cause: the first of a kind from an address, and then one a minute that counts the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger, LogLevel

from flodl_tw.deadlines import DeadlineQueue

TELL_SECS: Final = 60
"""A line this often says what came since, in seconds."""
MOST_KINDS: Final = 1024
"""Kinds, by address, that have lines of their own within that time; all others are counted together."""
OTHERS: Final = "other addresses"

_log = Logger()


@dataclass(slots=True)
class _Kind:
    """What came of a kind since the last line, and the last text of it."""

    level: LogLevel
    more: int = 0
    last: str = ""


class RepeatedLines:
    """Writes such lines, so that nobody fills a disk by dialing again and again."""

    def __init__(self, clock: IReactorTime) -> None:
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._minutes: DeadlineQueue[tuple[str, str]] = DeadlineQueue(clock, TELL_SECS, self._minute_over)

    def line(self, address: str, kind: str, text: str, level: LogLevel = LogLevel.info) -> None:
        """Log ``text``, or count it where ``address`` has had a line of the kind within the last minute."""
        key = (address, kind)
        if key not in self._kinds and len(self._kinds) >= MOST_KINDS:
            key = (OTHERS, kind)
        known = self._kinds.get(key)
        if known is None:
            self._kinds[key] = _Kind(level)
            self._minutes.start(key)
            _log.emit(level, "{text}", text=text)
        else:
            known.more += 1
            known.last = text

    def clear(self) -> None:
        """Tell what is counted, and stop."""
        for key in self._kinds:
            self._tell(key)
        self._kinds.clear()
        self._minutes.clear()

    def _minute_over(self, key: tuple[str, str]) -> None:
        if self._tell(key):
            self._minutes.start(key)
        else:
            del self._kinds[key]

    def _tell(self, key: tuple[str, str]) -> int:
        """Say how many came since the last line; gives how many."""
        (address, kind), told = key, self._kinds[key]
        count, told.more = told.more, 0
        if count:
            _log.emit(
                told.level,
                "{count} more from {address} within {secs} s ({kind}), the last one: {last}",
                **{"count": count, "address": address, "secs": TELL_SECS, "kind": kind, "last": told.last},
            )
        return count
