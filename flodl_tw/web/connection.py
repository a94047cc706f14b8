"""Requests as the endpoints read them, and answers as they write them."""

from __future__ import annotations

import io
from typing import Any, Final

from twisted.protocols.basic import FileSender

from flodl_tw.core.addresses import classify
from flodl_tw.core.views import compact
from flodl_tw.web.access import Attempt

STREAMED: Final = 64 * 1024
"""Answers of more bytes than this leave in parts, so that a client that does not read holds one part."""


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")


def _only(request: Any, name: bytes, worst: str) -> str | None:
    """A header's value, or the worst one where it came more than once."""
    values = request.requestHeaders.getRawHeaders(name, [])
    return worst if len(values) > 1 else _text(values[0] if values else None)


def attempt_of(request: Any) -> Attempt:
    """What of a request decides whether it may act."""
    tokens = [token.decode("utf-8", "replace") for token in request.args.get(b"token", ())]
    scheme, _, credential = (_text(request.getHeader(b"authorization")) or "").partition(" ")
    if scheme.lower() == "bearer":
        tokens.append(credential.strip())
    return Attempt(
        address=classify(request.getClientAddress().host).shown,
        host=_text(request.getHeader(b"host")),
        origin=_only(request, b"origin", "null"),
        fetch_site=_only(request, b"sec-fetch-site", "cross-site"),
        tokens=tuple(tokens),
    )


async def answer(request: Any, code: int, body: bytes, content_type: bytes = b"application/json") -> bytes | None:
    """Write an answer with the headers that all of them have."""
    request.setResponseCode(code)
    for name, value in (
        (b"content-type", content_type),
        (b"cache-control", b"no-cache"),
        (b"access-control-allow-origin", b"*"),
        (b"content-length", b"%d" % len(body)),
    ):
        request.setHeader(name, value)
    if len(body) <= STREAMED or request.method == b"HEAD":
        return body
    try:
        await FileSender().beginFileTransfer(io.BytesIO(body), request)
    except Exception:
        # The client went away in the middle; FileSender has no narrower word for it.
        request.unregisterProducer()
    return None


def answer_json(request: Any, code: int, value: dict[str, Any]) -> Any:
    """Answer with an object."""
    return answer(request, code, compact(value).encode())
