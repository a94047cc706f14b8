"""What GPUs this machine has, asked of the vendors' tools, and which NCCL an installed torch brings.

No torch is imported and no CUDA context is made.  The tools run while the
program starts, and one that hangs is ended at the deadline.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from flodl_tw.agent.devices import Gpu, Inventory
from flodl_tw.agent.gpu_answers import clean, parse_amd, parse_amd_smi, parse_nvidia

PIPE_BYTES: Final = 256 * 1024
"""What a tool's pipe holds, and so the longest answer; a host with the most GPUs says some ten KiB."""
ANSWER_SECS: Final = 60.0
"""What the tools have for their answers: after a cold boot a driver takes half a minute to load."""
SLOW_SECS: Final = 5.0
"""After this a line says who is waited for."""
PLACES: Final = ("/usr/bin", "/usr/local/bin", "/usr/lib/wsl/lib", "/usr/local/nvidia/bin", "/opt/rocm/bin")
"""Where the tools usually are; services, slim images and WSL have not all of them on PATH."""
END_SECS: Final = 0.5
"""What a killed tool gets to be gone; one that its driver holds is left behind."""
NVIDIA: Final = ("nvidia-smi", "--format=csv,noheader,nounits", "--query-gpu=index,uuid,name,memory.total,compute_cap")
OLD_NVIDIA: Final = (*NVIDIA[:2], "--query-gpu=index,uuid,name,memory.total")
"""Drivers before 2021 know no compute_cap, and refuse the whole question."""
INFOROM_STATUS: Final = 14
"""nvidia-smi's status where a card's infoROM is damaged: a warning, after a whole answer."""
AMD: Final = ("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showuniqueid", "--json")
AMD_SMI: Final = ("amd-smi", "static", "--asic", "--vram", "--json")
AMD_SMI_LIST: Final = ("amd-smi", "list", "--json")
"""rocm-smi's successor, which tells the kernel's nodes in another answer."""
OUR_PREFIX: Final = "FLODL_"
"""Tools have no use for our variables, some of which hold secrets."""

NO_TOOL: Final = "nvidia-smi, rocm-smi and amd-smi are neither on PATH nor where they usually are: no GPU is known"
_NCCL = re.compile(r"nvidia_nccl_cu[0-9]+-([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})(?![0-9])")


class Tool:
    """One run of a tool, under way; its pipe holds what it prints, and one that prints more than it holds hangs."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        self.name = words[0]
        self.error: str | None = None
        """Why there is no answer, or what was wrong besides; None as well where there is no such tool."""
        self.late = False
        """Whether it has not answered in time."""
        self._process: subprocess.Popen[bytes] | None = None
        found = shutil.which(self.name, path=os.pathsep.join((environ.get("PATH", os.defpath), *PLACES)))
        if found is not None:
            try:
                self._process = subprocess.Popen(  # noqa: S603  found on the user's own PATH or the system's
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

    @property
    def found(self) -> bool:
        """Whether there is such a tool, and it runs."""
        return self._process is not None

    def is_slow(self) -> bool:
        """Whether it still runs after a while."""
        try:
            return self._process is not None and self._process.wait(SLOW_SECS) is None
        except subprocess.TimeoutExpired:
            return True

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
            self.late = True
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
    """The vendors' tools, started at once; ``inventory`` waits for them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._nvidia, self._amd = Tool(NVIDIA, environ), Tool(AMD, environ)
        self._amd_list: Tool | None = None
        if not self._amd.found:
            self._amd, self._amd_list = Tool(AMD_SMI, environ), Tool(AMD_SMI_LIST, environ)
        atexit.register(self.close)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._nvidia.end()
        self._amd.end()
        if self._amd_list is not None:
            self._amd_list.end()

    def inventory(self, say: Callable[[str], None], timeout: float = ANSWER_SECS) -> Inventory:
        """This machine's GPUs; takes ``timeout`` seconds at most, and half a second for each tool to be ended."""
        deadline = time.monotonic() + timeout
        notes: list[str] = []
        try:
            for vendor, tool, ask in (("NVIDIA", self._nvidia, self._ask_nvidia), ("AMD", self._amd, self._ask_amd)):
                if deadline - time.monotonic() > SLOW_SECS and tool.is_slow():
                    say(f"{tool.name} is slow to answer; it is waited for, {timeout:g} s in all")
                gpus, note = ask(deadline)
                if note is not None:
                    notes.append(note if gpus else f"{note}: no {vendor} GPU is known")
                if gpus:
                    return Inventory(vendor, tuple(gpus), tuple(notes))
        finally:
            self.close()
        silent = not (self._nvidia.found or self._amd.found)
        late = self._nvidia.late or self._amd.late
        return Inventory(None, (), tuple(notes) or (NO_TOOL,), silent=silent, late=late)

    def _ask_nvidia(self, deadline: float) -> tuple[list[Gpu], str | None]:
        tool = self._nvidia
        text = tool.answer(deadline)
        if tool.error is not None and "compute_cap" in tool.error + text:
            self._nvidia = tool = Tool(OLD_NVIDIA, self._environ)
            text = tool.answer(deadline)
        if tool.error is not None:
            return [], tool.error
        other = [line for line in text.split("\n") if line.strip() and not parse_nvidia(line)]
        return parse_nvidia(text), f"nvidia-smi says {clean(other[0])!r}" if other else None

    def _ask_amd(self, deadline: float) -> tuple[list[Gpu], str | None]:
        # It fails where one card does not tell one thing, and has told the rest.
        text = self._amd.answer(deadline)
        listed = None if self._amd_list is None else self._amd_list.answer(deadline)
        gpus = parse_amd(text) if listed is None else parse_amd_smi(text, listed)
        said = self._amd.error or (f"{self._amd.name} says {clean(text.splitlines()[0])!r}" if text else None)
        return gpus, None if gpus else said


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
