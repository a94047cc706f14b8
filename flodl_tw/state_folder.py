"""The folder that a controller keeps on disk: a lock, and the token that it made.

One folder a port, mode 0700, so that two controllers on one machine never
share a token by accident.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from flodl_tw.core.errors import SettingError
from flodl_tw.core.tokens import TOKEN_VARIABLE, parse_token, shown_path
from flodl_tw.core.wire import SALT_BYTES
from flodl_tw.options import OptionReader, variable


def given_token(given: OptionReader) -> tuple[bytes | None, str | None]:
    """The token of ``--token-file``, or else of its variable, and the file or variable; it is never an argument."""
    path = given.get("token-file")
    if path is not None:
        return read_token_file(path, given.source("token-file")), shown_path(path)
    text = given.variable(TOKEN_VARIABLE)
    return (None, None) if text is None else (parse_token(text, TOKEN_VARIABLE), TOKEN_VARIABLE)


def read_token_file(path: str, option: str = "--token-file") -> bytes:
    """The token in a file that only its owner can read; anything else is a SettingError that names ``option``."""
    shown = shown_path(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        # Opening must not wait for a pipe's writer; reading may.
        os.set_blocking(descriptor, True)
        with open(descriptor, encoding="ascii", errors="replace") as file:
            status = os.fstat(file.fileno())
            text = file.read(4096)
    except OSError as error:
        limit = f"it cannot be read ({error.strerror})"
        raise SettingError(option, shown, limit, "check the path and its owner") from None
    if stat.S_ISREG(status.st_mode) and status.st_mode & 0o077:
        limit = f"others can read it (mode {stat.S_IMODE(status.st_mode):04o}), and a token is a credential"
        raise SettingError(option, shown, limit, f"chmod 600 {shown}")
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
        raise SettingError("--state-dir", "", limit, "name a folder of your own") from None


def lock_folder(base: Path, port: int) -> Path:
    """The folder of one port, which is this process's alone until it ends."""
    path = base / str(port)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        limit = f"it cannot be used ({error.strerror})"
        raise SettingError("--state-dir", path, limit, "name a folder of your own") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        limit, way_out = "another controller of this port holds its lock", "end that one, or give each its own"
        raise SettingError("--state-dir", path, limit, f"{way_out} --state-dir") from None
    return path


def made_token(path: Path) -> bytes:
    """The token that was made at an earlier start, or one that is made now; mode 0600."""
    try:
        if not path.exists():
            make_token_file(str(path))
    except OSError as error:
        raise _unwritable("--state-dir", path, error) from None
    return read_token_file(str(path), "--state-dir")


def _unwritable(option: str, path: Path, error: OSError) -> SettingError:
    return SettingError(option, path, f"it cannot be written ({error.strerror})", "check the folder and its owner")


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a reader sees all of it or nothing."""
    part = _part(path)
    part.write_text(text, encoding="ascii")
    part.replace(path)


def check_writable(option: str, path: Path) -> None:
    """Raise SettingError unless ``write_atomically`` can write ``path`` later, when nobody reads an error any more."""
    part = _part(path)
    try:
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            # A file takes its place, and whatever else stands there would be gone: a device, a pipe, a link.
            raise OSError(errno.EEXIST, "something that is no regular file is there")
        part.touch()
        part.unlink()
    except OSError as error:
        raise _unwritable(option, path, error) from None
