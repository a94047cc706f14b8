"""The environment that each of a host's children gets: its ranks and its relay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flodl_tw.agent.assignment import CLUSTER_VARIABLE, RELAY_VARIABLE, Assignment, Group

_MASKS = ("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
_OURS = frozenset({"FLODL_JOIN_TOKEN", *_MASKS})
_OUR_PREFIXES = ("FLODL_INTERNAL_", "FLODL_TW_")
_STALE = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "NODE_RANK"),
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NPROCS", "SLURM_GTIDS", "SLURM_LAUNCH_NODE_IPADDR"),
        *("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "ALPS_APP_PE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
    }
)
_STALE_PREFIXES = (
    *("SLURM_STEP", "SLURM_TASK", "SLURM_NTASKS", "SLURM_SRUN_COMM_"),
    *("OMPI_", "PMI_", "PMIX_", "MV2_COMM_WORLD_", "PALS_", "JSM_NAMESPACE_", "TORCHELASTIC_"),
)
"""What a launcher tells each of its processes: left in place, a program takes it for its own rank."""
_TUNING_PREFIXES = ("OMPI_MCA_", "PMIX_MCA_")
_IDENTITY_PREFIXES = ("OMPI_MCA_ess_", "OMPI_MCA_orte_ess_")
"""The parameters of Open MPI by which its mpirun says to a process which one it is; the others are tuning."""
_GIVEN = frozenset({"FLODL_HOST_NAME", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"})
OWN_STORE_PORT: Final = "29501"
"""MASTER_PORT where rank 0 has torch's store and nobody has said which; beside the controller's, where both are."""
_STORE = frozenset({"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"})
"""Where a program's own rendezvous is: the operator's to set, unless the controller has a store."""


def rank_environ(
    base: Mapping[str, str],
    assignment: Assignment,
    index: int,
    mask: str | None,
    error_file: str | None = None,
    *,
    local_rank: int | None = None,
    own_store: bool = False,
) -> dict[str, str]:
    """The environment of the host's rank ``index``, which sees the GPUs of ``mask``, or what it inherits.

    The world's salt is in it, inside the envelope: the rank needs it.
    ``error_file`` is where the rank may leave the exception that it dies of,
    and ``local_rank`` what LOCAL_RANK is, if not ``index``.  With
    ``own_store`` rank 0 has torch's store.  ``base`` wins over the operator's.
    """
    given = {} if assignment.group is None else assignment.group.environ
    environ = _cleared({**{name: text for name, text in given.items() if not is_per_rank(name)}, **base})
    environ |= {
        CLUSTER_VARIABLE: assignment.envelope_hex,
        "FLODL_INTERNAL_LOCAL_RANK": str(index),
        "FLODL_HOST_NAME": assignment.host,
    }
    if mask is None:
        environ |= {name: base[name] for name in _MASKS if name in base}
    else:
        environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": mask, "HIP_VISIBLE_DEVICES": mask}
    environ.setdefault("PYTHONUNBUFFERED", "1")
    if assignment.group is not None:
        environ |= _torchrun(assignment, assignment.group, index)
        if assignment.group.rank0_address:
            environ["FLODL_TW_RANK0_ADDR"] = assignment.group.rank0_address
        if local_rank is not None:
            environ["LOCAL_RANK"] = str(local_rank)
        if assignment.interface:
            environ.setdefault("NCCL_SOCKET_IFNAME", assignment.interface)
        environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        if len(assignment.ranks) > 1:
            environ.setdefault("OMP_NUM_THREADS", "1")
    if error_file is not None:
        environ["TORCHELASTIC_ERROR_FILE"] = error_file
    if own_store:
        environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    return environ | _store(assignment, environ, own_store=own_store)


def is_per_rank(name: str) -> bool:
    """Whether each rank gets a variable of its own by this name, or none."""
    return name in _GIVEN or name in _OURS or name.startswith(_OUR_PREFIXES) or _is_stale(name)


def relay_environ(base: Mapping[str, str], spec_hex: str, host: str) -> dict[str, str]:
    """The environment of the host's relay: its role alone, no rank and no device mask of ours."""
    return _cleared(base) | {RELAY_VARIABLE: spec_hex, "FLODL_HOST_NAME": host}


def stale(base: Mapping[str, str], assignment: Assignment, *, own_store: bool = False) -> list[str]:
    """The variables that somebody set before us and that children get from us or not at all, sorted."""
    ours = _store(assignment, base, own_store=own_store)
    return sorted(name for name, value in base.items() if _is_stale(name) or ours.get(name, value) != value)


def _store(assignment: Assignment, environ: Mapping[str, str], *, own_store: bool) -> dict[str, str]:
    """Where the world's store is, if it has one: the controller, as this host dialed it, or rank 0's host."""
    group = assignment.group
    if group is not None and own_store and group.rank0_address:
        return {"MASTER_ADDR": group.rank0_address, "MASTER_PORT": environ.get("MASTER_PORT") or OWN_STORE_PORT}
    if group is None or own_store or not group.store:
        return {}
    host, port = assignment.controller
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


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
    if name.startswith(_TUNING_PREFIXES):
        return name.startswith(_IDENTITY_PREFIXES)
    return name in _STALE or (name.startswith(_STALE_PREFIXES) and name not in _STORE)


def _cleared(base: Mapping[str, str]) -> dict[str, str]:
    """``base`` without flodl's roles, our own settings and credentials, and what another launcher set."""
    return {
        name: value
        for name, value in base.items()
        if not (name in _OURS or name.startswith(_OUR_PREFIXES) or _is_stale(name))
    }
