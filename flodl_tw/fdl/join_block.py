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
from flodl_tw.fdl.cluster import read_devices, read_token
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
        return self.block.get("token", lambda value: read_token(value, "(not shown)"))

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
    return JoinFile(
        block=block,
        texts=_texts(block),
        args=tuple(item.plain() for item in block.get("args", Value.items) or ()),
        notes=(*_unused(block), *([] if warning is None else [warning])),
    )


def _texts(block: Block) -> Mapping[str, Placed]:
    texts = {}
    for key, read in _OPTIONS.items():
        text = block.get(key, read)
        if text is not None:
            texts[key.replace("_", "-")] = Placed(text, str(block.values[key].location))
    return texts


def _unused(block: Block) -> list[str]:
    keys = [key for key in block.values if key in UNUSED]
    return [f"{block.location}: flodl-tw has no use for {', '.join(keys)}"] if keys else []


# What the options' keys hold, as the options' texts


def _name(value: Value) -> str:
    text = value.plain()
    if not text.strip():
        raise value.error("it must not be blank", "give a name, or drop it")
    return text


def _devices(value: Value) -> str | None:
    devices = read_devices(value)
    # An empty list leaves it to the agent, which offers all.
    return "all" if devices is None else ",".join(map(str, devices)) or None


def _persist(value: Value) -> str:
    return str(int(value.flag()))


def _folder(value: Value) -> str:
    # Without a look at the disk: a link stays one.
    return str(Path(_name(value)).absolute())


def _share(value: Value) -> str:
    # As Python writes it: it reads the same number again.
    return repr(value.share()).removesuffix(".0")


_OPTIONS: Final[Mapping[str, Callable[[Value], str | None]]] = {
    "host": _name,
    "devices": _devices,
    "persist": _persist,
    "data_path": _folder,
    "gpu_ram_share": _share,
}
KEYS: Final = ("controller", "token", *_OPTIONS, "args")
"""The keys that are used."""
