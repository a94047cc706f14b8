"""The ``cluster:`` block of a flodl user's ``fdl.yml``, or a file that is that block, YAML or JSON.

What the keys mean, how they default and which contradict each other; how they
are read is in ``yaml_nodes.py``.  All faults are SettingErrors of one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from flodl_tw.core.addresses import FDL_PORT
from flodl_tw.core.tokens import parse_token
from flodl_tw.core.window import StartMode, WindowSettings
from flodl_tw.core.world import WorkerFields
from flodl_tw.fdl.yaml_document import read_document
from flodl_tw.fdl.yaml_nodes import Block, Value, known_keys, safe_text
from flodl_tw.options import by_word

MAX_SECONDS: Final = 366 * 24 * 3600
MAX_COUNT: Final = 1 << 31
MAX_DEVICE: Final = 255
FDL_KEYS: Final = ("description", "commands", "join", "publish", "inherit-from")
"""What else stands at the top of an fdl.yml."""


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """A worker of the file; ``local_devices`` is None for all, ``ranks`` is empty where the file can't tell them.

    ``fields`` are sent to it; the fleet's share of memory is its own where it has none.
    """

    host: str
    ranks: tuple[int, ...]
    local_devices: tuple[int, ...] | None
    tunnel: bool
    fields: WorkerFields


@dataclass(frozen=True, slots=True)
class JoinBlock:
    """The window as the file asks for it: None where it says nothing and nothing follows from the roster."""

    min_rank_start: int
    target_ranks: int | None = None
    join_timeout: int | None = None
    max_join_timeout: int | None = None
    start: StartMode | None = None
    discovery: bool | None = None
    open_admission: bool | None = None
    tunnel_only: bool | None = None


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """All that the file says; ``loopback`` is whether it binds loopback, and the share is the fleet's."""

    host: str
    port: int
    join: JoinBlock
    token: bytes | None = field(repr=False)
    roster: Mapping[str, RosterEntry]
    loopback: bool
    gpu_ram_share: float | None


def _cluster_block(root: Value) -> Block:
    """The block, whether the file has it or is it."""
    found = root.entries()
    if "cluster" in found and found["cluster"].kind != "null":
        return found["cluster"].block(known_keys("cluster"))
    if "controller" not in found and ("cluster" in found or any(name in found for name in FDL_KEYS)):
        raise root.location.error("it has no cluster: block", "name the file that has one; an fdl.NAME.yml often does")
    return root.block([*known_keys("cluster"), "cluster"])


def read_devices(value: Value) -> tuple[int, ...] | None:
    """A list of devices; None for all."""
    if value.scalar is None:
        return value.wholes(0, MAX_DEVICE)
    if value.kind != "str" or value.scalar != "all":
        raise value.error("it must be a list of devices, or the word all", "write it as [0, 1], or all")
    return None


def _worker(block: Block, share: float | None) -> RosterEntry:
    block.child("ssh")
    host = block.need("host", "give the name that the worker joins with")
    if not host.word().isprintable() or len(host.text().encode()) > 255:
        raise host.error("a host's name is at most 255 bytes, without control characters", "shorten it")
    listed = block.need("local_devices", "list the worker's devices, or write all")
    devices = read_devices(listed)
    if devices == ():
        raise listed.location.error("it has no device", "list one or more, or write all")
    return RosterEntry(
        host=host.text(),
        ranks=block.get("ranks", lambda ranks: ranks.wholes(0, MAX_COUNT)) or (),
        local_devices=devices,
        tunnel=bool(block.get("tunnel", Value.flag)),
        fields=WorkerFields(
            nccl_socket_ifname=block.need("nccl_socket_ifname", "name the interface that NCCL uses there").text(),
            path=block.need("path", "give the project's folder on that host").word(),
            arch=block.get("arch", Value.text),
            data_path=block.get("data_path", Value.text),
            gpu_ram_share=block.values["gpu_ram_share"].share() if "gpu_ram_share" in block.values else share,
        ),
    )


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker with its block, for the checks that look at several."""

    block: Block
    entry: RosterEntry

    @property
    def name(self) -> str:
        return f"{self.block.location.path} ({safe_text(self.entry.host, quoted=False)})"


def _roster(workers: Sequence[_Worker]) -> Mapping[str, RosterEntry]:
    """The workers by host, each with its ranks."""
    first: dict[str, _Worker] = {}
    for worker in workers:
        host = worker.block.values["host"]
        if worker.entry.host in first:
            raise host.error(f"{first[worker.entry.host].name} has this host, too", "give each worker its own")
        first[worker.entry.host] = worker
        if len(workers) > 1 and not worker.entry.fields.nccl_socket_ifname.strip():
            raise worker.block.values["nccl_socket_ifname"].error(
                "flodl needs it when there are several workers", "name the interface that NCCL uses there"
            )
    entries = _ranked(workers) if any(worker.entry.ranks for worker in workers) else list(_counted(workers))
    return MappingProxyType({entry.host: entry for entry in entries})


def _ranked(workers: Sequence[_Worker]) -> list[RosterEntry]:
    """The entries with the ranks that the file gives, which are exactly 0..n-1."""
    owners: dict[int, _Worker] = {}
    for worker in workers:
        ranks = worker.block.need("ranks", "give ranks to every worker, or to none")
        if not worker.entry.ranks:
            raise ranks.location.error(
                "it has no rank, and other workers have", "give ranks to every worker, or to none"
            )
        for rank, item in zip(worker.entry.ranks, ranks.items(), strict=True):
            if rank in owners:
                raise item.error(f"{owners[rank].name} has this rank, too", "give each rank to one worker")
            owners[rank] = worker
        devices = worker.entry.local_devices
        if devices is not None and len(devices) != len(worker.entry.ranks):
            limit = f"it must have as many devices as ranks, {len(worker.entry.ranks)}, and has {len(devices)}"
            raise worker.block.values["local_devices"].location.error(limit, "list one for each rank, or write all")
    _check_range(owners)
    return [worker.entry for worker in workers]


def _check_range(owners: Mapping[int, _Worker]) -> None:
    count = len(owners)
    for rank, worker in owners.items():
        if rank >= count:
            missing = next(number for number in range(count) if number not in owners)
            item = worker.block.values["ranks"].items()[worker.entry.ranks.index(rank)]
            limit = f"{worker.name} has it, but the roster's {count} ranks must be 0..{count - 1}"
            raise item.error(limit, f"rank {missing} is missing: number them from 0 without a gap")


def _counted(workers: Sequence[_Worker]) -> Iterator[RosterEntry]:
    """The entries of a file without ranks, which is what flodl wants of its users: one rank a device, in order.

    Where a worker has all its devices, whose number only that host knows, no entry gets ranks.
    """
    told = all(worker.entry.local_devices is not None for worker in workers)
    start = 0
    for worker in workers:
        end = start + len(worker.entry.local_devices or ()) if told else start
        yield replace(worker.entry, ranks=tuple(range(start, end)))
        start = end


def _start(value: Value) -> StartMode:
    modes = by_word(StartMode)
    if value.text() not in modes:
        raise value.error(f"the choices are {', '.join(modes)}", "give one of them")
    return modes[value.text()]


def _join(block: Block, roster: Mapping[str, RosterEntry]) -> JoinBlock:
    start, discovery = block.get("start", _start), block.get("discovery", Value.flag)
    quorum = block.whole("min_rank_start", 1, MAX_COUNT)
    target = block.whole("target_ranks", 1, MAX_COUNT)
    if not discovery and all(entry.ranks for entry in roster.values()):
        ranks = sum(len(entry.ranks) for entry in roster.values())
        quorum = ranks if quorum is None else quorum
        target = ranks if target is None and start is not StartMode.MANUAL else target
    if quorum is None:
        why = "with discovery: true" if discovery else "with local_devices: all and no ranks"
        raise block.missing("min_rank_start", f"{why} the roster can't tell it: give the ranks that a world needs")
    join = JoinBlock(
        min_rank_start=quorum,
        target_ranks=target,
        join_timeout=block.whole("join_timeout", 1, MAX_SECONDS),
        max_join_timeout=block.whole("max_join_timeout", 1, MAX_SECONDS),
        start=start,
        discovery=discovery,
        open_admission=block.get("open_admission", Value.flag),
        tunnel_only=block.get("tunnel_only", Value.flag),
    )
    _check_window(block, join)
    _check_trust(block, join)
    return join


def _check_window(block: Block, join: JoinBlock) -> None:
    values = block.values

    def default(name: str) -> str:
        return "" if name in values else ", the roster's ranks"

    if join.start is StartMode.MANUAL and "target_ranks" in values:
        limit = "start: manual leaves the close to the operator"
        raise values["target_ranks"].error(limit, "drop it, or use start: hybrid, which has both")
    if join.target_ranks is not None and join.target_ranks < join.min_rank_start:
        if "target_ranks" in values:
            limit = f"the least is min_rank_start, {join.min_rank_start}{default('min_rank_start')}"
            raise values["target_ranks"].error(limit, "raise it, or lower min_rank_start")
        limit = f"the most is target_ranks, {join.target_ranks}{default('target_ranks')}"
        raise values["min_rank_start"].error(limit, "lower it, or state target_ranks")
    window = WindowSettings().join_timeout if join.join_timeout is None else join.join_timeout
    if join.max_join_timeout is not None and join.max_join_timeout < window:
        limit = f"the least is join_timeout, {window} s"
        raise values["max_join_timeout"].error(limit, "raise it, or lower join_timeout")


def _check_trust(block: Block, join: JoinBlock) -> None:
    if join.open_admission and "token" in block.values:
        limit = "token asks for credentialed admission"
        raise block.values["open_admission"].error(limit, "drop one of the two")
    if join.tunnel_only and not join.discovery:
        way_out = "set discovery: true, or drop it and set tunnel: true for each worker"
        raise block.values["tunnel_only"].error("it needs discovery: true", way_out)


def read_token(value: Value, shown: str = "") -> bytes:
    """The token; a scalar's text as it stands, since 32 decimal digits are a token as well."""
    if value.scalar is None:
        raise value.location.error("it must be a text of 32 hex digits", "make one with: openssl rand -hex 16")
    return parse_token(value.scalar, str(value.location), shown)


def _cluster(block: Block) -> ClusterFile:
    needed = block.need("controller", "it has the host, the port and the join block")
    controller = needed.block(known_keys("controller"))
    host = controller.need("host", "give the name or address that workers dial").word()
    port = controller.whole("port", 1, 65535)
    join_block = controller.child("join")
    share = block.get("gpu_ram_share", Value.share)
    blocks = [item.block(known_keys("worker")) for item in block.get("workers", Value.items) or []]
    if not blocks and not join_block.get("discovery", Value.flag):
        raise block.missing("workers", "list one or more, or set controller.join.discovery: true")
    roster = _roster([_Worker(worker, _worker(worker, share)) for worker in blocks])
    join = _join(join_block, roster)
    return ClusterFile(
        host=host,
        port=FDL_PORT if port is None else port,
        join=join,
        token=join_block.get("token", read_token),
        roster=roster,
        loopback=bool(join.tunnel_only or (roster and all(entry.tunnel for entry in roster.values()))),
        gpu_ram_share=share,
    )


def read_cluster_file(path: str) -> ClusterFile:
    """What the file says, with quorum and target as they follow from its roster; SettingError where it can't be used.

    Nothing is opened but the file, and no setting's default is filled in but the port's.
    """
    return _cluster(_cluster_block(read_document(path, "--cluster", "cluster")))
