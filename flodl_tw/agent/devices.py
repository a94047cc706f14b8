"""Which devices a host offers: its GPUs, what masks leave visible of them, and what was asked for.

Pure: what the vendor's tool said comes in as an ``Inventory`` (``gpu_tools.py``).
A mask's entry is a number or an opaque name (``GPU-…``, ``MIG-…``), which
passes untouched to the rank that gets it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flodl_tw.core.ledger import MAX_DEVICES, MAX_TEXT_BYTES
from flodl_tw.core.window import SettingError

MAX_NUMBER: Final = 255
"""The hello has one byte a device."""
HIDES_ALL: Final = "-1"
"""A mask that leaves no GPU visible, to CUDA and HIP alike."""
ROCR_VARIABLE: Final = "ROCR_VISIBLE_DEVICES"
_NUMBER = re.compile(r"[0-9]{1,9}")
_OPAQUE = re.compile(r"(GPU|MIG)-[0-9A-Za-z/_.-]{1,200}")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One physical GPU, as its vendor's tool lists it in PCI bus order.

    ``label`` is such as ``NVIDIA H100 (80GB, sm_90)``, ``arch`` such as
    ``sm90``; ``uuid`` and ``arch`` are empty where the tool does not tell.
    """

    index: int
    uuid: str
    label: str
    arch: str


@dataclass(frozen=True, slots=True)
class Inventory:
    """The GPUs of this machine.  ``vendor`` is NVIDIA, AMD or None; ``notes`` are lines for people."""

    vendor: str | None
    gpus: tuple[Gpu, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Device:
    """What one rank gets.

    ``number`` (0 to 255) is its place in the hello's local_devices, ``mask``
    what its rank's CUDA_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES are, and
    ``label`` what the hello says of it: empty for a rank without a GPU.
    """

    number: int
    mask: str
    label: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The devices of this host's ranks, what its libtorch is taken for, and lines for people."""

    devices: tuple[Device, ...]
    libtorch: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Visible:
    """One GPU that a rank could use: by its physical index, or by an opaque name; ``gpu`` where it is known."""

    text: str
    gpu: Gpu | None

    @property
    def opaque(self) -> bool:
        """Whether it goes by a name."""
        return not _NUMBER.fullmatch(self.text)

    def is_same(self, other: Visible) -> bool:
        """Whether both are one GPU, as far as that can be seen."""
        return self.text == other.text or (self.gpu is not None and self.gpu == other.gpu)


def choose(option: str | None, nproc: int | None, inventory: Inventory, environ: Mapping[str, str]) -> Choice:
    """The devices to offer.  ``option`` is the text of ``--devices``, ``nproc`` a count of ranks without GPUs.

    Raises SettingError for what cannot be offered.
    """
    if nproc is not None:
        if option is not None:
            raise SettingError("--nproc", nproc, f"--devices {option!r} asks for GPUs", "drop one of the two")
        return without_gpus(nproc)
    variable, visible, note = _visible(inventory, environ)
    if not visible:
        why = note or (inventory.notes[-1] if inventory.notes else "this host has no GPU")
        raise SettingError(
            "--devices",
            repr(option or "all"),
            f"there is none to offer: {why}",
            "give --nproc N for ranks without GPUs",
        )
    chosen = visible if option in (None, "all") else _asked(str(option), visible, variable, inventory)
    devices = _numbered(chosen, visible, inventory)
    if len(devices) > MAX_DEVICES:
        raise SettingError("--devices", len(devices), f"the limit a host is {MAX_DEVICES}", "offer fewer")
    arch = chosen[0].gpu.arch if chosen[0].gpu is not None else _common(gpu.arch for gpu in inventory.gpus)
    notes = [*inventory.notes, *([note] if note else [])]
    return Choice(devices, arch or "cpu", tuple(notes))


def without_gpus(count: int) -> Choice:
    """``count`` ranks that see no GPU."""
    if not 1 <= count <= MAX_DEVICES:
        raise SettingError("--nproc", count, f"the limits are 1 and {MAX_DEVICES}", "give a number between them")
    return Choice(tuple(Device(number, HIDES_ALL, "") for number in range(count)), "cpu")


def numbered(numbers: Sequence[int], inventory: Inventory) -> Choice:
    """Devices that a launcher has chosen already, by physical index; labels where they are known."""
    known = {gpu.index: gpu for gpu in inventory.gpus}
    labels = {index: gpu.label for index, gpu in known.items()}
    devices = tuple(Device(number, str(number), labels.get(number, "")) for number in numbers)
    first = known.get(numbers[0]) if numbers else None
    return Choice(devices, (first.arch if first else "") or "cpu", inventory.notes)


# What is visible


def _visible(inventory: Inventory, environ: Mapping[str, str]) -> tuple[str | None, list[Visible], str | None]:
    """The variable that masks (None where none does), what it leaves visible, and a note on that."""
    every = [Visible(str(gpu.index), gpu) for gpu in inventory.gpus]
    if not every:
        return None, [], None
    if inventory.vendor != "AMD":
        return _masked("CUDA_VISIBLE_DEVICES", environ, every, inventory)
    # HIP's numbers are positions in what ROCR leaves, and HIP takes CUDA's variable where its own is not set.
    lower, base, note = _masked(ROCR_VARIABLE, environ, every, inventory)
    upper = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in environ else "CUDA_VISIBLE_DEVICES"
    if not base or upper not in environ:
        return lower, base, note
    return _masked(upper, environ, base, inventory)


def _masked(
    variable: str, environ: Mapping[str, str], base: list[Visible], inventory: Inventory
) -> tuple[str | None, list[Visible], str | None]:
    text = environ.get(variable)
    if text is None:
        return None, base, None
    entries = [entry.strip() for entry in text.split(",")]
    hidden = next((place for place, entry in enumerate(entries) if entry in ("", "-1", "NoDevFiles")), len(entries))
    # As the drivers read it: what stands there hides itself and all that follows.
    kept = entries[:hidden]
    note = (
        None
        if hidden == len(entries)
        else f"{variable} is {text!r}, which hides " + ("some GPUs" if kept else "every GPU")
    )
    return variable, _resolved(kept, base, variable, repr(text), inventory), note


def _resolved(
    entries: Sequence[str], base: list[Visible], where: str, shown: str, inventory: Inventory
) -> list[Visible]:
    """The GPUs that a mask's entries name; a number is a position in ``base``."""
    found: list[Visible] = []
    for entry in entries:
        one = _one(entry, base, where, shown, inventory)
        if any(one.is_same(other) for other in found):
            raise SettingError(where, shown, f"{entry} names a GPU that is named before", "name each GPU once")
        found.append(one)
    return found


def _one(entry: str, base: list[Visible], where: str, shown: str, inventory: Inventory) -> Visible:
    if _NUMBER.fullmatch(entry):
        place = int(entry)
        if place >= len(base):
            raise SettingError(where, shown, f"{place} is none of 0 to {len(base) - 1}", "name GPUs that there are")
        return base[place]
    if _OPAQUE.fullmatch(entry):
        return Visible(entry, _by_uuid(entry, inventory))
    raise SettingError(
        where,
        shown,
        f"{entry[:40]!r} is neither a number nor a GPU-… or MIG-… name",
        "name each GPU in one of these ways",
    )


def _by_uuid(name: str, inventory: Inventory) -> Gpu | None:
    """The GPU of that name, which may be cut short as long as it is one GPU's; MIG names are none of it."""
    same = [gpu for gpu in inventory.gpus if gpu.uuid and gpu.uuid.lower().startswith(name.lower())]
    return same[0] if len(same) == 1 and name.startswith("GPU-") else None


# What was asked for


def _asked(option: str, visible: list[Visible], variable: str | None, inventory: Inventory) -> list[Visible]:
    entries = [entry.strip() for entry in option.split(",")]
    chosen = _resolved(entries, visible, "--devices", repr(option), inventory)
    return [_within(one, visible, variable, option) for one in chosen]


def _within(one: Visible, visible: list[Visible], variable: str | None, option: str) -> Visible:
    """A GPU that was asked for, by the name that it was asked by; SettingError where it is not visible."""
    if _place(one, visible) is not None or (variable is None and one.text.startswith("MIG-")):
        # The tools do not list the parts of a GPU, so a part's name is the driver's to judge.
        return one
    hidden = "no GPU of this host has that name" if variable is None else f"{variable} does not leave it visible"
    raise SettingError("--devices", repr(option), f"{one.text}: {hidden}", "name GPUs that are visible here")


def _place(one: Visible, visible: list[Visible]) -> int | None:
    """The position of a GPU among those that are visible."""
    return next((place for place, other in enumerate(visible) if one.is_same(other)), None)


def _numbered(chosen: list[Visible], visible: list[Visible], inventory: Inventory) -> tuple[Device, ...]:
    """The devices: a number's is its physical index, a name's its position, or the next number that is free."""
    taken = {int(one.text) for one in chosen if not one.opaque}
    if taken and max(taken) > MAX_NUMBER:
        raise SettingError("--devices", max(taken), f"the limit of an index is {MAX_NUMBER}", "offer others")
    devices = []
    for place, one in enumerate(chosen):
        if not one.opaque:
            devices.append(Device(int(one.text), one.text, one.gpu.label if one.gpu else ""))
            continue
        position = _place(one, visible)
        number = place if position is None else position
        while number in taken:
            number += 1
        taken.add(number)
        devices.append(Device(number, one.text, _named(one, inventory)))
    return tuple(devices)


def _named(one: Visible, inventory: Inventory) -> str:
    """A label that ends with the name, whole: two ranks may share the GPU that it is part of."""
    label = one.gpu.label if one.gpu else _common(gpu.label for gpu in inventory.gpus) or inventory.vendor or "GPU"
    room = MAX_TEXT_BYTES - len(one.text) - 1
    return f"{label.encode()[:room].decode(errors='ignore')} {one.text}"


def _common(values: object) -> str:
    """The value that all have, or an empty text."""
    found = set(values)  # type: ignore[call-overload]
    return str(found.pop()) if len(found) == 1 else ""
