"""Who takes part in a rehearsal: simulated hosts, what they say of themselves, and whether they fared as they should.

Nothing here dials anybody; ``rehearsal.py`` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from flodl_tw.core.log_text import counted, shortened
from flodl_tw.core.messages import SIGNATURE_BYTES, Hello
from flodl_tw.core.refusals import RefusalCode

if TYPE_CHECKING:
    from flodl_tw.agent.assignment import Assignment
    from flodl_tw.agent.link import JoinLink

NAME: Final = "rehearsal"
"""What every host's name begins with, so that nobody takes one for a machine."""
HOSTS: Final = 4
GPUS: Final = 8
SECS: Final = 60.0
"""What a plan has unless it is told otherwise."""
MAX_REASON_CHARS: Final = 2000
SHOWN_NAMES: Final = 4


class Bad(Enum):
    """A kind of host that a controller is to refuse: the word for it, and how its hello differs from a good one's."""

    NCCL = ("nccl", RefusalCode.NCCL_MISMATCH, {"nccl_version": (2, 26, 5)})
    VENDOR = (
        "vendor",
        RefusalCode.VENDOR_MISMATCH,
        {"gpus": ("AMD Instinct MI300X (192GB, gfx942)",), "libtorch": "precompiled/rocm6.4"},
    )
    DATASET = ("dataset", RefusalCode.DATASET_MISMATCH, {"dataset_sig": b"\xba\xdd" * (SIGNATURE_BYTES // 2)})
    DUPLICATE = ("duplicate", RefusalCode.DUPLICATE_HOST, dict[str, Any]())

    def __init__(self, kind: str, code: RefusalCode, changes: dict[str, Any]) -> None:
        self.kind = kind
        self.code = code
        self.changes = changes


@dataclass(slots=True, eq=False)
class RehearsedHost:
    """One simulated host, and how it fares.  ``bad`` says why it is to be refused; None for one that is to be in."""

    hello: Hello
    bad: Bad | None = None
    link: JoinLink | None = None
    """Once it is in."""
    refusal: str | None = None
    """The Reject's reason."""
    assignment: Assignment | None = None
    """Once the world has formed."""
    parted: bool = False
    """Whether its ranks have ended, and its link is ours to close."""

    @property
    def name(self) -> str:
        """The host, for people."""
        return f"a second {self.hello.host}" if self.bad is Bad.DUPLICATE else self.hello.host

    @property
    def word(self) -> str:
        """The first word of its refusal."""
        return shortened((self.refusal or "").partition(":")[0], 64)

    @property
    def reason(self) -> str:
        """Its refusal, as it may be shown."""
        return shortened(self.refusal or "", MAX_REASON_CHARS)

    def fault(self) -> str | None:
        """What is wrong with how a bad host fared, as far as it was answered."""
        if self.bad is None:
            return None
        due = self.bad.code.value
        if self.link is not None:
            unseen = self.bad in (Bad.NCCL, Bad.VENDOR)
            note = " (a controller with --backend cpu does not look at that)" if unseen else ""
            return f"{self.name} is in, and was to be refused with {due}{note}"
        if self.refusal is None or self.word == due:
            return None
        return f"{self.name} was refused with {self.word}, and not with {due}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is rehearsed.  ``secs`` is how long the ranks train; ``token`` is 16 bytes."""

    controller: tuple[str, int]
    hosts: int = HOSTS
    gpus: int = GPUS
    bad: tuple[Bad, ...] = ()
    secs: float = SECS
    token: bytes | None = field(default=None, repr=False)
    scale: float = 1.0

    def good_hosts(self) -> list[RehearsedHost]:
        """Those that are to be in."""
        digits = max(2, len(str(self.hosts)))
        return [RehearsedHost(self._hello(f"{NAME}-{number:0{digits}}")) for number in range(1, self.hosts + 1)]

    def bad_hosts(self) -> list[RehearsedHost]:
        """Those that are to be refused, with a GPU each: one that is let in shall not fill the world by itself."""
        first = self.good_hosts()[0].hello
        made = []
        for bad in self.bad:
            name = first.host if bad is Bad.DUPLICATE else f"{NAME}-bad-{bad.kind}"
            hello = replace(first, host=name, local_devices=b"\0", gpus=first.gpus[:1])
            made.append(RehearsedHost(replace(hello, **bad.changes), bad))
        return made

    def _hello(self, host: str) -> Hello:
        return Hello(
            host=host,
            local_devices=bytes(range(self.gpus)),
            gpus=("NVIDIA H100 (80GB, sm_90)",) * self.gpus,
            libtorch="precompiled/cu128",
            dataset_sig=bytes(SIGNATURE_BYTES),
            nccl_version=(2, 27, 3),
        )


def bad_lines(hosts: Sequence[RehearsedHost]) -> Iterator[str]:
    """How the bad hosts fared, a line each."""
    for host in hosts:
        fault = host.fault()
        if host.refusal is not None:
            yield f"{host.name} is refused{'' if fault else ', as it should be'}: {host.reason}"
        elif fault is not None:
            yield fault


def good_lines(hosts: Sequence[RehearsedHost]) -> Iterator[str]:
    """How the good hosts fared: a line for each word of a refusal, and how many are in."""
    refused = [host for host in hosts if host.refusal is not None]
    for word in dict.fromkeys(host.word for host in refused):
        alike = [host for host in refused if host.word == word]
        who = f"{alike[0].name} is" if len(alike) == 1 else f"{len(alike)} hosts ({_names(alike)}) are"
        yield f"{who} refused: {alike[0].reason}"
    joined = [host for host in hosts if host.link is not None]
    ranks = counted(sum(len(host.hello.local_devices) for host in joined), "rank")
    if refused:
        yield f"{len(joined)} of {counted(len(hosts), 'host')} joined, with {ranks}"
    else:
        yield f"all joined: {counted(len(joined), 'host')} with {ranks}"


def faults(hosts: Sequence[RehearsedHost]) -> list[str]:
    """All who did not fare as they should."""
    refused = [host for host in hosts if host.bad is None and host.refusal is not None]
    found = [fault for host in hosts if (fault := host.fault()) is not None]
    if refused:
        count = f"{len(refused)} of {counted(sum(host.bad is None for host in hosts), 'host')}"
        words = ", ".join(dict.fromkeys(host.word for host in refused))
        found.insert(0, f"{count} refused with {words}: {_names(refused)}")
    return found


def _names(hosts: Sequence[RehearsedHost]) -> str:
    more = f" and {len(hosts) - SHOWN_NAMES} more" if len(hosts) > SHOWN_NAMES else ""
    return ", ".join(host.name for host in hosts[:SHOWN_NAMES]) + more
