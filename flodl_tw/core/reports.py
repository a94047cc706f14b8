"""What a rank said of its own death: the exception that it left in its error file, on its way to the operator.

Under torch's ``@record`` a rank writes its exception as JSON to the file that
``TORCHELASTIC_ERROR_FILE`` names.  Our agent reads it and sends a frame of our
own kind up the control link, where the envelope said that it is taken.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Final

from flodl_tw.core.errors import WireError
from flodl_tw.core.fields import MAX_U32, Fields, ShapeError, decode_object

MAX_ERROR_FILE: Final = 4 << 20
"""Bytes of an error file that are read; a traceback is some KiB."""
MOST_CHARS: Final = {"type": 120, "message": 580, "line": 300}
"""What is kept of each text: a thousand characters, which fit the frame with four bytes of UTF-8 each."""
CODE_INDENT: Final = "    "
_FRAME = re.compile(r'\s*File "(?P<file>[^"\n]*)", line (?P<number>[0-9]+), in (?P<name>.*)')
_TRACEBACK = "Traceback (most recent call last)"
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
"""A terminal's colours."""
_RANK = re.compile(r"^\[rank[0-9]+\]: ?")
"""What torch writes before each line."""
_NAMED = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: ?(?P<message>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RankError:
    """An exception: its type, its message, and the last line of its traceback, each short and printable."""

    type: str
    message: str
    line: str

    @property
    def text(self) -> str:
        said = f"{self.type}: {self.message}" if self.message else self.type
        return f"{said}, at {self.line}" if self.line else said


def tidy(name: str, text: str) -> str:
    """A text in one printable line, cut to what is kept of it."""
    line = " ".join(text.split())
    line = line if line.isprintable() else "".join(char if char.isprintable() else "?" for char in line)
    most = MOST_CHARS[name]
    return line if len(line) <= most else line[: most - 1] + "…"


def read_error_file(data: bytes) -> RankError | None:
    """The exception in an error file, or None where there is none that can be read."""
    try:
        told = decode_object(data.decode("utf-8", "replace"), "it").get("message")
    except ShapeError:
        return None
    stack = ""
    if isinstance(told, dict):
        extra = told.get("extraInfo")
        stack = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
        told = told.get("message")
    if not isinstance(told, str):
        return None
    named = _NAMED.fullmatch(told.strip())
    kind, message = (named["type"], named["message"] or "") if named else ("error", told)
    where = last_line(stack) if isinstance(stack, str) else ""
    return RankError(tidy("type", kind), tidy("message", message), tidy("line", where))


def last_line(stack: str) -> str:
    """``file:line in name: code`` of the innermost frame of a traceback's text; empty where there is none."""
    lines = stack.splitlines()
    for place in range(len(lines) - 1, -1, -1):
        found = _FRAME.fullmatch(lines[place])
        if found is not None:
            # Without its source a frame has no line of code, and the next line is the exception or another frame.
            code = lines[place + 1] if place + 1 < len(lines) else ""
            code = code.strip() if code.startswith(CODE_INDENT) else ""
            return f"{found['file']}:{found['number']} in {found['name']}" + (f": {code}" if code else "")
    return ""


def last_words(errors: bytes) -> RankError | None:
    """What the end of a rank's standard error says: the exception of its last traceback, else its last line."""
    text = _ESCAPE.sub("", errors.decode("utf-8", "replace"))
    lines = [_RANK.sub("", line, count=1) for line in re.split(r"[\r\n]+", text) if line.strip()]
    if not lines:
        return None
    begins = [place for place, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    stack = lines[begins[-1] + 1 :] if begins else []
    raised = next((line for line in stack if not line.startswith(" ")), None)
    named = None if raised is None else _NAMED.fullmatch(raised)
    if named is None:
        return RankError("its last line", tidy("message", lines[-1]), "")
    where = last_line("\n".join(stack[: stack.index(named[0])]))
    return RankError(tidy("type", named["type"]), tidy("message", named["message"] or ""), tidy("line", where))


def report_payload(rank: int, error: RankError) -> bytes:
    """The frame's payload; ``rank`` as the agent's Accept named it."""
    return json.dumps({"rank": rank, **asdict(error)}, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "replace"
    )


def read_report(payload: bytes) -> tuple[int, RankError]:
    """The rank and its exception; WireError where the payload holds none."""
    try:
        fields = Fields(decode_object(payload, "it"))
        fields.only(("rank", *MOST_CHARS))
        texts = {name: tidy(name, fields.text(name)) for name in MOST_CHARS}
        return fields.whole("rank", 0, MAX_U32), RankError(**texts)
    except ShapeError as error:
        raise WireError(f"a rank's report cannot be read: {error}") from None
