"""JSON from somebody else, read strictly: one object whose keys are known, and no value that hurts."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Final

MAX_DIGITS: Final = 20
"""Digits of a whole number, its sign included; 64 bits need no more."""
SHOWN_CHARS: Final = 64


def shown(value: Any) -> str:
    """A value for an error, short whatever it is; what is nested in it is not looked at."""
    match value:
        case str():
            return repr(value[:SHOWN_CHARS] + "…" if len(value) > SHOWN_CHARS else value)
        case list():
            return f"(a list of {len(value)})"
        case dict():
            return "(an object)"
    return json.dumps(value)


def is_text(value: Any) -> bool:
    """Whether the value is a text that has UTF-8: JSON can spell half a surrogate pair, which has none."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"the number {digits[:MAX_DIGITS]}… has {len(digits)} digits, the limit is {MAX_DIGITS}")
    return int(digits)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {shown(key)} comes twice: name it once")
        found[key] = value
    return found


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_once, parse_int=_whole, parse_constant=_no_number)


def read_object(data: bytes, required: Collection[str], optional: Collection[str] = ()) -> dict[str, Any]:
    """The object that a request's body holds.  Raises ValueError, with a text for people, where it holds another."""
    try:
        value = _DECODER.decode(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError("the body is not UTF-8: send JSON in UTF-8") from None
    except RecursionError:
        raise ValueError("the body is nested too deep: send one object, as the documentation has it") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"the body is {shown(value)}: send a JSON object")
    known = [*required, *optional]
    for key in value:
        if key not in known:
            raise ValueError(f"the key {shown(key)} is not known: the keys are {', '.join(known)}")
    for key in required:
        if key not in value:
            raise ValueError(f"the key {key!r} is missing: these must be there: {', '.join(required)}")
    return value
