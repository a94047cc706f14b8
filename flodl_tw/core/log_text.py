"""Texts for people: short, quoted, counted."""

from __future__ import annotations

from typing import Final

MAX_TEXT_BYTES: Final = 255
"""Longest host name, GPU label, libtorch label and run id, in bytes of UTF-8."""
QUOTED_CHARS: Final = 64


def too_long(text: str) -> bool:
    """Whether a text is over the limit of names and labels."""
    return len(text) > MAX_TEXT_BYTES or (not text.isascii() and len(text.encode("utf-8")) > MAX_TEXT_BYTES)


def quoted(text: str) -> str:
    """A text from a peer, quoted, and short enough for a reason and a log line."""
    return repr(text[:QUOTED_CHARS] + "…" if too_long(text) else text)


def printable(text: str) -> str:
    """A text from the network as a terminal may get it: what does not print is escaped."""
    return text if text.isprintable() else repr(text)[1:-1]


def shortened(text: str, most: int) -> str:
    """The text, or where it has more than ``most`` characters its beginning and ``…``."""
    return text if len(text) <= most else text[: most - 1] + "…"


def counted(count: int, noun: str) -> str:
    """``1 host``, ``2 hosts``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
