"""What a run is given, and what follows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from flodl_tw.core.store.wire import StoreLimits
from flodl_tw.core.window import WindowSettings
from flodl_tw.core.world import LaunchSettings


class OnLoss(Enum):
    """What a lost host or a failed rank does to the others."""

    ABORT = "abort"
    CONTINUE = "continue"


class AfterRun(Enum):
    """What follows when a run is over."""

    EXIT = "exit"
    HOLD = "hold"
    REARM = "rearm"


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a run is given; the same for every run of a controller."""

    window: WindowSettings = field(default_factory=WindowSettings)
    nccl: bool = True
    dataset_sig: bytes | None = None
    model_sig: bytes | None = None
    on_loss: OnLoss = OnLoss.ABORT
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    one_salt: bool = False
    """Whether the ranks' salt is the session's: a backend behind a forwarded channel knows no other."""
    store: StoreLimits | None = None
    """What torch's store may hold; None where it is not served."""
    linger_secs: float = 60
    """Seconds that a link may stay open after the last report of all ranks, before the run ends without it."""
