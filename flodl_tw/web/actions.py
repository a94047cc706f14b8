"""``POST /start``: the operator closes the window.  Its refusals in their order, and what it answers."""

from __future__ import annotations

from typing import Any

from flodl_tw.core.window import StartMode
from flodl_tw.run import Run
from flodl_tw.web.access import START, Attempt, DeclinedError, authorise


def start_run(run: Run, attempt: Attempt, own_names: frozenset[str]) -> dict[str, Any]:
    """Start the run; gives the answer.  Raises DeclinedError where it may not, or cannot."""
    authorise(START, attempt, run.session_salt.hex(), own_names, needs_token=not attempt.from_loopback)
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
    run.arm(attempt.address)
    return {"armed": True, "joined_ranks": joined, "min_rank_start": window.min_rank_start}
