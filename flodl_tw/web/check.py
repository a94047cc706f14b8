"""``POST /check``: would this hello be admitted?  Answered by the admission itself, which it leaves as it was."""

from __future__ import annotations

from typing import Any

from flodl_tw.core.facts import Offer
from flodl_tw.core.ledger import unspoken_version
from flodl_tw.run import Run
from flodl_tw.web.access import CHECK, Attempt, DeclinedError, authorise
from flodl_tw.web.hello_json import hello_from_json


def check_hello(
    run: Run, credentialed: bool, attempt: Attempt, own_names: frozenset[str], body: bytes
) -> dict[str, Any]:
    """What the hello in ``body`` would be answered now.  Raises DeclinedError where nobody is told.

    A hello needs the token wherever it comes from, and so does this.
    """
    authorise(CHECK, attempt, run.session_salt.hex(), own_names, needs_token=credentialed)
    try:
        hello, version = hello_from_json(body)
    except ValueError as error:
        raise DeclinedError(400, str(error)) from None
    offer = Offer(hello, version, attempt.address)
    refusal = unspoken_version(version) or run.refusal(offer)
    if refusal is None:
        return {"admitted": True, "ranks": list(run.ledger.next_ranks(offer))}
    return {
        "admitted": False,
        "word": refusal.code.value,
        "retry": refusal.code.retry,
        "reason": refusal.reason,
    }
