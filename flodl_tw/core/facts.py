"""What all members of a world must agree on: each fact, how an offer states it, and what to do about a difference."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from flodl_tw.core.messages import Hello
from flodl_tw.core.refusals import RefusalCode, short_id

T_co = TypeVar("T_co", covariant=True)
_NVIDIA = re.compile(r"(cu|sm)[0-9]")
_AMD = re.compile(r"(rocm|gfx)[0-9]")


@dataclass(frozen=True, slots=True)
class Offer:
    """A hello with what the connection knows of it: the version spoken, the peer's address and ours that it dialed."""

    hello: Hello
    version: int
    address: str
    dialed: str = ""


def gpu_vendor(libtorch: str) -> str | None:
    """The vendor that a libtorch label's last path component tells, or None."""
    last = libtorch.rsplit("/", 1)[-1]
    if _NVIDIA.match(last):
        return "NVIDIA"
    if _AMD.match(last):
        return "AMD"
    return None


@dataclass(frozen=True, slots=True)
class Fact(Generic[T_co]):
    """Something that all members must agree on.

    ``stated`` gives an offer's value, or None where it states none, which
    gates nothing.  ``advice`` is the way out of a difference.
    """

    name: str
    code: RefusalCode
    stated: Callable[[Offer], T_co | None]
    advice: str
    nccl_only: bool = False


def _major_minor(offer: Offer) -> tuple[int, int] | None:
    nccl = offer.hello.nccl_version
    return None if nccl is None else nccl[:2]


def fact_text(value: object) -> str:
    """A fact's value for a reason: a signature and an id cut short, a version with its dots."""
    match value:
        case bytes():
            return short_id(value.hex())
        case str():
            return repr(short_id(value))
        case tuple():
            return ".".join(map(str, value))
    return str(value)


VERSION_FACT = Fact(
    "protocol version",
    RefusalCode.VERSION_MISMATCH,
    lambda offer: offer.version,
    "ranks of different flodl releases cannot train together: install one release on every host",
)
DATASET_FACT = Fact(
    "dataset signature",
    RefusalCode.DATASET_MISMATCH,
    lambda offer: offer.hello.dataset_sig,
    "the data must be sharded the same everywhere: rebuild or fetch it again on the host that differs",
)
VENDOR_FACT = Fact(
    "GPU vendor",
    RefusalCode.VENDOR_MISMATCH,
    lambda offer: gpu_vendor(offer.hello.libtorch),
    "NCCL and RCCL cannot form one communicator: use hosts of one vendor, or --backend cpu",
    nccl_only=True,
)
RUN_FACT = Fact(
    "run id",
    RefusalCode.RUN_MISMATCH,
    lambda offer: offer.hello.run_id,
    "a publish landed between their fetches: fetch the run again on the host that is behind",
)
NCCL_FACT = Fact(
    "NCCL version",
    RefusalCode.NCCL_MISMATCH,
    _major_minor,
    "NCCL does not connect across minor versions: install one libtorch variant everywhere",
    nccl_only=True,
)
MODEL_FACT = Fact(
    "model signature",
    RefusalCode.MODEL_MISMATCH,
    lambda offer: offer.hello.model_sig,
    "parameters differ in name, shape or type: rebuild the program from one source tree everywhere",
)
FACTS: Final[tuple[Fact[object], ...]] = (VERSION_FACT, DATASET_FACT, VENDOR_FACT, RUN_FACT, NCCL_FACT, MODEL_FACT)
