"""The files of ``--log-dir``: what each rank printed, byte for byte."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from flodl_tw.agent.children import ERR, OUT


class Logs:
    """Files ``rank.NNN.out`` and ``rank.NNN.err`` in a folder, appended to; none where there is no folder."""

    def __init__(self, folder: Path | None, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._open: dict[Path, int] = {}

    def files(self, rank: int) -> Mapping[int, int]:
        """The descriptors for a rank's output and errors; what cannot be opened is said, and left out."""
        if self._folder is None:
            return {}
        found = {}
        for number, ending in ((OUT, "out"), (ERR, "err")):
            path = self._folder / f"rank.{rank:03d}.{ending}"
            try:
                found[number] = self._descriptor(path)
            except OSError as error:
                self._say(f"--log-dir: {path} cannot be opened ({error.strerror}); going on without it")
        return found

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            # What has the name may be anything; a pipe nobody reads must not hold us up.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(path, flags, 0o644)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise OSError(errno.EEXIST, "something that is no regular file is there")
            self._open[path] = descriptor
        return self._open[path]
