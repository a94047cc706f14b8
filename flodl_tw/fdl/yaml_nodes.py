"""The nodes of a file of flodl's, each with its place, read as what it has to be.

An alias is the node that it names: the walk is as deep as the tables of known
keys, so nothing is ever expanded.  All faults are SettingErrors of one line
that name the key's path and line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Final, TypeVar

import yaml

from flodl_tw.core.errors import SettingError
from flodl_tw.core.fields import MAX_DIGITS
from flodl_tw.core.log_text import SHOWN_CHARS, shortened, shown
from flodl_tw.core.tokens import MAKE_ONE, parse_token, without_tokens
from flodl_tw.options import Placed

T = TypeVar("T")

TAG: Final = "tag:yaml.org,2002:"
_KINDS: Final = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "seq": "a list",
    "map": "a mapping",
}
_BARE: Final = ("int", "float", "bool")


def safe_text(text: str, quoted: bool = True) -> str:
    """``text`` for an error: one line, not too long, and no token that stands in a wrong place."""
    text = without_tokens(text)
    return shown(text) if quoted or not text.isprintable() else shortened(text, SHOWN_CHARS)


@dataclass(frozen=True, slots=True)
class Location:
    """A place in the file: what each error names.  ``file`` is with the option or variable that named it."""

    file: str
    path: str = ""
    line: int = 1

    def __str__(self) -> str:
        where = f"{self.file}: {self.path}" if self.path else self.file
        return f"{where} (line {self.line})"

    def error(self, limit: str, way_out: str, value: str = "") -> SettingError:
        return SettingError(str(self), value, limit, way_out)

    def below(self, key: str, line: int) -> Location:
        key = key if re.fullmatch(r"[\w-]+", key) and without_tokens(key) == key else safe_text(key)
        return replace(self, path=f"{self.path}.{key}" if self.path else key, line=line)


def line_of(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


@dataclass(frozen=True, slots=True)
class Value:
    """A node and its place, read as what it has to be."""

    location: Location
    node: yaml.Node

    @property
    def scalar(self) -> str | None:
        """The text as it stands in the file; None for a list or a mapping."""
        return self.node.value if isinstance(self.node, yaml.ScalarNode) else None

    @property
    def kind(self) -> str:
        return str(self.node.tag).removeprefix(TAG)

    def error(self, limit: str, way_out: str) -> SettingError:
        if self.scalar is not None:
            value = safe_text(self.scalar, quoted=self.kind not in _BARE)
        else:
            value = "a mapping" if isinstance(self.node, yaml.MappingNode) else "a list"
        return self.location.error(limit, way_out, f"is {value}")

    def _scalar(self, kind: str, way_out: str) -> str:
        if self.scalar is None or self.kind != kind:
            raise self.error(f"it must be {_KINDS[kind]}", way_out)
        return self.scalar

    def text(self) -> str:
        return self._text("str")

    def plain(self) -> str:
        """A text, for which flodl takes a number or true as well: as it stands in the file."""
        return self._text(self.kind if self.kind in _BARE else "str")

    def _text(self, kind: str) -> str:
        text = self._scalar(kind, "write it as a text, in quotes")
        if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
            raise self.error("it has a NUL or half a character", "write it without")
        return text

    def word(self) -> str:
        """What ``plain`` gives, if it is not blank."""
        text = self.plain()
        if not text.strip():
            raise self.error("it must not be blank", "give a text, or drop it")
        return text

    def whole(self) -> int:
        text = self._scalar("int", "give one")
        try:
            return int(text if len(text) <= MAX_DIGITS else "", 0)
        except ValueError:
            raise self.error("it is no whole number that can be read", "give one") from None

    def flag(self) -> bool:
        text = self._scalar("bool", way_out := "write one of the two without quotes").lower()
        if text not in ("true", "false"):
            # An explicit !!bool tag gives any text this kind.
            raise self.error("it must be true or false", way_out)
        return text == "true"

    def share(self) -> float:
        """A part of the host's memory; flodl allows more than the whole, which some platforms under-state."""
        way_out = "give a number that is 0 or more, such as 0.5"
        whole = self.kind == "int"
        text = self._scalar("int" if whole else "float", way_out)
        try:
            number = float(int(text, 0) if whole else text)
        except (ValueError, OverflowError):
            number = math.nan
        if not 0 <= number < math.inf:
            raise self.error("the least is 0, and it must be finite", way_out)
        return number

    def token(self, shown: str = "") -> bytes:
        """The token; a scalar's text as it stands, since 32 decimal digits are a token as well."""
        if self.scalar is None:
            raise self.location.error("it must be a text of 32 hex digits", MAKE_ONE)
        return parse_token(self.scalar, str(self.location), shown)

    def items(self) -> list[Value]:
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.error("it must be a list", "write it as [...], or a line with - for each item")
        place = self.location
        return [
            Value(replace(place, path=f"{place.path}[{index}]", line=line_of(node)), node)
            for index, node in enumerate(self.node.value)
        ]

    def wholes(self, most: int) -> tuple[int, ...]:
        """A list of distinct numbers from 0."""
        numbers: dict[int, None] = {}
        for item in self.items():
            number = item.whole()
            if not 0 <= number <= most:
                raise item.error(f"the limits are 0 and {most}", "give a number between them")
            if number in numbers:
                raise item.error("it is in this list twice", "drop one of the two")
            numbers[number] = None
        return tuple(numbers)

    def entries(self) -> dict[str, Value]:
        """A mapping's values by key; a key that stands there twice is refused."""
        if not isinstance(self.node, yaml.MappingNode):
            # What it is instead may hold the token, in `token:0123` for example.
            kind = _KINDS.get(self.kind, "a value of another kind")
            raise self.location.error(f"it must be a mapping, this is {kind}", "write `key: value` lines under it")
        found: dict[str, Value] = {}
        for key, node in self.node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != f"{TAG}str":
                raise replace(self.location, line=line_of(key)).error("a key must be a text", "put it in quotes")
            location = self.location.below(key.value, line_of(key))
            name = Value(location, key).text()
            if name in found:
                limit = f"the key is there twice, first in line {found[name].location.line}"
                raise location.error(limit, "drop one of the two")
            found[name] = Value(location, node)
        return found

    def block(self, known: Sequence[str]) -> Block:
        """The mapping, if all of its keys are known."""
        found = self.entries()
        for name, value in found.items():
            if name not in known:
                near = get_close_matches(name, known, n=1)
                way_out = f"did you mean {near[0]}?" if near else f"the known ones are {', '.join(known)}"
                raise value.location.error("unknown key", way_out)
        # A key without a value is one that is not given.
        return Block(self.location, {name: value for name, value in found.items() if value.kind != "null"})


@dataclass(frozen=True, slots=True)
class Block:
    """A mapping whose keys are all known."""

    location: Location
    values: Mapping[str, Value]

    def missing(self, name: str, way_out: str) -> SettingError:
        return self.location.below(name, self.location.line).error("it is missing", way_out)

    def need(self, name: str, way_out: str) -> Value:
        if name not in self.values:
            raise self.missing(name, way_out)
        return self.values[name]

    def get(self, name: str, read: Callable[[Value], T]) -> T | None:
        """What ``read`` makes of the value of that name; None where there is none."""
        return read(self.values[name]) if name in self.values else None

    def options(self, readers: Mapping[str, Callable[[Value], object]]) -> dict[str, Placed]:
        """The texts of the options that the keys are, each with its place; None and "" are not given."""
        found = {name: self.get(name, read) for name, read in readers.items()}
        return {
            name.replace("_", "-"): Placed(str(value), str(self.values[name].location))
            for name, value in found.items()
            if value not in (None, "")
        }
