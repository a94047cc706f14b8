"""The files of a host's ranks: what each printed, byte for byte, and the exception that it died of."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from flodl_tw.agent.guardian import FOLDERS
from flodl_tw.agent.output import ERR, OUT
from flodl_tw.core.reports import MAX_ERROR_FILE, RankError, read_error_file

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


class LogFiles:
    """``rank.NNN.out`` and ``rank.NNN.err`` in the folder of ``--log-dir``, appended to; none where there is none."""

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
            self._open[path] = _open_log(path)
        return self._open[path]


class ErrorFiles:
    """Where ranks leave the exceptions that they die of: torch's ``@record`` writes there.

    A folder of this world's own, for this user alone, with a file a rank; none until it is opened.
    """

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
            with open(_open_regular(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                data = file.read(MAX_ERROR_FILE + 1)
        except OSError:
            return None
        return read_error_file(data) if len(data) <= MAX_ERROR_FILE else None

    def close(self) -> None:
        """Remove it."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _open_log(path: Path) -> int:
    """A descriptor of a log file: a new one, or an older one that is ours or its folder's owner's.

    In a folder where others may write, a link or a file of theirs would have what our ranks print put elsewhere.
    """
    with contextlib.suppress(FileExistsError):
        return _open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link")
    descriptor = _open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
    owner = os.fstat(descriptor).st_uid
    # Where a file server makes root nobody, what root has made is nobody's, and so is its folder.
    if owner not in (os.geteuid(), os.stat(path.parent).st_uid):
        os.close(descriptor)
        raise PermissionError(errno.EPERM, f"it is the user's with the id {owner}")
    return descriptor


def _open_regular(path: str | Path, flags: int) -> int:
    """A descriptor of a regular file.  A rank may put anything there, and a pipe without a peer must not hold us up."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EEXIST, "something that is no regular file is there")
    return descriptor
