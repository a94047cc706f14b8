"""What WorldFormed told this host of its world, checked.

The controller is not trusted here: what it sent is checked whole before any
process starts, and a fault is one ValueError that says which part is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from flodl_tw.core.addresses import is_address
from flodl_tw.core.fields import Fields, ShapeError, compact, decode_hex_object
from flodl_tw.core.log_text import MAX_TEXT_BYTES
from flodl_tw.core.messages import WorldFormed
from flodl_tw.core.world import wrong_environ

CLUSTER_VARIABLE: Final = "FLODL_INTERNAL_CLUSTER_JSON"
RELAY_VARIABLE: Final = "FLODL_INTERNAL_RELAY_JSON"
GROUP_KEY: Final = "flodl_tw"
"""The envelope's object of ours; a real flodl launcher has none."""

MAX_WORLD: Final = 1 << 31
SALT_BYTES: Final = 16
MAX_VARIABLE: Final = 128 * 1024
"""Bytes that Linux takes in one variable with its name; a child with a longer one cannot be started."""


@dataclass(frozen=True, slots=True)
class Group:
    """The hosts of the world as our controller numbers them.

    ``store``: it serves torch's store on its port; ``reports``: it takes the
    exceptions that ranks died of; ``heartbeats``: it takes those on the link.
    ``rank0_address`` is where the host of rank 0 is, ``environ`` what the
    operator gives to ranks that have no other.
    """

    group_rank: int
    group_world_size: int
    run_id: str
    store: bool = False
    reports: bool = False
    heartbeats: bool = False
    rank0_address: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What WorldFormed told this host, checked.

    ``ranks`` are the final global ranks, one a device, and ``controller`` is
    where this host dialed it.  ``envelope_hex`` is what the ranks get: as
    received, with that controller and the host's own settings; ``relay_hex``
    is the same for its relay, where there is one.  Both hold the world's
    salt, a credential.
    """

    host: str
    ranks: tuple[int, ...]
    world_size: int
    num_workers: int
    controller: tuple[str, int]
    envelope_hex: str = field(repr=False)
    group: Group | None
    interface: str = ""
    """The network interface that NCCL is to use here, where the operator has named one."""
    relay_hex: str | None = field(default=None, repr=False)


def read_world(
    formed: WorldFormed,
    *,
    devices: int,
    dialed: tuple[str, int],
    data_path: str | None = None,
    gpu_ram_share: float | None = None,
) -> Assignment:
    """This host's assignment, for its count of ``devices``; raises ValueError for what no rank can be started with.

    ``dialed`` is the controller as this host reached it.  Keys that are not known are kept.
    """
    envelope = decode_hex_object(formed.envelope_hex, "the envelope")
    fields = Fields(envelope, "the envelope's ")
    world_size = fields.whole("world_size", 1, MAX_WORLD)
    num_workers = fields.whole("num_workers", 1, world_size)
    controller, worker = fields.child("controller"), fields.child("worker")
    host, ranks = _host(worker), worker.wholes("ranks", 0, world_size - 1, count=devices)
    if len(set(ranks)) != len(ranks):
        raise worker.wrong("ranks", f"a list of different ranks, not {list(ranks)}")
    Fields(envelope, "the envelope's ", shows=False).from_hex("salt", SALT_BYTES)
    own: dict[str, object] = {"data_path": data_path, "gpu_ram_share": gpu_ram_share}
    told = {
        **envelope,
        "controller": {**controller.values, "host": dialed[0], "port": dialed[1]},
        "worker": {**worker.values, **{key: value for key, value in own.items() if value is not None}},
    }
    encoded = _encode(told, "the envelope", CLUSTER_VARIABLE)
    relay_hex = None
    if formed.relay_spec_hex is not None:
        spec = decode_hex_object(formed.relay_spec_hex, "the relay's spec")
        told = {**spec, "controller_host": dialed[0], "controller_port": dialed[1]}
        relay_hex = _encode(told, "the relay's spec", RELAY_VARIABLE)
    return Assignment(
        host, ranks, world_size, num_workers, dialed, encoded, _group(fields), _interface(worker), relay_hex
    )


def _host(worker: Fields) -> str:
    host = worker.text("host")
    if not host or not host.isprintable() or len(host.encode()) > MAX_TEXT_BYTES:
        raise worker.wrong("host", f"a name of at most {MAX_TEXT_BYTES} bytes that prints")
    return host


def _interface(worker: Fields) -> str:
    interface = worker.optional("nccl_socket_ifname", worker.text) or ""
    if "\0" in interface:
        raise worker.wrong("nccl_socket_ifname", "a text without NUL")
    return interface.strip()


def _group(fields: Fields) -> Group | None:
    if GROUP_KEY not in fields:
        return None
    group = fields.child(GROUP_KEY)
    size = group.whole("group_world_size", 1, MAX_WORLD)
    rank = group.whole("group_rank", 0, size - 1)
    run_id = group.text("run_id")
    if "\0" in run_id:
        raise group.wrong("run_id", "a text without NUL")
    flags = {name: group.flag(name) for name in ("store", "reports", "heartbeats")}
    return Group(rank, size, run_id, **flags, rank0_address=_rank0_address(group), environ=_environ(group))


def _rank0_address(group: Fields) -> str:
    address = group.optional("rank0_address", group.text) or ""
    if address and not is_address(address):
        raise group.wrong("rank0_address", "a numeric address")
    return address


def _environ(group: Fields) -> Mapping[str, str]:
    given = group.optional("environ", group.child)
    environ = {} if given is None else {name: given.text(name) for name in given.values}
    wrong = wrong_environ(environ)
    if wrong is not None:
        raise ShapeError(f"the envelope's {GROUP_KEY}.environ cannot be used: {wrong}")
    return environ


def _encode(value: Mapping[str, object], what: str, variable: str) -> str:
    """Hex of an object's compact JSON, if ``variable`` can hold it."""
    try:
        text = compact(value).encode("utf-8").hex()
    except UnicodeEncodeError:
        raise ValueError(f"{what} has text that is not Unicode") from None
    size = len(variable) + len("=") + len(text) + len("\0")
    if size > MAX_VARIABLE:
        raise ValueError(f"{what} is too long for a child's environment: {size} bytes, the limit is {MAX_VARIABLE}")
    return text
