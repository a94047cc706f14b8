"""The join window of one run, while hosts may enter: who is in, who was refused, and how much time is left."""

from __future__ import annotations

from collections.abc import Callable

from flodl_tw.core.facts import Offer
from flodl_tw.core.ledger import Ledger, Member
from flodl_tw.core.log_text import quoted
from flodl_tw.core.phrases import counted, goal
from flodl_tw.core.refusals import Refusal, RefusalCode, RefusedHosts
from flodl_tw.core.run_settings import RunSettings
from flodl_tw.core.window import (
    Failed,
    Formed,
    Phase,
    Standing,
    Verdict,
    countdown,
    open_phase,
    verdict,
)


class JoinWindow:
    """Admits or refuses, and says what the verdict is.  ``seconds`` is a monotonic clock."""

    def __init__(self, settings: RunSettings, seconds: Callable[[], float]) -> None:
        self.settings = settings.window
        self.ledger = Ledger(nccl=settings.nccl, dataset_sig=settings.dataset_sig, model_sig=settings.model_sig)
        self.armed = False
        """Whether the operator has started the run."""
        self.refused = 0
        """Refusals that count toward ``max_rejects``."""
        self.refused_hosts = RefusedHosts()
        """The hosts refused last."""
        self._seconds = seconds
        self._opened = seconds()

    def open(self) -> None:
        self._opened = self._seconds()

    @property
    def elapsed(self) -> float:
        return self._seconds() - self._opened

    @property
    def phase(self) -> Phase:
        return open_phase(self.settings, self._standing())

    def verdict(self) -> Verdict:
        return verdict(self.settings, self._standing())

    def refusal(self, offer: Offer) -> Refusal | None:
        """Why the offer would be refused now, or None.  Changes nothing."""
        standing = self._standing()
        due = verdict(self.settings, standing)
        if due is None:
            return self.ledger.refusal(offer, standing.elapsed)
        # What closes the window may have happened in this very turn, whose end takes the verdict.
        return closed(Phase.FORMING if isinstance(due, Formed) else Phase.FAILED)

    def refuse(self, offer: Offer, refusal: Refusal) -> bool:
        """Note a refusal; gives whether it may change the verdict."""
        self.refused_hosts.add(quoted(offer.hello.host), offer.address, refusal, self.elapsed)
        # A host that comes too late says nothing about the fleet, and must not fail a window with a quorum.
        counts = refusal.code is not RefusalCode.WINDOW_CLOSED
        self.refused += counts
        return counts

    def enter(self, offer: Offer) -> Member:
        return self.ledger.enter(offer, self.elapsed)

    def why_failed(self, failed: Failed) -> str:
        """The reason of a verdict, with the hosts that were refused meanwhile."""
        return failed.why + self.refused_hosts.told()

    def secs_to_deadline(self) -> float:
        """Seconds until the clock alone may change the verdict."""
        settings, elapsed = self.settings, self.elapsed
        return max(0.0, (settings.window_secs if elapsed < settings.window_secs else settings.cap_secs) - elapsed)

    def cap_remaining(self) -> int:
        """Whole seconds left of the hard cap: how long a member may have to wait for its world."""
        return countdown(self.settings.cap_secs, self.elapsed) or 0

    def countdowns(self) -> tuple[int | None, int | None]:
        """Whole seconds left of the window and of its hard cap; None for what is past."""
        elapsed = self.elapsed
        return countdown(self.settings.window_secs, elapsed), countdown(self.settings.cap_secs, elapsed)

    def progress(self) -> str:
        settings = self.settings
        return (
            f"{counted(self.ledger.joined_ranks, 'rank')} in ({goal(settings.min_rank_start, settings.target_ranks)})"
        )

    def _standing(self) -> Standing:
        return Standing(self.ledger.joined_ranks, self.elapsed, self.armed, self.refused)


def closed(phase: Phase) -> Refusal:
    return Refusal(
        RefusalCode.WINDOW_CLOSED,
        f"the run is {phase.value}, and its membership is settled: wait for the next run, if there is one",
    )
