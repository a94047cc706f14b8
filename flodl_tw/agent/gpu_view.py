"""Which of a host's GPUs each of its ranks sees: all of them, its own alone, or its part of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto
from itertools import pairwise

from flodl_tw.agent.devices import HIDES_ALL, MIG, Device
from flodl_tw.core.errors import SettingError
from flodl_tw.core.log_text import MAX_TEXT_BYTES


class GpuView(Enum):
    """Which GPUs of its host a rank sees."""

    ALL = auto()
    """All that the host offers, as under torchrun: LOCAL_RANK counts in them."""
    OWN = auto()
    """Its own alone, as flodl's programs expect it."""
    INHERITED = auto()
    """Whatever the environment leaves visible, as under torchrun's --nproc-per-node: nobody chose any."""
    VIRTUAL = auto()
    """Its own alone, with LOCAL_RANK 0, as torchrun's --virtual-local-rank has it."""


def rank_view(devices: Sequence[Device], index: int, view: GpuView) -> tuple[str | None, int]:
    """The mask (None: the inherited ones stay) and the LOCAL_RANK of a host's rank ``index``."""
    if view is GpuView.INHERITED:
        return None, index
    own = devices[index].mask
    if view is GpuView.ALL:
        masks = [device.mask for device in devices if device.mask != HIDES_ALL]
        if not any(MIG in mask for mask in masks):
            return ",".join(masks) or HIDES_ALL, index
        view = GpuView.VIRTUAL
    return own, 0 if view is GpuView.VIRTUAL else index


def split(devices: Sequence[Device], parts: int) -> list[tuple[Device, ...]]:
    """The devices in as many parts, in order, as even as can be: the first ones get one more."""
    least, more = divmod(len(devices), parts)
    ends = [number * least + min(number, more) for number in range(parts + 1)]
    return [tuple(devices[first:end]) for first, end in pairwise(ends)]


def divided(devices: Sequence[Device], nproc: int) -> tuple[Device, ...]:
    """The devices of ``nproc`` ranks that have the GPUs between them; SettingError where those are too few."""
    if nproc > len(devices):
        limit = f"there are {len(devices)} GPUs, and each rank has one at least"
        raise SettingError("--nproc", nproc, limit, "give fewer ranks, or more GPUs")
    return tuple(_joined(part) for part in split(devices, nproc))


def _joined(part: Sequence[Device]) -> Device:
    first = part[0]
    if len(part) == 1:
        return first
    same = all(device.label == first.label for device in part)
    label = f"{len(part)} x {first.label}" if same else f"{first.label} and {len(part) - 1} more"
    label = label.encode()[:MAX_TEXT_BYTES].decode(errors="ignore") if first.label else ""
    return replace(first, mask=",".join(device.mask for device in part), label=label)
