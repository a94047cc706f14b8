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
from flodl_tw.core.log_text import SHOWN_CHARS, shortened, shown
from flodl_tw.core.tokens import without_tokens

T = TypeVar("T")

KNOWN_KEYS: Final[Mapping[str, tuple[str, str]]] = {
    # level: the keys that are used; flodl's others, which are accepted and unused
    "cluster": ("controller workers gpu_ram_share", "env"),
    "controller": ("host port join", "path docker arch data_path"),
    "join": (
        "min_rank_start target_ranks join_timeout max_join_timeout start discovery open_admission token tunnel_only",
        "",
    ),
    "worker": (
        "host ranks local_devices nccl_socket_ifname path arch data_path gpu_ram_share tunnel",
        "ssh docker env",
    ),
    "ssh": ("", "target port user identity_file options"),
}
TAG: Final = "tag:yaml.org,2002:"
_KINDS: Final = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "seq": "a list",
    "map": "a mapping",
}


def known_keys(level: str) -> list[str]:
    """The keys that a level of the cluster file may have."""
    return " ".join(KNOWN_KEYS[level]).split()


def safe_text(text: str, quoted: bool = True) -> str:
    """``text`` for an error: one line, not too long, and no token that stands in a wrong place."""
    text = without_tokens(text)
    return shown(text) if quoted or not text.isprintable() else shortened(text, SHOWN_CHARS)


@dataclass(frozen=True, slots=True)
class Location:
    """A place in the file: what each error names."""

    file: str
    path: str
    line: int
    option: str = "--cluster"
    """The option or variable that named the file."""

    def __str__(self) -> str:
        where = f"{self.file}: {self.path}" if self.path else self.file
        return f"{self.option} {where} (line {self.line})"

    def error(self, limit: str, way_out: str, value: str | None = None) -> SettingError:
        return SettingError(str(self), "" if value is None else f"is {value}", limit, way_out)

    def below(self, key: str, node: yaml.Node) -> Location:
        key = key if re.fullmatch(r"[\w-]+", key) and without_tokens(key) == key else safe_text(key)
        return replace(self, path=f"{self.path}.{key}" if self.path else key).at(node)

    def item(self, index: int, node: yaml.Node) -> Location:
        return replace(self, path=f"{self.path}[{index}]").at(node)

    def at(self, node: yaml.Node) -> Location:
        return replace(self, line=node.start_mark.line + 1)


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

    @property
    def value(self) -> str:
        if isinstance(self.node, yaml.ScalarNode):
            return safe_text(self.node.value, self.kind not in ("int", "float", "bool"))
        return "a mapping" if isinstance(self.node, yaml.MappingNode) else "a list"

    def error(self, limit: str, way_out: str) -> SettingError:
        return self.location.error(limit, way_out, self.value)

    def _scalar(self, kind: str, way_out: str) -> str:
        if not isinstance(self.node, yaml.ScalarNode) or self.kind != kind:
            raise self.error(f"it must be {_KINDS[kind]}", way_out)
        return str(self.node.value)

    def text(self) -> str:
        return self._of_kind("str")

    def plain(self) -> str:
        """A text, for which flodl takes a number or true as well: as it stands in the file."""
        return self._of_kind(self.kind if self.kind in ("int", "float", "bool") else "str")

    def _of_kind(self, kind: str) -> str:
        text = self._scalar(kind, "write it as a text, in quotes")
        if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
            raise self.error("it has a NUL or half a character", "write it without")
        return text

    def word(self) -> str:
        """A text that is not blank."""
        text = self.text()
        if not text.strip():
            raise self.error("it must not be blank", "give a text")
        return text

    def whole(self, least: int, most: int) -> int:
        way_out = f"give one from {least} to {most}"
        text = self._scalar("int", way_out)
        try:
            number = int(text, 0)
        except ValueError:
            raise self.error("it is no whole number that can be read", way_out) from None
        if not least <= number <= most:
            raise self.error(f"the limits are {least} and {most}", "give a number between them")
        return number

    def flag(self) -> bool:
        way_out = "write one of the two without quotes"
        text = self._scalar("bool", way_out).lower()
        if text not in ("true", "false"):
            # An explicit !!bool tag gives any text this kind.
            raise self.error("it must be true or false", way_out)
        return text == "true"

    def share(self) -> float:
        """A part of the host's memory; flodl allows more than the whole, which some platforms under-state."""
        way_out = "give a number that is 0 or more, such as 0.5"
        text = self._scalar("int" if self.kind == "int" else "float", way_out)
        try:
            number = float(int(text, 0) if self.kind == "int" else text)
        except (ValueError, OverflowError):
            raise self.error("it is no number that can be used", way_out) from None
        if not math.isfinite(number) or number < 0:
            raise self.error("the least is 0, and it must be finite", way_out)
        return number

    def items(self) -> list[Value]:
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.error("it must be a list", "write it as [...], or a line with - for each item")
        return [Value(self.location.item(index, node), node) for index, node in enumerate(self.node.value)]

    def wholes(self, least: int, most: int) -> tuple[int, ...]:
        """A list of distinct numbers."""
        numbers: dict[int, None] = {}
        for item in self.items():
            number = item.whole(least, most)
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
                raise self.location.at(key).error("a key must be a text", "put it in quotes")
            location = self.location.below(key.value, key)
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
                raise value.location.error("unknown key", _nearest(name, known))
        # A key without a value is one that is not given.
        return Block(self.location, {name: value for name, value in found.items() if value.kind != "null"})


def _nearest(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"the known ones are {', '.join(known)}"


@dataclass(frozen=True, slots=True)
class Block:
    """A mapping whose keys are all known."""

    location: Location
    values: Mapping[str, Value]

    def missing(self, name: str, way_out: str) -> SettingError:
        path = f"{self.location.path}.{name}" if self.location.path else name
        return replace(self.location, path=path).error("it is missing", way_out)

    def need(self, name: str, way_out: str) -> Value:
        if name not in self.values:
            raise self.missing(name, way_out)
        return self.values[name]

    def get(self, name: str, read: Callable[[Value], T]) -> T | None:
        """What ``read`` makes of the value of that name; None where there is none."""
        return read(self.values[name]) if name in self.values else None

    def whole(self, name: str, least: int, most: int) -> int | None:
        return self.get(name, lambda value: value.whole(least, most))

    def child(self, level: str) -> Block:
        """The block of that name, which is the name of its table of keys; an absent one is empty."""
        absent = Block(replace(self.location, path=f"{self.location.path}.{level}"), {})
        return self.get(level, lambda value: value.block(known_keys(level))) or absent
