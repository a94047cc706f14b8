"""JSON from somebody else, read strictly: one object, and each of its fields checked as it is taken.

A fault is one line that names the key, the value (short) and the limit.
"""

from __future__ import annotations

import binascii
import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from flodl_tw.core.log_text import shown

T = TypeVar("T")

MAX_DIGITS: Final = 20
"""Digits of a whole number, its sign included; 64 bits need no more."""
MAX_DEPTH: Final = 64
"""Lists and objects inside each other."""
MAX_COUNT: Final = 10**18 - 1
MAX_U32: Final = (1 << 32) - 1

_SURROGATE = re.compile("[\ud800-\udfff]")
_HEX = re.compile("[0-9a-fA-F]*")


class ShapeError(ValueError):
    """JSON that is not what it should be; the text is for people."""


def decode_object(data: bytes | str, what: str) -> dict[str, object]:
    """The object that JSON from somebody else holds; ``what`` names it in a ShapeError, which shows no value."""
    try:
        value = _DECODER.decode(data if isinstance(data, str) else data.decode("utf-8"))
        too_deep = _is_deeper(value, MAX_DEPTH)
    except UnicodeDecodeError:
        raise ShapeError(f"{what} is not UTF-8: send JSON in UTF-8") from None
    except RecursionError:
        too_deep = True
    except json.JSONDecodeError as error:
        raise ShapeError(f"{what} is not JSON: {error}") from None
    except ValueError as error:
        raise ShapeError(f"{what} cannot be read: {error}") from None
    if too_deep:
        raise ShapeError(f"{what} is nested deeper than {MAX_DEPTH}")
    if not isinstance(value, dict):
        raise ShapeError(f"{what} is not an object of JSON")
    return value


def decode_hex_object(text: str, what: str) -> dict[str, object]:
    try:
        data = binascii.unhexlify(text)
    except ValueError:
        raise ShapeError(f"{what} is not hex") from None
    return decode_object(data, what)


def _whole(digits: str) -> int:
    # Its digits are not shown: they may be a secret that lacks its quotes.
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits, the limit is {MAX_DIGITS}")
    return int(digits)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is NaN, or larger than any that can be used")
    return number


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {shown(key)} comes twice: name it once")
        found[key] = value
    return found


def _is_deeper(value: object, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_is_deeper(item, depth - 1) for item in inner)


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_once, parse_int=_whole, parse_float=_finite, parse_constant=_finite
)


@dataclass(frozen=True, slots=True)
class Fields:
    """Reads the fields of an object; what is wrong with one is a ShapeError.

    ``prefix`` stands before a key in errors, such as ``the envelope's ``.
    With ``shows`` off, no error shows a value.
    """

    values: Mapping[str, object]
    prefix: str = ""
    shows: bool = True

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def only(self, required: Collection[str], optional: Collection[str] = ()) -> None:
        """Check that these keys are there, and that no others are than the optional ones."""
        known = [*required, *optional]
        for key in self.values:
            if key not in known:
                raise ShapeError(f"the key {shown(key)} is not known: the keys are {', '.join(known)}")
        for key in required:
            if key not in self:
                raise ShapeError(f"the key {key!r} is missing: these must be there: {', '.join(required)}")

    def wrong(self, key: str, limit: str) -> ShapeError:
        said = ""
        if key not in self:
            said = " is missing: it"
        elif self.shows:
            said = f" {shown(self.values[key])}: it"
        return ShapeError(f"{self.prefix}{key}{said} must be {limit}")

    def optional(self, key: str, read: Callable[[str], T]) -> T | None:
        """What ``read`` makes of the key, or None where it is absent or null."""
        return None if self.values.get(key) is None else read(key)

    def text(self, key: str) -> str:
        value = self.values.get(key)
        # JSON can spell half a surrogate pair, which has no UTF-8.
        if not isinstance(value, str) or _SURROGATE.search(value):
            raise self.wrong(key, "a text, in characters that UTF-8 has")
        return value

    def whole(self, key: str, least: int = 0, most: int = MAX_COUNT) -> int:
        value = self.values.get(key)
        # A bool is an int to Python, and a 1.0 equals one.
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(key, f"a whole number from {least} to {most}")
        return value

    def number(self, key: str) -> int | float:
        value = self.values.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(key, "a number")
        return value

    def flag(self, key: str) -> bool:
        """True or false; false where there is none."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def from_hex(self, key: str, size: int) -> bytes:
        """The ``size`` bytes that a text of hex digits stands for."""
        value = self.values.get(key)
        if not isinstance(value, str) or len(value) != 2 * size or not _HEX.fullmatch(value):
            raise self.wrong(key, f"{2 * size} hex digits")
        return bytes.fromhex(value)

    def texts(self, key: str) -> tuple[str, ...]:
        items = self._items(key, "texts")
        return tuple(map(items.text, items.values))

    def wholes(self, key: str, least: int = 0, most: int = MAX_COUNT, count: int | None = None) -> tuple[int, ...]:
        """A list of whole numbers in the range, ``count`` of them where that is given."""
        limit = f"{'' if count is None else f'{count} '}whole numbers from {least} to {most}"
        items = self._items(key, limit)
        if count not in (None, len(items.values)):
            raise self.wrong(key, f"a list of {limit}")
        return tuple(items.whole(name, least, most) for name in items.values)

    def child(self, key: str) -> Fields:
        value = self.values.get(key)
        if not isinstance(value, dict):
            # Its value is not shown: anything may be in it.
            said = "must be" if key in self else "is missing: it must be"
            raise ShapeError(f"{self.prefix}{key} {said} an object")
        return Fields(value, f"{self.prefix}{key}.", self.shows)

    def children(self, key: str) -> list[Fields]:
        items = self._items(key, "objects")
        return list(map(items.child, items.values))

    def _items(self, key: str, limit: str) -> Fields:
        """The items of a list, each with the name that it has in errors."""
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, f"a list of {limit}")
        return Fields({f"{key}[{place}]": item for place, item in enumerate(value)}, self.prefix, self.shows)


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def compact(value: object) -> str:
    """JSON without blanks, text as it is, the way the reference writes it."""
    return _ENCODER.encode(value)
