"""Where a host's ranks leave the exceptions that they die of: torch's ``@record`` writes there."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from flodl_tw.agent.guardian import FOLDERS
from flodl_tw.core.reports import MAX_ERROR_FILE, RankError, read_error_file

READING: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
NAMED: Final = f"{FOLDERS}{os.urandom(8).hex()}-"
"""How the names of this process's folders begin, and those of no other: a temporary directory may be shared."""


def beginning() -> str | None:
    """What the paths of all our folders begin with; None where there is no place for any.

    So the guardian knows what to remove, should we be killed.
    """
    try:
        return os.path.join(tempfile.gettempdir(), NAMED)
    except OSError:
        return None


class ErrorFiles:
    """A folder of this world's own, for this user alone, with a file a rank; none until it is opened."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def open(self, say: Callable[[str], None]) -> None:
        """Make the folder; a host where that cannot be does without."""
        try:
            self._folder = Path(tempfile.mkdtemp(prefix=NAMED))
        except OSError as error:
            say(f"no folder for error files can be made ({error.strerror}): exceptions of ranks are not reported")

    def path(self, rank: int) -> str | None:
        """The file of a rank of the world."""
        return None if self._folder is None else str(self._folder / f"rank.{rank:03d}.json")

    def read(self, rank: int) -> RankError | None:
        """What the rank has left there; what cannot be read says nothing."""
        path = self.path(rank)
        if path is None:
            return None
        try:
            data = _read(path)
        except OSError:
            return None
        return read_error_file(data) if len(data) <= MAX_ERROR_FILE else None

    def close(self) -> None:
        """Remove it."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _read(path: str) -> bytes:
    """A file's bytes, one more than is allowed at most; none of what is no file: a rank may put anything there."""
    descriptor = os.open(path, READING)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_ERROR_FILE + 1)
    finally:
        os.close(descriptor)
