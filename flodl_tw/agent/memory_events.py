"""How often the kernel has killed for want of memory, as this process's control group counts it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path("/sys/fs/cgroup")
OWN: Final = Path("/proc/self/cgroup")
USUAL: Final = "SIGKILL usually comes from the kernel's OOM killer"


class OomKills:
    """The kills since this was made, in the group that this process and its ranks are in."""

    def __init__(self, root: Path = ROOT, own: Path = OWN) -> None:
        self._root, self._own = root, own
        self._before = self._count()

    def explained(self) -> str:
        """What a SIGKILL of nobody known most likely is."""
        now = self._count()
        if now is None or self._before is None:
            return USUAL
        return f"{USUAL}, and memory.events of its cgroup counts {now - self._before} oom_kill since the ranks began"

    def _count(self) -> int | None:
        """The counter, or None where it cannot be read: there is none outside cgroup v2, nor in its root."""
        try:
            group = re.search(r"^0::/(.*)$", self._own.read_text(), re.MULTILINE)
            events = "" if group is None else (self._root / group[1] / "memory.events").read_text()
        except OSError:
            return None
        found = re.search(r"^oom_kill ([0-9]+)$", events, re.MULTILINE)
        return None if found is None else int(found[1])
