"""``token``: a file with a new token, and how controller and workers are told of it."""

from __future__ import annotations

import errno
import os
import shlex
import socket
from collections.abc import Mapping
from typing import Final

from flodl_tw.cli.terminal import Printer, say
from flodl_tw.core.addresses import DEFAULT_PORT, show_endpoint
from flodl_tw.core.errors import SettingError
from flodl_tw.core.log_text import printable
from flodl_tw.core.phrases import join_commands
from flodl_tw.core.tokens import shown_path
from flodl_tw.state_folder import make_token_file

DEFAULT_FILE: Final = "run.token"
FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def token(options: Mapping[str, object], program: list[str], environ: Mapping[str, str]) -> int:
    """Make the file; status 1 where the disk is full, or the lines cannot be written."""
    given = options.get("file")
    path = DEFAULT_FILE if given is None else str(given)
    if shown_path(path) != path:
        limit = "a file of this name could not be shown, and a token is made here, not given"
        raise SettingError("FILE", shown_path(path), limit, f"name a file such as {DEFAULT_FILE}")
    try:
        make_token_file(path)
    except FileExistsError:
        limit = "it is there already, and is left as it is"
        raise SettingError("FILE", path, limit, "name another file, or use that one") from None
    except OSError as error:
        full = error.errno in FULL
        way_out = "make room there, or name a file elsewhere" if full else "name a file in a folder of yours"
        refused = SettingError("FILE", path, f"it cannot be made ({error.strerror})", way_out)
        if not full:
            raise refused from None
        say(str(refused))
        return 1
    printer = Printer()
    for line in lines(path, socket.gethostname()):
        printer.show(line)
    return 1 if printer.failed else 0


def lines(path: str, host: str) -> tuple[str, str, str]:
    """What to do with the file, if its controller will run on ``host``; never the token."""
    word = shlex.quote(path)
    join, _ = join_commands(show_endpoint(host, DEFAULT_PORT), True, word)
    return (
        f"a new token is in {printable(os.path.abspath(path))}, for its owner alone; each worker needs a copy",
        f"the controller: twistd -n --pidfile= flodl-controller --token-file {word}",
        f"each worker: {join}",
    )
