"""The join window of one run, while hosts may enter: who is in, who was refused, and how much time is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

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

MAX_KNOWN_REFUSED: Final = 1 << 17
"""Refused hosts that are told from new ones, so that memory has a bound whatever ``max_rejects`` is."""


class JoinWindow:
    """Admits or refuses, and says what the verdict is.  ``seconds`` is a monotonic clock."""

    def __init__(self, settings: RunSettings, seconds: Callable[[], float]) -> None:
        self.settings = settings.window
        self.ledger = Ledger(
            nccl=settings.nccl,
            dataset_sig=settings.dataset_sig,
            model_sig=settings.model_sig,
            most_ranks=settings.window.most_ranks,
        )
        self.armed = False
        """Whether the operator has started the run."""
        self.refused = 0
        """Hosts that count toward ``max_rejects``."""
        self.unheard: Counter[str] = Counter()
        """Dials that were closed without a word, by what was wrong with them."""
        self.refused_hosts = RefusedHosts()
        """The hosts refused last."""
        self._refused: set[int] = set()
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
        """Note a refusal; gives whether it may change the verdict.

        A host that dials in a loop counts once; it is told from others by its name and address.
        """
        self.refused_hosts.add(quoted(offer.hello.host), offer.address, refusal, self.elapsed)
        # A host that comes too late says nothing about the fleet, and must not fail a window with a quorum.
        if refusal.code is RefusalCode.WINDOW_CLOSED or not self.settings.max_rejects:
            return False
        key = hash((offer.hello.host, offer.address))
        if key in self._refused:
            return False
        self.refused += 1
        if self.refused <= MAX_KNOWN_REFUSED:
            self._refused.add(key)
        return True

    def enter(self, offer: Offer) -> Member:
        return self.ledger.enter(offer, self.elapsed)

    def why_failed(self, failed: Failed) -> str:
        """The reason of a verdict, with the hosts that were refused meanwhile."""
        return failed.why + self.refused_hosts.told() + self._unheard_told()

    def _unheard_told(self) -> str:
        """Those who were closed without a word: ``6 dials had no token, 2 had a wrong token``."""
        told = [
            f"{count if place else counted(count, 'dial')} had {what}"
            for place, (what, count) in enumerate(self.unheard.most_common())
        ]
        return f"; closed without a word: {', '.join(told)}" if told else ""

    @property
    def somebody_came(self) -> bool:
        """Whether anybody has joined, or was refused, or was closed without a word."""
        return bool(self.ledger.joined_hosts or self.ledger.departures or self.unheard or any(self.refused_hosts))

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
