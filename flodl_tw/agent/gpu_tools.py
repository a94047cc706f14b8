"""What GPUs this machine has, asked of the vendors' tools, and which NCCL an installed torch brings.

No torch is imported and no CUDA context is made.  The tools run while the
program starts; one that hangs in its driver is left behind at the deadline.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from flodl_tw.agent.devices import Gpu, Inventory
from flodl_tw.core.ledger import MAX_TEXT_BYTES

MAX_ANSWER: Final = 1 << 20
"""Bytes of a tool's answer; a host with the most GPUs says a few KiB."""
NVIDIA: Final = ("nvidia-smi", "--format=csv,noheader,nounits", "--query-gpu=index,uuid,name,memory.total,compute_cap")
OLD_NVIDIA: Final = (*NVIDIA[:2], "--query-gpu=index,uuid,name,memory.total")
"""Drivers before 2021 know no compute_cap, and refuse the whole question."""
AMD: Final = ("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showuniqueid", "--json")
SECRETS: Final = ("FLODL_JOIN_TOKEN", "FLODL_INTERNAL_AGENT_JSON")
_NCCL = re.compile(r"nvidia_nccl_cu[0-9]+-([0-9]+)\.([0-9]+)\.([0-9]+)")


class Question:
    """One run of a tool, under way; its output goes to files, so that nothing can block it."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        self.name = words[0]
        self._out = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the question
        self._err = tempfile.TemporaryFile()  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None
        self.error: str | None = None
        """Why there is no answer."""
        found = shutil.which(words[0], path=environ.get("PATH"))
        if found is None:
            self.error = f"{words[0]} is not on PATH"
            return
        kept = {name: text for name, text in environ.items() if name not in SECRETS}
        try:
            self._process = subprocess.Popen(  # noqa: S603  found on the user's own PATH
                [found, *words[1:]],
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._err,
                env=kept,
                start_new_session=True,
            )
        except OSError as error:
            self.error = f"{words[0]} cannot be run: {error.strerror}"

    @property
    def absent(self) -> bool:
        """Whether there is no such tool."""
        return self._process is None

    def answer(self, deadline: float) -> str | None:
        """What it printed; None, with ``error`` set, where that is no answer."""
        if self._process is None:
            return None
        try:
            status = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            # Not waited for: a process that the kernel holds does not end by this, either.
            self._process.kill()
            self.error = f"{self.name} did not answer in time"
            return None
        self._out.seek(0)
        text = self._out.read(MAX_ANSWER + 1).decode("utf-8", "replace")
        if status:
            self._err.seek(0)
            said = (self._err.read(4096).decode("utf-8", "replace") + text).strip().splitlines()
            self.error = f"{self.name} failed with {status}" + (f": {clean(said[0])}" if said else "")
            return None
        if len(text) > MAX_ANSWER:
            self.error = f"{self.name} answered more than {MAX_ANSWER} bytes"
            return None
        return text


class Asking:
    """Both vendors' tools, started at once; ``inventory`` waits for them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._nvidia = Question(NVIDIA, environ)
        self._amd = Question(AMD, environ)

    def inventory(self, timeout: float = 10.0) -> Inventory:
        """This machine's GPUs; never longer than ``timeout`` seconds, and a few."""
        deadline = time.monotonic() + timeout
        notes: list[str] = []
        for vendor, ask in (("NVIDIA", self._ask_nvidia), ("AMD", self._ask_amd)):
            gpus, error = ask(deadline)
            if gpus:
                return Inventory(vendor, tuple(gpus), tuple(notes))
            if error is not None:
                notes.append(f"{error}: no {vendor} GPU is offered")
        if self._nvidia.absent and self._amd.absent:
            notes = ["neither nvidia-smi nor rocm-smi is on PATH, so this host has no GPU to offer"]
        return Inventory(None, (), tuple(notes) or ("the GPU tools list no GPU",))

    def _ask_nvidia(self, deadline: float) -> tuple[list[Gpu], str | None]:
        question = self._nvidia
        text = question.answer(deadline)
        if text is None and not question.absent and time.monotonic() < deadline:
            question = Question(OLD_NVIDIA, self._environ)
            text = question.answer(deadline)
        if text is None:
            return [], None if question.absent else question.error
        gpus = parse_nvidia(text)
        return gpus, None if gpus else "nvidia-smi lists no GPU that can be read"

    def _ask_amd(self, deadline: float) -> tuple[list[Gpu], str | None]:
        text = self._amd.answer(deadline)
        if text is None:
            return [], None if self._amd.absent else self._amd.error
        gpus = parse_amd(text)
        return gpus, None if gpus else "rocm-smi lists no GPU that can be read"


def clean(text: str) -> str:
    """A tool's text, printable and short enough for a label or a line."""
    printable = "".join(char if char.isprintable() else "?" for char in text.strip())
    return printable.encode()[:MAX_TEXT_BYTES].decode(errors="ignore")


def _label(name: str, vendor: str, mib: float | None, arch: str) -> str:
    named = name if name.upper().startswith(vendor) else f"{vendor} {name}"
    # Tools tell what is left of the card's memory in MiB: the nearest GiB is the figure on its box.
    facts = [*([f"{round(mib / 1024)}GB"] if mib else []), *([arch] if arch else [])]
    return clean(named + (f" ({', '.join(facts)})" if facts else ""))


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,6})?", text) else None


def parse_nvidia(text: str) -> list[Gpu]:
    """The GPUs of nvidia-smi's CSV, in its order; rows that cannot be read are left out."""
    gpus = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        index = _number(row[0].strip()) if len(row) >= 4 else None
        if index is None or index != int(index):
            continue
        uuid, name, memory = (cell.strip() for cell in row[1:4])
        capability = re.fullmatch(r"([0-9]{1,3})\.([0-9]{1,2})", row[4].strip()) if len(row) > 4 else None
        digits = "".join(capability.groups()) if capability else ""
        label = _label(name, "NVIDIA", _number(memory), f"sm_{digits}" if digits else "")
        gpus.append(Gpu(int(index), clean(uuid), label, f"sm{digits}" if digits else ""))
    return gpus


def parse_amd(text: str) -> list[Gpu]:
    """The GPUs of rocm-smi's JSON, by card number; its keys have changed their case over the years."""
    try:
        cards = json.loads(text)
    except (ValueError, RecursionError):
        return []
    found = []
    for card, facts in cards.items() if isinstance(cards, dict) else ():
        number = re.fullmatch(r"card([0-9]{1,4})", str(card))
        if number is not None and isinstance(facts, dict):
            found.append(_amd_gpu(int(number[1]), {str(key).lower(): str(value) for key, value in facts.items()}))
    return sorted(found, key=lambda gpu: gpu.index)


def _amd_gpu(index: int, facts: Mapping[str, Any]) -> Gpu:
    def first(*keys: str) -> str:
        return next((facts[key] for key in keys if facts.get(key) not in (None, "", "N/A")), "")

    name = first("card series", "card model", "device name") or "GPU"
    total = _number(first("vram total memory (b)"))
    arch = first("gfx version")
    arch = arch if re.fullmatch(r"gfx[0-9a-f]{3,6}", arch) else ""
    unique = first("unique id").removeprefix("0x")
    uuid = f"GPU-{unique}" if re.fullmatch(r"[0-9a-fA-F]{1,32}", unique) else ""
    return Gpu(index, uuid, _label(name, "AMD", total / (1 << 20) if total else None, arch), arch)


def installed_nccl(paths: Sequence[str]) -> tuple[int, int, int] | None:
    """The NCCL beside an installed torch, by the names of files on ``paths``; None where there is none."""
    for path in paths:
        folder = Path(path or ".")
        if not (folder / "torch").is_dir():
            continue
        versions = [match for entry in folder.glob("nvidia_nccl_cu*.dist-info") if (match := _NCCL.match(entry.name))]
        if len(versions) == 1:
            major, minor, patch = (int(part) for part in versions[0].groups())
            return major, minor, patch
    return None
