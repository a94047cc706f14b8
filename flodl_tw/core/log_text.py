"""Texts from somebody else, made fit for a log line, a terminal or an error."""

from __future__ import annotations

import json
from typing import Final

MAX_TEXT_BYTES: Final = 255
"""Longest host name, GPU label, libtorch label and run id, in bytes of UTF-8."""
SHOWN_CHARS: Final = 100


def too_long(text: str) -> bool:
    """Whether a text is over the limit of names and labels."""
    return len(text) > MAX_TEXT_BYTES or (not text.isascii() and len(text.encode("utf-8")) > MAX_TEXT_BYTES)


def quoted(text: str) -> str:
    """A name or label from a peer, in quotes: whole where it is within its limit."""
    return shown(text) if too_long(text) else repr(text)


def shown(value: object) -> str:
    """A value for an error, short whatever it is: a text in quotes, and nothing of what is nested in it."""
    match value:
        case str():
            return repr(value[:SHOWN_CHARS] + "…" if len(value) > SHOWN_CHARS else value)
        case list():
            return f"(a list of {len(value)})"
        case dict():
            return "(an object)"
    return json.dumps(value)


def printable(text: str, most: int | None = None) -> str:
    """A text as a terminal or a page may have it: what does not print is escaped, and it ends after ``most``."""
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if most is None else shortened(text, most)


def shortened(text: str, most: int) -> str:
    """The text, or where it has more than ``most`` characters its beginning and ``…``."""
    return text if len(text) <= most else text[: most - 1] + "…"
