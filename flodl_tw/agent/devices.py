"""Which devices a host offers: its GPUs, what masks leave visible of them, and what was asked for.

Pure: what the vendor's tool said comes in as an ``Inventory`` (``gpu_probe.py``).
A mask's entry is a number or an opaque name (``GPU-…``, ``MIG-…``), which
passes untouched to the rank that gets it; that of a known AMD GPU becomes its
index.  Where a driver would silently stop at an entry that it cannot use, this
refuses: fewer ranks than were meant would join.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flodl_tw.core.errors import NotYetError, SettingError
from flodl_tw.core.ledger import MAX_DEVICES
from flodl_tw.core.log_text import MAX_TEXT_BYTES, shown
from flodl_tw.core.phrases import spans

HIDES_ALL: Final = "-1"
"""A mask that leaves no GPU visible, to CUDA and HIP alike."""
CUDA_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
HIP_VARIABLE: Final = "HIP_VISIBLE_DEVICES"
ROCR_VARIABLE: Final = "ROCR_VISIBLE_DEVICES"
_MASKS: Final = (CUDA_VARIABLE, HIP_VARIABLE, ROCR_VARIABLE)

MIG: Final = "MIG-"
_NUMBER = re.compile(r"[0-9]{1,9}")
_OPAQUE = re.compile(r"(GPU|MIG)-[0-9A-Za-z/_.-]{1,200}")
_HIDES = re.compile(r"|-[0-9]+|NoDevFiles")
"""Such an entry hides itself and all that follow; the name is what Slurm writes for a job without GPUs."""


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
    """The GPUs of this machine.  ``vendor`` is NVIDIA, AMD or None; ``notes`` are lines for people.

    Where there are none, ``silent`` says that there was no tool to ask, and
    ``late`` that one has not answered in time.
    """

    vendor: str | None
    gpus: tuple[Gpu, ...]
    notes: tuple[str, ...] = ()
    silent: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class Device:
    """What one rank has for its own.

    ``number`` (0 to 255) is its place in the hello's local_devices, ``mask``
    names its GPU, or its GPUs, for CUDA_VISIBLE_DEVICES and
    HIP_VISIBLE_DEVICES, and ``label`` is what the hello says of it: empty for
    a rank without a GPU.
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
    def index(self) -> int | None:
        """The physical index; None where it goes by a name."""
        return int(self.text) if self.text.isdecimal() else None

    def is_same(self, other: Visible) -> bool:
        """Whether both are one GPU, as far as that can be seen."""
        return self.text.lower() == other.text.lower() or (self.gpu is not None and self.gpu == other.gpu)


@dataclass(frozen=True, slots=True)
class Selection:
    """A text that names GPUs, and the mask or the option that it is the value of."""

    where: str
    text: str

    @property
    def entries(self) -> list[str]:
        return [entry.strip() for entry in self.text.split(",")]

    def __str__(self) -> str:
        return f"{self.where}={shown(self.text)}"

    def wrong(self, limit: str, way_out: str) -> SettingError:
        return SettingError(self.where, shown(self.text), limit, way_out)


@dataclass(frozen=True, slots=True)
class View:
    """What is visible of an inventory, by the number that the next selection names it by.

    That is the physical index where there is no mask yet, and the position
    behind one.  ``masks`` are those that made it.
    """

    inventory: Inventory
    gpus: Mapping[int, Visible]
    masks: tuple[Selection, ...] = ()
    notes: tuple[str, ...] = ()

    def place(self, one: Visible) -> int | None:
        """The number of a GPU; None where it is not visible."""
        return next((number for number, other in self.gpus.items() if one.is_same(other)), None)

    def behind(self, mask: Selection) -> View:
        entries, notes = mask.entries, self.notes
        hidden = next((place for place, entry in enumerate(entries) if _HIDES.fullmatch(entry)), None)
        if hidden is not None:
            hides = f"the GPUs after {entries[hidden - 1]}" if hidden else "every GPU"
            notes = (*notes, f"{mask} hides {hides}")
        found = self.selected(mask, entries[:hidden])
        return View(self.inventory, dict(enumerate(found)), (*self.masks, mask), notes)

    def selected(self, selection: Selection, entries: Sequence[str]) -> list[Visible]:
        """The visible GPUs that entries of a selection name."""
        if len(entries) > MAX_DEVICES:
            limit = f"it has {len(entries)} entries, the limit a host is {MAX_DEVICES}"
            raise selection.wrong(limit, "name fewer")
        found: list[Visible] = []
        for entry in entries:
            one = self._one(selection, entry)
            if any(one.is_same(other) for other in found):
                raise selection.wrong(f"{entry} names a GPU that is named before", "name each GPU once")
            found.append(one)
        return found

    def _one(self, selection: Selection, entry: str) -> Visible:
        if _OPAQUE.fullmatch(entry):
            return self._named(selection, entry)
        if not _NUMBER.fullmatch(entry):
            limit = f"{shown(entry)} is neither a number nor a GPU-… or MIG-… name"
            raise selection.wrong(limit, "name each GPU in one of these ways")
        if int(entry) not in self.gpus:
            those = f"the positions in {self.masks[-1]}" if self.masks else "the GPUs of this host"
            raise selection.wrong(f"{entry} is none of {spans(sorted(self.gpus))}, {those}", "name GPUs that there are")
        return self.gpus[int(entry)]

    def _named(self, selection: Selection, name: str) -> Visible:
        """The GPU of an opaque name, which stays its name."""
        # A name may be cut short as long as it is one GPU's; the name of a GPU's part begins none of theirs.
        same = [gpu for gpu in self.inventory.gpus if gpu.uuid.lower().startswith(name.lower())]
        one = Visible(name, same[0] if len(same) == 1 else None)
        place = self.place(one)
        if place is not None:
            # ROCR takes names, but a rank's mask is HIP's, whose older releases know numbers alone.
            return self.gpus[place] if self.inventory.vendor == "AMD" else one
        if self.masks:
            limit = f"{' and '.join(map(str, self.masks))} does not leave {name} visible"
            raise selection.wrong(limit, "name GPUs that are visible here")
        uuids = [gpu.uuid for gpu in self.inventory.gpus]
        if selection.where not in _MASKS and name.startswith("GPU-") and uuids and all(uuids):
            limit = f"{len(same) or 'no'} GPUs of this host have names that begin with {name}"
            raise selection.wrong(limit, "name GPUs that there are, each by enough of its name")
        # The tools do not list a GPU's parts, and a mask from a scheduler is the driver's to judge.
        return one


def choose(option: str | None, inventory: Inventory, environ: Mapping[str, str], *, where: str = "--devices") -> Choice:
    """The devices to offer, one a rank.  ``option`` is the text of ``--devices``, where it is given.

    ``where`` is what gave that text, for people.  Raises SettingError for what cannot be offered, and
    NotYetError where a tool may say more another time.
    """
    view = _view(inventory, environ)
    asked = Selection(where, "all" if option is None else option.strip())
    believed = inventory.silent and (view.masks or asked.text != "all")
    if not view.gpus or (inventory.silent and not believed):
        why = "; ".join([*inventory.notes, *view.notes]) or "the tools list none"
        if inventory.late:
            raise NotYetError(f"this host has no GPU to offer: {why}; try again, or give --nproc N for ranks without")
        raise asked.wrong(f"this host has no GPU to offer: {why}", "give --nproc N for ranks without GPUs")
    chosen = list(view.gpus.values()) if asked.text == "all" else view.selected(asked, asked.entries)
    libtorch, notes = _libtorch(chosen[0].gpu, inventory)
    if believed:
        named = view.masks[-1] if asked.text == "all" else asked
        notes = (f"{named} is believed: labels are unknown, and so is what libtorch is for (--libtorch says it)",)
    devices = _numbered(chosen, view)
    if any(MIG in device.mask for device in devices):
        notes = (*notes, "CUDA shows a process one MIG part, so each rank sees its own, as with --virtual-local-rank")
    return Choice(devices, libtorch, (*inventory.notes, *view.notes, *notes))


def without_gpus(count: int) -> Choice:
    if not 1 <= count <= MAX_DEVICES:
        raise SettingError("--nproc", count, f"the limits are 1 and {MAX_DEVICES}", "give a number between them")
    return Choice(tuple(Device(number, HIDES_ALL, "") for number in range(count)), "cpu")


def numbered(numbers: Sequence[int], inventory: Inventory) -> Choice:
    """Devices that a launcher has chosen already, by physical index; labels where they are known."""
    known = {gpu.index: gpu for gpu in inventory.gpus}
    chosen = [known.get(number) for number in numbers]
    devices = tuple(
        Device(number, str(number), gpu.label if gpu else "") for number, gpu in zip(numbers, chosen, strict=True)
    )
    libtorch, notes = _libtorch(chosen[0] if chosen else None, inventory)
    return Choice(devices, libtorch, (*inventory.notes, *notes))


def _view(inventory: Inventory, environ: Mapping[str, str]) -> View:
    gpus = {gpu.index: Visible(str(gpu.index), gpu) for gpu in inventory.gpus}
    if inventory.silent:
        # Nothing contradicts what a mask or an option names.
        gpus = {number: Visible(str(number), None) for number in range(MAX_DEVICES)}
    view = View(inventory, gpus)
    is_amd = inventory.vendor == "AMD" or (inventory.silent and bool({ROCR_VARIABLE, HIP_VARIABLE} & environ.keys()))
    # The masks are applied in the order in which the vendor's runtime does: HIP's numbers are positions in what ROCR
    # leaves, and HIP takes CUDA's variable where its own is not set.
    amd = (ROCR_VARIABLE, HIP_VARIABLE if HIP_VARIABLE in environ else CUDA_VARIABLE)
    for variable in amd if is_amd else (CUDA_VARIABLE,):
        if view.gpus and variable in environ:
            # An empty mask is no unset one: to the driver it hides every GPU.
            view = view.behind(Selection(variable, environ[variable]))
    return view


def _numbered(chosen: Sequence[Visible], view: View) -> tuple[Device, ...]:
    """The devices: a number's is its physical index, a name's its position, or the lowest that is free."""
    taken = {one.index for one in chosen}
    devices = []
    for place, one in enumerate(chosen):
        number, label = one.index, one.gpu.label if one.gpu else ""
        if number is None:
            label, number = _opaque_label(one, view.inventory), view.place(one)
            number = place if number is None else number
            if number in taken:
                number = next(free for free in range(MAX_DEVICES) if free not in taken)
            taken.add(number)
        devices.append(Device(number, one.text, label))
    return tuple(devices)


def _opaque_label(one: Visible, inventory: Inventory) -> str:
    """A label that ends with the name, whole: two ranks may share the GPU that it is part of."""
    labels = {one.gpu.label} if one.gpu else {gpu.label for gpu in inventory.gpus}
    label = labels.pop() if len(labels) == 1 else inventory.vendor or "GPU"
    room = MAX_TEXT_BYTES - len(one.text) - 1
    return f"{label.encode()[:room].decode(errors='ignore')} {one.text}"


def _libtorch(first: Gpu | None, inventory: Inventory) -> tuple[str, tuple[str, ...]]:
    """What the first device's libtorch is built for, and a note where nothing tells."""
    # Any GPU's architecture serves where the first one's is not known: it tells the vendor.
    arch = next((gpu.arch for gpu in (first, *inventory.gpus) if gpu and gpu.arch), "")
    if arch or not inventory.gpus:
        return arch or "cpu", ()
    note = f"nothing tells the architecture of these {inventory.vendor} GPUs, so this host's libtorch goes as cpu, "
    return "cpu", (f"{note}and its vendor is not compared: --libtorch says it",)
