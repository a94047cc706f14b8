"""A run's token as text: how it is read, and how nothing that may be one is shown."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Final

from flodl_tw.core.errors import SettingError
from flodl_tw.core.wire import SALT_BYTES

TOKEN_VARIABLE: Final = "FLODL_JOIN_TOKEN"  # noqa: S105  a variable's name, no secret
TOKEN_DIGITS: Final = 2 * SALT_BYTES
HIDDEN: Final = "(not shown)"
MAKE_ONE: Final = "make one with: flodl-tw token"
"""The way out; a file that a shell redirects to is for others to read, and would be refused next."""
_TOKEN = re.compile(rf"[0-9a-fA-F]{{{TOKEN_DIGITS}}}")
_MAYBE = re.compile(r"[0-9a-fA-F]{24,}")


def parse_token(text: str, source: str, shown: str = HIDDEN) -> bytes:
    """The 16 bytes of a token given as hex; a newline at its end is fine.

    Raises SettingError that names ``source``, with ``shown`` for its value; the text itself is never shown.
    """
    token = text.strip()
    if _TOKEN.fullmatch(token):
        return bytes.fromhex(token)
    others = " with others among them" if len(token) == TOKEN_DIGITS else ""
    raise SettingError(
        source,
        shown,
        f"a token is {TOKEN_DIGITS} hex digits, this is {len(token)} characters{others}",
        MAKE_ONE + (", or unset it" if source == TOKEN_VARIABLE else ""),
    )


def take_secret(name: str) -> None:
    """Take a variable with a secret out of this process's environment, and out of what /proc shows of it.

    What a process was started with stays there for every process of its user, a rank among them, unless it is
    overwritten in place.
    """
    if name in os.environ:
        _overwrite(name)
        del os.environ[name]


def _overwrite(name: str) -> None:
    # Only who has a secret there pays for the import.
    import ctypes

    find = ctypes.CDLL(None).getenv
    find.restype = ctypes.c_void_p
    place = find(os.fsencode(name))
    if place:
        ctypes.memset(place, ord("x"), len(ctypes.string_at(place)))


def without_tokens(text: str) -> str:
    """A text for people that somebody has typed, without what may be a token, or most of one."""
    return _MAYBE.sub(HIDDEN, text)


def shown_path(path: str) -> str:
    """A file's path for people, on one line; hidden where it is a token, which was given for its file."""
    if _TOKEN.fullmatch(path):
        return HIDDEN
    return path if path.isprintable() else repr(path)


def refuse_argument(words: Iterable[str]) -> None:
    """Raise SettingError where a command line has ``--token``, which would pass for an abbreviation and be shown."""
    if any(word.partition("=")[0] == "--token" for word in words):
        limit = "every user of this machine can see an argument"
        raise SettingError("--token", HIDDEN, limit, f"use --token-file or {TOKEN_VARIABLE}")
