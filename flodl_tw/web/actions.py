"""What the operator may do by HTTP: ``POST /start``, ``/abort`` and ``/check``.

Each has its refusals in their order, a DeclinedError each, and its answer;
whether the request may do it at all has been asked before.
"""

from __future__ import annotations

from typing import Final

from flodl_tw.core.facts import Offer
from flodl_tw.core.fields import Fields, decode_object
from flodl_tw.core.ledger import unspoken_version
from flodl_tw.core.log_text import shown
from flodl_tw.core.window import Phase, StartMode
from flodl_tw.limits import MAX_REASON_BYTES
from flodl_tw.run import Run
from flodl_tw.web.access import DeclinedError
from flodl_tw.web.hello_json import hello_from_json

NO_REASON: Final = "no reason given"


def start_run(run: Run, address: str, body: bytes) -> dict[str, object]:
    """Close the window with the ranks that are in; a body says nothing more."""
    window = run.settings.window
    if window.start_mode is StartMode.AUTO:
        raise DeclinedError(
            409,
            "the start mode is auto, so the window closes by its target or its time: "
            "run the controller with --start manual or --start hybrid to start it by hand",
        )
    if not run.is_open:
        raise DeclinedError(409, f"the window is not open: the run is {run.phase.value}")
    joined = run.ledger.joined_ranks
    if joined < window.min_rank_start:
        raise DeclinedError(409, f"quorum not met: {joined} of {window.min_rank_start} ranks have joined")
    run.arm(address)
    return {"armed": True, "joined_ranks": joined, "min_rank_start": window.min_rank_start}


def abort_run(run: Run, address: str, body: bytes) -> dict[str, object]:
    """End the run, whatever it is doing."""
    try:
        reason = read_reason(body)
    except ValueError as error:
        raise DeclinedError(400, str(error)) from None
    if run.phase in (Phase.DONE, Phase.FAILED):
        raise DeclinedError(409, f"the run is {run.phase.value} already: an abort would change nothing")
    run.abort(reason, address)
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


def check_hello(run: Run, address: str, body: bytes) -> dict[str, object]:
    """What the hello in ``body`` would be answered now, by the admission itself, which it leaves as it was."""
    try:
        hello, version = hello_from_json(body)
    except ValueError as error:
        raise DeclinedError(400, str(error)) from None
    offer = Offer(hello, version, address)
    refusal = unspoken_version(version) or run.refusal(offer)
    if refusal is None:
        return {"admitted": True, "ranks": list(run.ledger.next_ranks(offer))}
    return {
        "admitted": False,
        "word": refusal.code.value,
        "retry": refusal.code.retry,
        "reason": refusal.reason,
    }
