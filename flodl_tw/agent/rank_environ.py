"""What WorldFormed told this host, checked, and the environment that each of its children gets.

The controller is not trusted here: what it sent is checked whole before any
process starts, and a fault is one ValueError that says which part is wrong.
"""

from __future__ import annotations

import binascii
import json
import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeGuard

from flodl_tw.core.log_text import MAX_TEXT_BYTES
from flodl_tw.core.views import compact

CLUSTER_VARIABLE: Final = "FLODL_INTERNAL_CLUSTER_JSON"
RELAY_VARIABLE: Final = "FLODL_INTERNAL_RELAY_JSON"
GROUP_KEY: Final = "flodl_tw"
"""The envelope's object of ours; a real flodl launcher has none."""

MAX_WORLD: Final = 1 << 31
MAX_DEPTH: Final = 64
MAX_VARIABLE: Final = 128 * 1024
"""Bytes that Linux takes in one variable with its name; a child with a longer one cannot be started."""

_OURS = frozenset({"FLODL_JOIN_TOKEN", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"})
_OUR_PREFIXES = ("FLODL_INTERNAL_", "FLODL_TW_")
_STALE = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "NODE_RANK", "SLURM_PROCID", "SLURM_LOCALID"),
    }
)
_STALE_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_")
_STORE = frozenset({"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"})
"""Where a program's own rendezvous is: the operator's to set, unless the controller has a store."""

_SALT = re.compile(r"[0-9a-fA-F]{32}")


@dataclass(frozen=True, slots=True)
class Group:
    """The hosts of the world as our controller numbers them.

    ``store``: it serves torch's store on its port; ``reports``: it takes the
    exceptions that ranks died of.
    """

    group_rank: int
    group_world_size: int
    run_id: str
    store: bool = False
    reports: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """What WorldFormed told this host, checked.

    ``ranks`` are the final global ranks, one a device.  ``envelope`` is what
    the ranks get: as received, with the controller as this host dialed it and
    the host's own settings.  It holds the world's salt, a credential.
    """

    host: str
    ranks: tuple[int, ...]
    world_size: int
    num_workers: int
    envelope: dict[str, Any] = field(repr=False)
    group: Group | None


def read_envelope(
    envelope_hex: str, *, devices: int, dialed: tuple[str, int], data_path: str | None, gpu_ram_share: float | None
) -> Assignment:
    """This host's assignment, for its count of ``devices``; raises ValueError for what no rank can be started with.

    ``dialed`` is the controller as this host reached it.  Keys that are not known are kept.
    """
    envelope = _decode(envelope_hex, "the envelope")
    world_size = _whole(envelope, "world_size", 1, MAX_WORLD)
    num_workers = _whole(envelope, "num_workers", 1, world_size)
    controller, worker = _object(envelope, "controller"), _object(envelope, "worker")
    host = _host(worker)
    ranks = _ranks(worker, world_size, devices)
    if not isinstance(envelope.get("salt"), str) or not _SALT.fullmatch(envelope["salt"]):
        raise ValueError("the envelope's salt is not 32 hex digits")
    controller["host"], controller["port"] = dialed
    if data_path is not None:
        worker["data_path"] = _unicode(data_path)
    if gpu_ram_share is not None:
        worker["gpu_ram_share"] = gpu_ram_share
    group = _group(envelope)
    _encode(envelope, "the envelope", CLUSTER_VARIABLE)
    return Assignment(host, ranks, world_size, num_workers, envelope, group)


def read_relay_spec(relay_spec_hex: str, dialed: tuple[str, int]) -> str:
    """The relay's spec, as hex again, with the controller as this host dialed it; ValueError for what is none."""
    spec = _decode(relay_spec_hex, "the relay's spec")
    spec["controller_host"], spec["controller_port"] = dialed
    return _encode(spec, "the relay's spec", RELAY_VARIABLE)


def rank_environ(
    base: Mapping[str, str], assignment: Assignment, index: int, mask: str, error_file: str | None = None
) -> dict[str, str]:
    """The environment of the host's rank ``index``, whose device is ``mask``.

    The world's salt is in it, inside the envelope: the rank needs it.
    ``error_file`` is where the rank may leave the exception that it dies of.
    """
    environ = _cleared(base)
    environ |= {
        CLUSTER_VARIABLE: _encode(assignment.envelope, "the envelope", CLUSTER_VARIABLE),
        "FLODL_INTERNAL_LOCAL_RANK": str(index),
        "FLODL_HOST_NAME": assignment.host,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": mask,
        "HIP_VISIBLE_DEVICES": mask,
    }
    if assignment.group is not None:
        environ |= _torchrun(assignment, assignment.group, index)
        environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        if len(assignment.ranks) > 1:
            environ.setdefault("OMP_NUM_THREADS", "1")
    if error_file is not None:
        environ["TORCHELASTIC_ERROR_FILE"] = error_file
    return environ | _store(assignment)


def relay_environ(base: Mapping[str, str], spec_hex: str, host: str) -> dict[str, str]:
    """The environment of the host's relay: its role alone, no rank and no device mask of ours."""
    return _cleared(base) | {RELAY_VARIABLE: spec_hex, "FLODL_HOST_NAME": host}


def stale(base: Mapping[str, str], assignment: Assignment) -> list[str]:
    """The variables that somebody set before us and that children get from us or not at all, sorted."""
    ours = _store(assignment)
    return sorted(name for name, value in base.items() if _is_stale(name) or ours.get(name, value) != value)


def _store(assignment: Assignment) -> dict[str, str]:
    """Where the world's store is, if it has one: the controller, as this host dialed it."""
    if assignment.group is None or not assignment.group.store:
        return {}
    controller = assignment.envelope["controller"]
    return {
        "MASTER_ADDR": controller["host"],
        "MASTER_PORT": str(controller["port"]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _torchrun(assignment: Assignment, group: Group, index: int) -> dict[str, str]:
    rank, size = str(assignment.ranks[index]), str(assignment.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(len(assignment.ranks)),
        "GROUP_RANK": str(group.group_rank),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "TORCHELASTIC_RUN_ID": group.run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def _is_stale(name: str) -> bool:
    return name in _STALE or (name.startswith(_STALE_PREFIXES) and name not in _STORE)


def _cleared(base: Mapping[str, str]) -> dict[str, str]:
    """``base`` without flodl's roles, our own settings and credentials, and what another launcher set."""
    return {
        name: value
        for name, value in base.items()
        if not (name in _OURS or name.startswith(_OUR_PREFIXES) or _is_stale(name))
    }


def _decode(text: str, what: str) -> dict[str, Any]:
    """The JSON object that hex stands for."""
    try:
        value = json.loads(
            binascii.unhexlify(text).decode("utf-8"), parse_constant=_no_number, parse_float=_finite_float
        )
        too_deep = _deeper(value, MAX_DEPTH)
    except RecursionError:
        too_deep = True
    except ValueError as error:
        # Neither hex, nor UTF-8, nor JSON: the error says which, and where.
        raise ValueError(f"{what} cannot be read: {error}") from None
    if too_deep:
        raise ValueError(f"{what} is nested deeper than {MAX_DEPTH}")
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")
    return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large a number")
    return number


def _deeper(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_deeper(item, depth - 1) for item in inner)


def _encode(value: dict[str, Any], what: str, variable: str) -> str:
    """Hex of an object's compact JSON, if ``variable`` can hold it."""
    try:
        text = compact(value).encode("utf-8").hex()
    except UnicodeEncodeError:
        raise ValueError(f"{what} has text that is not Unicode") from None
    size = len(variable) + len("=") + len(text) + len("\0")
    if size > MAX_VARIABLE:
        raise ValueError(f"{what} is too long for a child's environment: {size} bytes, the limit is {MAX_VARIABLE}")
    return text


def _unicode(data_path: str) -> str:
    try:
        data_path.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"the data path {data_path!r} is not UTF-8, and the envelope takes nothing else") from None
    return data_path


def _wrong(name: str, value: Any, wanted: str) -> ValueError:
    return ValueError(f"the envelope's {name} is {reprlib.repr(value)}, not {wanted}")


def _object(parent: dict[str, Any], name: str) -> dict[str, Any]:
    value = parent.get(name)
    if not isinstance(value, dict):
        # Its value is not shown: anything may be in it.
        raise ValueError(f"the envelope's {name} is " + ("missing" if value is None else "not an object"))
    return value


def _is_whole(value: Any, least: int, most: int) -> TypeGuard[int]:
    """Whether it is an integer in the range; JSON's true and false are none."""
    return type(value) is int and least <= value <= most


def _whole(parent: dict[str, Any], name: str, least: int, most: int, prefix: str = "") -> int:
    value = parent.get(name)
    if not _is_whole(value, least, most):
        raise _wrong(prefix + name, value, f"a whole number from {least} to {most}")
    return value


def _host(worker: dict[str, Any]) -> str:
    host = worker.get("host")
    if not isinstance(host, str) or not host or not host.isprintable() or len(host.encode()) > MAX_TEXT_BYTES:
        raise _wrong("worker.host", host, "a host's name")
    return host


def _ranks(worker: dict[str, Any], world_size: int, devices: int) -> tuple[int, ...]:
    ranks = worker.get("ranks")
    if not isinstance(ranks, list):
        raise _wrong("worker.ranks", ranks, "a list of ranks")
    if len(ranks) != devices:
        raise ValueError(f"the envelope has {len(ranks)} ranks for this host, which offered {devices} devices")
    for rank in ranks:
        if not _is_whole(rank, 0, world_size - 1):
            raise ValueError(f"the envelope has the rank {reprlib.repr(rank)} in a world of {world_size}")
    if len(set(ranks)) != len(ranks):
        raise _wrong("worker.ranks", ranks, "a list of different ranks")
    return tuple(ranks)


def _group(envelope: dict[str, Any]) -> Group | None:
    if GROUP_KEY not in envelope:
        return None
    given = _object(envelope, GROUP_KEY)
    size = _whole(given, "group_world_size", 1, MAX_WORLD, f"{GROUP_KEY}.")
    rank = _whole(given, "group_rank", 0, size - 1, f"{GROUP_KEY}.")
    run_id = given.get("run_id")
    if not isinstance(run_id, str) or "\0" in run_id:
        raise _wrong(f"{GROUP_KEY}.run_id", run_id, "text")
    flags = {name: given.get(name, False) for name in ("store", "reports")}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise _wrong(f"{GROUP_KEY}.{name}", flag, "true or false")
    return Group(rank, size, run_id, **flags)
