"""Measures an HTTP request before anybody parses it.

Twisted's own limits come late or close without an answer; this looks at sizes
alone, and at the two headers that decide whether a request is taken at all.
No Twisted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_to_bytes

from flodl_tw.core.ends import ConnectionEnd
from flodl_tw.core.fields import compact
from flodl_tw.limits import MAX_BODY, MAX_CHECK_BODY, MAX_HEAD, MAX_START_LINE

PHRASES: Final = {
    400: "Bad Request",
    413: "Content Too Large",
    414: "URI Too Long",
    431: "Request Header Fields Too Large",
}


@dataclass(frozen=True, slots=True)
class Unfit:
    """A request that is not taken: the status code and what to tell the client."""

    code: int
    error: str

    @property
    def end(self) -> ConnectionEnd:
        """How its connection is counted to have ended."""
        return ConnectionEnd[f"HTTP_{self.code}"]

    def response(self, *, head_only: bool = False) -> bytes:
        """The whole answer, for a connection that closes after it; HEAD gets no body."""
        body = compact({"error": self.error}).encode()
        head = (
            f"HTTP/1.1 {self.code} {PHRASES[self.code]}\r\n"
            "Content-Type: application/json\r\n"
            "Cache-Control: no-cache\r\n"
            "Access-Control-Allow-Origin: *\r\n"
            "Connection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode("ascii") + (b"" if head_only else body)


def body_too_large(limit: int) -> Unfit:
    """The refusal of a body over its limit."""
    return Unfit(413, f"the request's body is over the limit of {limit} bytes")


def body_limit(start_line: bytes) -> int:
    """Bytes that the body of a request may have: one path takes a hello, spelled as it is here."""
    target = start_line.split(b" ")[1:2]
    return MAX_CHECK_BODY if target and target[0].partition(b"?")[0] == b"/check" else MAX_BODY


class RequestGate:
    """Holds a request's head back until it is whole and fit to be parsed."""

    __slots__ = ("_head", "max_body", "open")

    def __init__(self) -> None:
        self._head = b""
        self.open = False
        """Whether the head has passed; from then on bytes go through."""
        self.max_body = MAX_BODY
        """Bytes that the body may have, once the head has passed."""

    @property
    def is_head(self) -> bool:
        """Whether the request that was refused is a HEAD."""
        return self._head.startswith(b"HEAD ")

    def feed(self, data: bytes) -> bytes | Unfit:
        """Bytes to pass on (none while the head is not whole), or why the request is unfit."""
        if self.open:
            return data
        self._head += data
        start_line, line_end, _ = self._head.partition(b"\n")
        if line_end and not start_line.endswith(b"\r"):
            return Unfit(400, "the lines of a request end in CR LF")
        if len(start_line.removesuffix(b"\r")) > MAX_START_LINE:
            return Unfit(414, f"the request line is over the limit of {MAX_START_LINE} bytes")
        blank = self._head.find(b"\r\n\r\n")
        end = blank + 4 if blank >= 0 else 0
        if max(end, 0 if end else len(self._head)) > MAX_HEAD:
            return Unfit(431, f"the request's head is over the limit of {MAX_HEAD} bytes")
        if not end:
            return b""
        unfit = check_head(self._head[:end])
        if unfit is not None:
            return unfit
        passed, self._head = self._head, b""
        self.max_body = body_limit(start_line)
        self.open = True
        return passed


def check_head(head: bytes) -> Unfit | None:
    """What is wrong with a whole head, before it is parsed."""
    start, *lines = head.split(b"\r\n")
    limit = body_limit(start)
    try:
        unquote_to_bytes(start).decode("utf-8")
    except UnicodeDecodeError:
        return Unfit(400, "the request line is not UTF-8")
    names = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
    if sum(name == b"host" for name, _ in names) > 1:
        return Unfit(400, "the request has more than one Host")
    for name, value in names:
        if name == b"content-length" and value.isdigit() and (len(value) > 9 or int(value) > limit):
            return body_too_large(limit)
    return None
