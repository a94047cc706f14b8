"""The ``join:`` block of a flodl user's ``fdl.yml``: what ``flodl-tw join`` is told there.

Its keys mean what they mean to ``fdl join``: nothing in them is expanded, a
path is relative to the working folder, and a controller without a port has
flodl's.  The rest of the file is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from flodl_tw.core.addresses import FDL_PORT, MAX_PORT, parse_endpoint
from flodl_tw.core.tokens import HIDDEN
from flodl_tw.fdl.cluster import read_devices
from flodl_tw.fdl.yaml_document import read_document
from flodl_tw.fdl.yaml_nodes import Block, Value
from flodl_tw.options import Placed
from flodl_tw.state_folder import readable_token

UNUSED: Final = ("ssh", "bin", "source", "libtorch", "data_source", "sig_probe")
"""Keys for what ``fdl join`` does itself: it fetches, builds and mounts, and opens a tunnel."""


@dataclass(frozen=True, slots=True)
class JoinFile:
    """What the block says.  ``texts`` are those of options, by long name; ``notes`` are lines for people.

    What is given elsewhere as well is not looked at here: a token may be a place-holder then.
    """

    block: Block = field(repr=False)
    texts: Mapping[str, Placed]
    args: tuple[str, ...]
    notes: tuple[str, ...]

    def token(self) -> bytes | None:
        """The token; None where the file has none."""
        return self.block.get("token", lambda value: value.token(HIDDEN))

    def controller(self) -> tuple[str, int] | None:
        """Host and port of the controller; None where the file names none."""
        value = self.block.values.get("controller")
        if value is None:
            return None
        if "ssh" in self.block.values:
            # The address is the controller's as that tunnel's far end sees it.
            limit = "it asks for a tunnel to the controller, and flodl-tw opens none"
            raise self.block.values["ssh"].location.error(limit, "open it yourself, and give its end as HOST[:PORT]")
        try:
            return parse_endpoint(value.plain(), FDL_PORT)
        except ValueError:
            limit = f"it is no HOST or HOST:PORT with a port from 1 to {MAX_PORT}"
            raise value.error(limit, "write the address that workers dial") from None

    def command(self, program: Sequence[str]) -> tuple[list[str], list[str]]:
        """The program with its arguments, and notes: the file's are those of a program that is given none."""
        if len(program) == 1:
            return [*program, *self.args], []
        if not self.args or not program:
            return list(program), []
        place = self.block.values["args"].location
        return list(program), [f"{place}: it is not used, since PROGRAM has arguments of its own"]


def read_join_file(path: str, option: str) -> JoinFile:
    """What the file says; SettingError where it can't be used.  ``option`` is what named it."""
    root = read_document(path, option, "join")
    value = root.entries().get("join")
    if value is None or value.kind == "null":
        raise root.location.error("it has no join: block", "name the file that has one")
    block = value.block((*KEYS, *UNUSED))
    warning = readable_token(option, path) if "token" in block.values else None
    unused = [key for key in block.values if key in UNUSED]
    note = f"{block.location}: flodl-tw has no use for {', '.join(unused)}" if unused else None
    inherits = root.entries().get("inherit-from")
    merged = None
    if inherits is not None and inherits.kind != "null":
        merged = f"{inherits.location}: it is not merged: what this worker is to know stands in this file alone"
    return JoinFile(
        block=block,
        texts=block.options(_OPTIONS),
        args=tuple(item.plain() for item in block.get("args", Value.items) or ()),
        notes=tuple(line for line in (note, merged, warning) if line is not None),
    )


def _devices(value: Value) -> str:
    devices = read_devices(value)
    # An empty list leaves it to the agent, which offers all.
    return "all" if devices is None else ",".join(map(str, devices))


_OPTIONS: Final[Mapping[str, Callable[[Value], object]]] = {
    "host": Value.word,
    "devices": _devices,
    "persist": Value.flag,
    # Without a look at the disk: a link stays one.
    "data_path": lambda value: Path(value.word()).absolute(),
    # As Python writes it, which reads as the same number again.
    "gpu_ram_share": lambda value: repr(value.share()).removesuffix(".0"),
}
"""What the options' keys hold, as the options' texts."""
KEYS: Final = ("controller", "token", *_OPTIONS, "args")
"""The keys that are used."""
