"""flodl-tw: the front door of distributed-training clusters.

``from flodl_tw import ControllerServer, ControllerSettings`` is the way into
it for a Twisted application; ``docs/embedding.md`` has an example.

tap.py           the options of ``twistd flodl-controller``
server.py        ControllerServer, the one place where the parts are joined
controller.py    the current run, when it is evaluated, what follows
run.py           one run, and everything that a late frame of it may touch
settings.py      option texts to ControllerSettings; options.py reads them
core/            the wire, the membership, the window, the world, torch's store; no network
channels/        the protocols: the front door, then what follows four bytes
web/             the status channel: state.json, the page, the operator's actions
fdl/             flodl's own files and orders
agent/           the worker's side: dial, join, the host's ranks, their end
cli/             the ``flodl-tw`` command
testing/         fakes for tests and demos: hosts, links, a controller on a clock
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flodl_tw.server import ControllerServer
    from flodl_tw.settings import ControllerSettings

__all__ = ["ControllerServer", "ControllerSettings"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # What needs no server (core, the command line) must not wait for Twisted.
    if name == "ControllerServer":
        from flodl_tw.server import ControllerServer

        return ControllerServer
    if name == "ControllerSettings":
        from flodl_tw.settings import ControllerSettings

        return ControllerSettings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
