"""The folder that a controller keeps on disk: a lock, and the token that it made.

One folder a machine and port, mode 0700, so that two controllers never share a
token by accident.  It is made where a token has to be kept, and not before.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TextIO

from flodl_tw.core.errors import SettingError
from flodl_tw.core.tokens import TOKEN_VARIABLE, parse_token, shown_path
from flodl_tw.core.wire import SALT_BYTES
from flodl_tw.options import OptionReader, variable

Tell = Callable[[str], None]
"""Is given the line of a warning."""
_NO_LOCKS: Final = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What file systems say that have no locks, or whose lock server is away."""
_NOBODY: Final[Tell] = lambda line: None  # noqa: E731


def given_token(given: OptionReader, tell: Tell = _NOBODY) -> tuple[bytes | None, str | None]:
    """The token of ``--token-file``, or else of its variable, and the file or variable; it is never an argument."""
    path = given.get("token-file")
    if path is not None:
        kept = variable(given.environ, "CREDENTIALS_DIRECTORY")
        return read_token_file(path, given.source("token-file"), tell, kept), shown_path(path)
    text = given.variable(TOKEN_VARIABLE)
    return (None, None) if text is None else (parse_token(text, TOKEN_VARIABLE), TOKEN_VARIABLE)


def read_token_file(
    path: str, option: str = "--token-file", tell: Tell = _NOBODY, credentials: str | None = None
) -> bytes:
    """The token in a file; where it cannot be used, a SettingError that names ``option``.

    A file that others can read is refused where its mode can be mended.  Secrets that a system mounts have the mode
    that it gives them (``credentials`` is systemd's folder of them), and are taken with a warning.
    """
    shown = shown_path(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        # Opening must not wait for a pipe's writer; reading may.
        os.set_blocking(descriptor, True)
        with open(descriptor, encoding="ascii", errors="replace") as file:
            status = os.fstat(file.fileno())
            read_only = bool(os.fstatvfs(file.fileno()).f_flag & os.ST_RDONLY)
            text = file.read(4096)
    except OSError as error:
        limit = f"it cannot be read ({error.strerror})"
        raise SettingError(option, shown, limit, "check the path and its owner") from None
    if stat.S_ISREG(status.st_mode) and status.st_mode & 0o077:
        limit = f"others can read it (mode {stat.S_IMODE(status.st_mode):04o}), and a token is a credential"
        given = credentials is not None and Path(path).resolve().is_relative_to(Path(credentials).resolve())
        if not (read_only or given) and (status.st_uid in (os.geteuid(), 0) or status.st_mode & 0o022):
            raise SettingError(option, shown, limit, f"chmod 600 {shown}")
        tell(f"{option} {shown}: {limit}; it is used, since its mode is not ours to change")
    return parse_token(text, option, shown)


def readable_token(option: str, path: str) -> str | None:
    """A warning where others can read a file of flodl's with a token: it usually is readable, so it is no refusal."""
    with contextlib.suppress(OSError):
        if os.stat(path).st_mode & 0o077:
            return f"{option} {shown_path(path)}: others can read the token in it; chmod 600 it, or use --token-file"
    return None


def make_token_file(path: str) -> None:
    """Make a token in a file that is not there yet, its owner's alone from the first moment.

    Raises OSError where that cannot be; no part of a file is left then.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            # An umask may have taken the owner's bits, and some file systems know no owners.
            os.fchmod(descriptor, 0o600)
            if os.fstat(descriptor).st_mode & 0o077:
                raise OSError(errno.EPERM, "others can read whatever is there")
            file.write(secrets.token_hex(SALT_BYTES) + "\n")
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """Where state goes unless ``--state-dir`` says otherwise."""
    # systemd gives a list where a unit has several; the first is as good as any.
    service = (variable(environ, "STATE_DIRECTORY") or "").split(":")[0]
    if service:
        return Path(service)
    home = variable(environ, "XDG_STATE_HOME")
    if home and os.path.isabs(home):
        return Path(home, "flodl-tw")
    try:
        return Path.home() / ".local" / "state" / "flodl-tw"
    except RuntimeError:
        limit = "this user has no home folder for the default"
        raise SettingError(
            "--state-dir", "", limit, "name a folder of your own, or give the token by --token-file"
        ) from None


def kept_token(base: Path | None, environ: Mapping[str, str], port: int, tell: Tell) -> tuple[bytes, Path]:
    """The token of this machine's controller of ``port``, made at its first start, and the file that has it."""
    base = base or default_state_dir(environ)
    folder = lock_folder(base, port, tell)
    path, older = folder / "token", base / str(port) / "token"
    if not os.path.lexists(path) and os.path.lexists(older):
        # Earlier releases kept it by port alone.
        path = older
    return made_token(path), path


def lock_folder(base: Path, port: int, tell: Tell = _NOBODY) -> Path:
    """The folder of this machine and one port, which is this process's alone until it ends."""
    name = re.sub("[^0-9A-Za-z._-]", "_", socket.gethostname())
    path = base / f"{name}-{port}"
    try:
        if base.is_symlink():
            _own(base.lstat(), root=True)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _open_lock(path)
    except OSError as error:
        limit = f"it cannot be used ({error.strerror})"
        way_out = "name a folder of your own, or give the token by --token-file"
        raise SettingError("--state-dir", path, limit, way_out) from None
    _take(lock, path, tell)
    return path


def _take(lock: int, path: Path, tell: Tell) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if error.errno in _NO_LOCKS:
            tell(f"--state-dir {path}: no lock can be had there ({error.strerror}), so nothing keeps a second one out")
            return
        limit, way_out = "another controller of this port holds its lock", "end that one, or give each its own"
        raise SettingError("--state-dir", path, limit, f"{way_out} --state-dir") from None


def _open_lock(path: Path) -> int:
    """A descriptor of the lock of a folder that is no link, and ours: where others may write, both may be theirs."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        raise NotADirectoryError(errno.ENOTDIR, "it is a link, or no folder") from None
    try:
        _own(os.fstat(folder))
        os.fchmod(folder, 0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open("lock", flags, 0o600, dir_fd=folder)
    finally:
        os.close(folder)


def _own(status: os.stat_result, *, root: bool = False) -> None:
    """Raise OSError unless the thing is this user's; with ``root``, or root's."""
    if status.st_uid != os.geteuid() and not (root and status.st_uid == 0):
        raise PermissionError(errno.EPERM, f"it is the user's with the id {status.st_uid}")


def made_token(path: Path) -> bytes:
    """The token that was made at an earlier start, or one that is made now; mode 0600."""
    try:
        if not os.path.lexists(path):
            make_token_file(str(path))
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            raise OSError(errno.ELOOP, "it is a link")
        _own(status)
    except OSError as error:
        raise _unwritable("--state-dir", path, error) from None
    return read_token_file(str(path), "--state-dir")


def _unwritable(option: str, path: Path, error: OSError) -> SettingError:
    return SettingError(option, path, f"it cannot be written ({error.strerror})", "check the folder and its owner")


def _new_part(path: Path) -> TextIO:
    """A new file beside ``path``, opened through no link: where others may write, they may guess its name."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    # An earlier process of this id may have been killed with it.
    part.unlink(missing_ok=True)
    return part.open("x", encoding="ascii")


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a reader sees all of it or nothing."""
    file = _new_part(path)
    part = Path(file.name)
    try:
        with file:
            file.write(text)
        part.replace(path)
    except BaseException:
        # A full disk, say, which a file of no use would fill further.
        part.unlink(missing_ok=True)
        raise


def check_writable(option: str, path: Path) -> None:
    """Raise SettingError unless ``write_atomically`` can write ``path`` later, when nobody reads an error any more."""
    try:
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            # A file takes its place, and whatever else stands there would be gone: a device, a pipe, a link.
            raise OSError(errno.EEXIST, "something that is no regular file is there")
        with _new_part(path) as file:
            os.unlink(file.name)
    except OSError as error:
        raise _unwritable(option, path, error) from None
