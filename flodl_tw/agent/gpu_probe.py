"""What GPUs this machine has, asked of the vendors' tools, and which NCCL an installed torch brings.

No torch is imported and no CUDA context is made.  The tools run while the
program starts, and one that hangs is ended at the deadline.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from flodl_tw.agent.devices import Gpu, Inventory
from flodl_tw.core.log_text import MAX_TEXT_BYTES

PIPE_BYTES: Final = 256 * 1024
"""What a tool's pipe holds, and so the longest answer; a host with the most GPUs says some ten KiB."""
END_SECS: Final = 0.5
"""What a killed tool gets to be gone; one that its driver holds is left behind."""
NVIDIA: Final = ("nvidia-smi", "--format=csv,noheader,nounits", "--query-gpu=index,uuid,name,memory.total,compute_cap")
OLD_NVIDIA: Final = (*NVIDIA[:2], "--query-gpu=index,uuid,name,memory.total")
"""Drivers before 2021 know no compute_cap, and refuse the whole question."""
INFOROM_STATUS: Final = 14
"""nvidia-smi's status where a card's infoROM is damaged: a warning, after a whole answer."""
AMD: Final = ("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showuniqueid", "--json")
OUR_PREFIX: Final = "FLODL_"
"""Tools have no use for our variables, some of which hold secrets."""

_NCCL = re.compile(r"nvidia_nccl_cu[0-9]+-([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})(?![0-9])")
_HEX_ID = re.compile(r"0x[0-9a-fA-F]+")


class Tool:
    """One run of a tool, under way; its pipe holds what it prints, and one that prints more than it holds hangs."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        self.name = words[0]
        self.error: str | None = None
        """Why there is no answer, or what was wrong besides; None as well where there is no such tool."""
        self._process: subprocess.Popen[bytes] | None = None
        found = shutil.which(self.name, path=environ.get("PATH", os.defpath))
        if found is not None:
            try:
                self._process = subprocess.Popen(  # noqa: S603  found on the user's own PATH
                    [found, *words[1:]],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pipesize=PIPE_BYTES,
                    env={name: text for name, text in environ.items() if not name.startswith(OUR_PREFIX)},
                    start_new_session=True,
                )
            except OSError as error:
                self.error = f"{self.name} cannot be run: {error.strerror}"

    def answer(self, deadline: float) -> str:
        """What it printed by the deadline; ``error`` is set where that is nothing, or not all.  To be asked once."""
        if self._process is None:
            return ""
        try:
            status = self._process.wait(max(0.0, deadline - time.monotonic()))
            assert self._process.stdout is not None
            # A child of the tool may still have the other end open.
            os.set_blocking(self._process.stdout.fileno(), False)
            text = (self._process.stdout.read() or b"").decode("utf-8", "replace").strip()
        except subprocess.TimeoutExpired:
            self.error = f"{self.name} did not answer in time, or with more than {PIPE_BYTES} bytes"
            return ""
        finally:
            self.end()
        if status not in (0, INFOROM_STATUS):
            said = f": {clean(text.splitlines()[0])}" if text else ""
            how = f"status {status}" if status > 0 else f"signal {-status}"
            self.error = f"{self.name} failed with {how}{said}"
        elif not text:
            self.error = f"{self.name} says nothing"
        return text

    def end(self) -> None:
        """End what still runs of it, and forget what it printed."""
        if self._process is None:
            return
        if self._process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECS)
        if self._process.stdout is not None:
            self._process.stdout.close()


class Probe:
    """Both vendors' tools, started at once; ``inventory`` waits for them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._nvidia, self._amd = Tool(NVIDIA, environ), Tool(AMD, environ)
        atexit.register(self.close)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._nvidia.end()
        self._amd.end()

    def inventory(self, timeout: float = 10.0) -> Inventory:
        """This machine's GPUs; takes ``timeout`` seconds at most, and half a second for each tool to be ended."""
        deadline = time.monotonic() + timeout
        notes: list[str] = []
        try:
            for vendor, ask in (("NVIDIA", self._ask_nvidia), ("AMD", self._ask_amd)):
                gpus, note = ask(deadline)
                if note is not None:
                    notes.append(note if gpus else f"{note}: no {vendor} GPU is known")
                if gpus:
                    return Inventory(vendor, tuple(gpus), tuple(notes))
        finally:
            self.close()
        return Inventory(None, (), tuple(notes) or ("neither nvidia-smi nor rocm-smi is on PATH: no GPU is known",))

    def _ask_nvidia(self, deadline: float) -> tuple[list[Gpu], str | None]:
        tool = self._nvidia
        text = tool.answer(deadline)
        if tool.error is not None and "compute_cap" in tool.error + text:
            tool = Tool(OLD_NVIDIA, self._environ)
            text = tool.answer(deadline)
        if tool.error is not None:
            return [], tool.error
        other = [line for line in text.split("\n") if line.strip() and _nvidia_gpu(line) is None]
        return parse_nvidia(text), f"nvidia-smi says {clean(other[0])!r}" if other else None

    def _ask_amd(self, deadline: float) -> tuple[list[Gpu], str | None]:
        # It fails where one card does not tell one thing, and has told the rest.
        text = self._amd.answer(deadline)
        gpus = parse_amd(text)
        said = self._amd.error or (f"rocm-smi says {clean(text.splitlines()[0])!r}" if text else None)
        return gpus, None if gpus else said


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


def parse_amd(text: str) -> list[Gpu]:
    """The GPUs of rocm-smi's JSON, in the order in which HIP counts them; a warning may stand before it."""
    try:
        cards, _ = json.JSONDecoder().raw_decode(text, text.find("{"))
    except (ValueError, IndexError, RecursionError):
        return []
    found = {}
    for card, facts in cards.items() if isinstance(cards, dict) else ():
        number = re.fullmatch(r"card([0-9]{1,2})", card)
        if number is not None and isinstance(facts, dict):
            # The keys have changed their case over the years.
            found[int(number[1])] = {key.lower(): str(value).strip() for key, value in facts.items()}
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


def installed_nccl(paths: Sequence[str]) -> tuple[int, int, int] | None:
    """The NCCL beside an installed torch, by the names of files on ``paths``; None where there is none, or several."""
    for path in paths:
        folder = Path(path or ".")
        try:
            if not (folder / "torch" / "__init__.py").is_file():
                continue
            names = [entry.name for entry in folder.glob("nvidia_nccl_cu*.dist-info")]
        except OSError:
            continue
        versions = {match.groups() for name in names if (match := _NCCL.match(name))}
        if len(versions) == 1:
            major, minor, patch = (int(part) for part in versions.pop())
            return major, minor, patch
    return None
