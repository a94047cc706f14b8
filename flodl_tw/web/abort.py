"""``POST /abort``: the operator ends the run, whatever it is doing.  Its refusals in their order, and its answer."""

from __future__ import annotations

from typing import Any, Final

from flodl_tw.core.fields import Fields, decode_object, shown
from flodl_tw.core.window import Phase
from flodl_tw.limits import MAX_REASON_BYTES
from flodl_tw.run import Run
from flodl_tw.web.access import ABORT, Attempt, DeclinedError, authorise

NO_REASON: Final = "no reason given"


def abort_run(run: Run, attempt: Attempt, own_names: frozenset[str], body: bytes) -> dict[str, Any]:
    """End the run; gives the answer.  Raises DeclinedError where it may not, or cannot."""
    authorise(ABORT, attempt, run.session_salt.hex(), own_names, needs_token=not attempt.from_loopback)
    try:
        reason = read_reason(body)
    except ValueError as error:
        raise DeclinedError(400, str(error)) from None
    if run.phase in (Phase.DONE, Phase.FAILED):
        raise DeclinedError(409, f"the run is {run.phase.value} already: an abort would change nothing")
    run.abort(reason, attempt.address)
    return {"aborted": True, "joined_hosts": run.ledger.joined_hosts}


def read_reason(body: bytes) -> str:
    """The reason that a body gives, or ours where it is empty.  Raises ValueError with a text for people."""
    if not body:
        return NO_REASON
    fields = Fields(decode_object(body, "the body"))
    fields.only(("reason",))
    text = fields.text("reason")
    if not text.strip():
        raise ValueError(f"reason {shown(text)}: it is blank; say why, or send an empty body")
    size = len(text.encode("utf-8"))
    if size > MAX_REASON_BYTES:
        raise ValueError(f"reason {shown(text)}: it has {size} bytes, the limit is {MAX_REASON_BYTES}; shorten it")
    if not text.isprintable():
        raise ValueError(f"reason {shown(text)}: it has characters that do not print; leave them out")
    return text
