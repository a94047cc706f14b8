"""What the vendors' tools have printed, read: each GPU with its name, its memory and its architecture."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import Final, cast

from flodl_tw.agent.devices import Gpu
from flodl_tw.core.log_text import MAX_TEXT_BYTES

MAX_BRACKETS: Final = 16
_HEX_ID = re.compile(r"0x[0-9a-fA-F]+")


def clean(text: str) -> str:
    """A tool's text, printable and short enough for a label or a line."""
    printable = "".join(char if char.isprintable() else "?" for char in text[:MAX_TEXT_BYTES].strip())
    return printable.encode()[:MAX_TEXT_BYTES].decode(errors="ignore")


def _label(name: str, vendor: str, mib: float | None, arch: str) -> str:
    named = name if name.upper().startswith(vendor) else f"{vendor} {name}"
    facts = [*([_memory(mib)] if mib else []), *([arch] if arch else [])]
    return clean(named + (f" ({', '.join(facts)})" if facts else ""))


def _memory(mib: float) -> str:
    """A card's memory as people say it: 80GB for 81559 MiB, 24GB for 23028 MiB.

    Drivers keep some for themselves, so whole GiB are rounded up.  On cards of
    up to 48 GB error correction takes a sixteenth, too; those have multiples of 4.
    """
    gib = mib / 1024
    if gib < 1:
        return f"{mib:.0f}MB"
    whole = math.ceil(gib - 0.01)
    nominal = math.ceil(whole / 4) * 4
    return f"{nominal if nominal <= 48 and gib >= nominal * 14 / 15 else whole}GB"


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,6})?", text) else None


def parse_nvidia(text: str) -> list[Gpu]:
    """The GPUs of nvidia-smi's lines, in its order; those that cannot be read are left out, and so is a lost GPU."""
    return [gpu for line in text.split("\n") if (gpu := _nvidia_gpu(line)) is not None]


def _nvidia_gpu(line: str) -> Gpu | None:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) not in (4, 5):
        return None
    index, uuid, name, memory, capability = [*cells, ""][:5]
    # In place of a value there may be a reason in brackets: [N/A], [Unknown Error], [GPU is lost].
    if not re.fullmatch(r"[0-9]{1,2}", index) or not name or name.startswith("["):
        return None
    found = re.fullmatch(r"([0-9]{1,3})\.([0-9]{1,2})", capability)
    digits = "".join(found.groups()) if found else ""
    label = _label(name, "NVIDIA", _number(memory), digits and f"sm_{digits}")
    known = uuid if re.fullmatch(r"GPU-[0-9A-Za-z-]{1,80}", uuid) else ""
    return Gpu(int(index), known, label, digits and f"sm{digits}")


def _json(text: str, first: str) -> object:
    """The value that begins with one of the characters; a warning may stand before it, with brackets of its own."""
    for begin in islice(re.finditer(f"[{re.escape(first)}]", text), MAX_BRACKETS):
        with suppress(ValueError, RecursionError):
            return cast(object, json.JSONDecoder().raw_decode(text, begin.start())[0])
    return None


def parse_amd(text: str) -> list[Gpu]:
    """The GPUs of rocm-smi's JSON, in the order in which HIP counts them."""
    cards = _json(text, "{")
    found: dict[int, Mapping[str, str]] = {}
    for card, facts in cards.items() if isinstance(cards, dict) else ():
        number = re.fullmatch(r"card([0-9]{1,2})", card)
        if number is not None and isinstance(facts, dict):
            # The keys have changed their case over the years.
            found[int(number[1])] = {key.lower(): str(value).strip() for key, value in facts.items()}
    return _amd_gpus(found)


def parse_amd_smi(static: str, listed: str) -> list[Gpu]:
    """The GPUs of amd-smi's JSON, in the order in which HIP counts them, as far as its list tells that."""
    nodes = {number: gpu.get("node_id") for number, gpu in _by_number(listed).items()}
    found: dict[int, Mapping[str, str]] = {}
    for number, gpu in _by_number(static).items():
        asic, vram = _object(gpu.get("asic")), _object(_object(gpu.get("vram")).get("size"))
        mib = _number(str(vram.get("value"))) if vram.get("unit") == "MB" else None
        facts = {
            "card series": asic.get("market_name", ""),
            "unique id": asic.get("asic_serial", ""),
            "gfx version": asic.get("target_graphics_version", ""),
            "vram total memory (b)": "" if mib is None else int(mib) << 20,
            "node id": nodes.get(number, ""),
        }
        found[number] = {key: str(value).strip() for key, value in facts.items() if isinstance(value, str | int)}
    return _amd_gpus(found)


def _by_number(text: str) -> dict[int, Mapping[str, object]]:
    """The entries of one of amd-smi's answers: a list, or since ROCm 7 an object that has one."""
    value = _json(text, "[{")
    entries = value if isinstance(value, list) else _object(value).get("gpu_data")
    found = [_object(entry) for entry in entries] if isinstance(entries, list) else []
    return {number: entry for entry in found if type(number := entry.get("gpu")) is int and 0 <= number < 100}


def _object(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _amd_gpus(found: Mapping[int, Mapping[str, str]]) -> list[Gpu]:
    # HIP and ROCR count by the kernel's node, which need not be the order of the tool's cards.
    nodes = {
        int(node): facts for facts in found.values() if re.fullmatch(r"[0-9]{1,4}", node := facts.get("node id", ""))
    }
    in_order = dict(enumerate(nodes[node] for node in sorted(nodes))) if len(nodes) == len(found) else found
    return [_amd_gpu(index, in_order[index]) for index in sorted(in_order)]


def _amd_gpu(index: int, facts: Mapping[str, str]) -> Gpu:
    # Names that the tool does not know are hexadecimal identifiers, or words such as N/A.
    names = (facts.get(key, "") for key in ("card series", "device name", "card model", "card sku"))
    name = next((name for name in names if name not in ("", "N/A", "unknown") and not _HEX_ID.fullmatch(name)), "GPU")
    total = _number(facts.get("vram total memory (b)", ""))
    unique = facts.get("unique id", "")
    # The tool drops leading zeros; the names that ROCm's runtime takes have all 16 digits.
    uuid = f"GPU-{unique[2:].lower():0>16}" if _HEX_ID.fullmatch(unique) and len(unique) <= 18 else ""
    arch = _gfx(facts.get("gfx version", ""))
    return Gpu(index, uuid, _label(name, "AMD", total / (1 << 20) if total else None, arch), arch)


def _gfx(text: str) -> str:
    """An architecture; ROCm 6.0 has its last digit decimal, gfx9010 for gfx90a."""
    decimal = re.fullmatch(r"gfx90(1[0-5])", text)
    text = f"gfx90{int(decimal[1]):x}" if decimal else text
    return text if re.fullmatch(r"gfx[0-9][0-9a-f]{2,5}", text) else ""
