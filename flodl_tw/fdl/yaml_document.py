"""A file of flodl's as a tree of nodes; PyYAML's parser stays here.

YAML is read as flodl reads it (1.2: ``no`` is a text, ``010`` too), and JSON is
YAML enough.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import replace
from typing import Final

import yaml

from flodl_tw.core.errors import SettingError
from flodl_tw.core.tokens import shown_path
from flodl_tw.fdl.yaml_nodes import TAG, Location, Value, line_of, safe_text

MAX_BYTES: Final = 16 << 20
"""A roster of 5,000 hosts is a tenth of it."""
MAX_DEPTH: Final = 64


class _Loader(yaml.SafeLoader):
    """Nodes as flodl's parser makes them: YAML 1.2's scalars, tabs between tokens; and no nest without a bottom."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, f"it is nested deeper than {MAX_DEPTH}", mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def scan_to_next_token(self) -> None:
        super().scan_to_next_token()
        while self.peek() == "\t" and (self.flow_level or not self.allow_simple_key):
            self.forward()
            super().scan_to_next_token()


for _kind, _pattern in (
    ("null", r"(?:~|null|Null|NULL|)"),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*|0x[0-9a-fA-F]+|0o[0-7]+|0b[01]+)"),
    (
        "float",
        r"[-+]?(?:\.inf|\.Inf|\.INF|(?!0[0-9]+\Z)(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)|\.nan|\.NaN|\.NAN",
    ),
):
    _Loader.add_implicit_resolver(TAG + _kind, re.compile(rf"(?:{_pattern})\Z"), None)


def read_document(path: str, option: str, block: str) -> Value:
    """The one document of a file that ``option`` names; ``block`` is what is wanted of it."""
    file = shown_path(path)
    try:
        raw = _read(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise SettingError(option, file, f"it cannot be read ({why})", "check the path and its owner") from None
    if len(raw) > MAX_BYTES:
        limit = f"it is larger than {MAX_BYTES} bytes"
        raise SettingError(option, file, limit, f"name the fdl.yml, or its {block} block alone")
    start = Location(f"{option} {file}")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise replace(start, line=line).error("it is not UTF-8", "save it as UTF-8") from None
    node = _compose(text, start)
    if node is None or node.tag == f"{TAG}null":
        raise SettingError(option, file, "it is empty", f"name a file with a {block}: block")
    return Value(replace(start, line=line_of(node)), node)


def _read(path: str) -> bytes:
    """The bytes of a regular file, as many as may be and one more; a pipe without a writer is not waited for."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)

    with open(path, "rb", opener=opener) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        return stream.read(MAX_BYTES + 1)


def _compose(text: str, start: Location) -> yaml.Node | None:
    line = 1
    try:
        node: yaml.Node | None = _Loader(text).get_single_node()
        return node
    except yaml.reader.ReaderError as error:
        problem = f"it has the character #x{error.character:04x}"
        line = text.count("\n", 0, error.position) + 1
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem, line = safe_text(f"{error.problem}", quoted=False), mark.line + 1 if mark else 1
    except (ValueError, OverflowError):
        problem = "an escape in it names no character"
    # A tag's handle is a text of the file's.
    problem = re.sub("'!.*'", "(not shown)", problem)
    raise replace(start, line=line).error(f"it is neither YAML nor JSON: {problem}", "correct that line")
