"""What a host's children find in their environment."""

from __future__ import annotations

import unittest
from dataclasses import replace

from flodl_tw.agent.assignment import Assignment, Group
from flodl_tw.agent.rank_environ import is_per_rank, rank_environ, relay_environ, stale

TOKEN = "ffeeddccbbaa99887766554433221100"

FLODL = {
    "FLODL_INTERNAL_CLUSTER_JSON",
    "FLODL_INTERNAL_LOCAL_RANK",
    "FLODL_HOST_NAME",
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "PYTHONUNBUFFERED",
}
TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_NAME": "default",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "night 7",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
OTHER_LAUNCHERS = {
    "RANK": "7",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "64",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "5",
    "GROUP_WORLD_SIZE": "8",
    "ROLE_NAME": "trainer",
    "ROLE_RANK": "7",
    "ROLE_WORLD_SIZE": "64",
    "NODE_RANK": "5",
    **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NPROCS", "SLURM_GTIDS"), "1"),
    **dict.fromkeys(("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"), "1"),
    **dict.fromkeys(("SLURM_TASK_PID", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"), "1"),
    **dict.fromkeys(("SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_HOST"), "10.0.0.9"),
    **dict.fromkeys(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_UNIVERSE_SIZE"), "2"),
    **dict.fromkeys(("OMPI_MCA_ess_base_vpid", "OMPI_MCA_orte_ess_vpid"), "2"),
    **dict.fromkeys(("PMI_RANK", "PMI_SIZE", "PMI_FD", "PMIX_RANK", "PMIX_NAMESPACE"), "2"),
    **dict.fromkeys(("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_RANK", "PALS_RANKID"), "2"),
    **dict.fromkeys(("JSM_NAMESPACE_RANK", "ALPS_APP_PE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"), "2"),
    "TORCHELASTIC_RUN_ID": "old",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_ERROR_FILE": "/tmp/old",
}
MASTER = {"MASTER_ADDR": "old", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "False"}
SECRET = {
    "FLODL_JOIN_TOKEN": TOKEN,
    "FLODL_TW_TOKEN_FILE": "/etc/token",
    "FLODL_TW_HOST": "x",
    "FLODL_INTERNAL_AGENT_JSON": TOKEN,
    "FLODL_INTERNAL_RELAY_JSON": TOKEN,
    "FLODL_INTERNAL_FULL_CLUSTER_JSON": TOKEN,
    "FLODL_INTERNAL_MODEL_SIG_PROBE": "1",
}
MASKS = {"ROCR_VISIBLE_DEVICES": "4,5", "GPU_DEVICE_ORDINAL": "4"}
KEPT = {
    "PATH": "/bin",
    "NCCL_SOCKET_IFNAME": "eth0",
    **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_CPUS_ON_NODE"), "9"),
    **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_CPUS_PER_TASK", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE"), "9"),
    **dict.fromkeys(("OMPI_MCA_btl", "OMPI_MCA_btl_tcp_if_include", "PMIX_MCA_gds", "UCX_TLS", "NCCL_DEBUG"), "a"),
    "FLODL_NET_TIMEOUT_SCALE": "2",
    "RANKS": "1",
    "MY_RANK": "1",
    "NAME\udcff": "bytes \udcfe",
    "EMPTY": "",
}


class RankTests(unittest.TestCase):
    """A rank's environment."""

    def setUp(self) -> None:
        group = Group(1, 2, "night 7")
        self.bare = Assignment("gpu-b", (2, 3), 4, 2, ("10.0.0.100", 29500), "7b7d", None)
        self.grouped = replace(self.bare, group=group)
        self.stored = replace(self.bare, group=replace(group, store=True))

    def test_flodls_variables_are_set_for_every_rank(self) -> None:
        for assignment in (self.bare, self.grouped, self.stored):
            for index in (0, 1):
                with self.subTest(assignment=assignment, index=index):
                    environ = rank_environ(KEPT, assignment, index, "GPU-8932f937")
                    self.assertEqual(environ["FLODL_INTERNAL_CLUSTER_JSON"], "7b7d")
                    self.assertEqual(environ["FLODL_INTERNAL_LOCAL_RANK"], str(index))
                    self.assertEqual(environ["FLODL_HOST_NAME"], "gpu-b")
                    self.assertEqual(environ["CUDA_DEVICE_ORDER"], "PCI_BUS_ID")
                    self.assertEqual(environ["CUDA_VISIBLE_DEVICES"], "GPU-8932f937")
                    self.assertEqual(environ["HIP_VISIBLE_DEVICES"], "GPU-8932f937")

    def test_a_real_launchers_rank_gets_flodls_variables_and_no_others(self) -> None:
        environ = rank_environ({**KEPT, **OTHER_LAUNCHERS, **SECRET, **MASKS}, self.bare, 1, "5")
        self.assertEqual(set(environ), {*KEPT, *FLODL})

    def test_torchruns_variables_are_set_where_the_group_is_known(self) -> None:
        environ = rank_environ({}, self.grouped, 1, "5")
        self.assertEqual(
            {name: value for name, value in environ.items() if name not in FLODL}, {**TORCHRUN, "OMP_NUM_THREADS": "1"}
        )
        first = rank_environ({}, self.grouped, 0, "4")
        self.assertEqual((first["RANK"], first["LOCAL_RANK"], first["ROLE_RANK"]), ("2", "0", "2"))

    def test_the_masters_address_is_the_controller_where_it_has_a_store(self) -> None:
        environ = rank_environ({**KEPT, **MASTER}, self.stored, 1, "5")
        self.assertEqual(
            {name: environ[name] for name in MASTER},
            {"MASTER_ADDR": "10.0.0.100", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"},
        )

    def test_nccl_gets_the_operators_interface_unless_the_rank_has_one(self) -> None:
        told = replace(self.stored, interface="ib0")
        for assignment, base, right in (
            (told, {}, "ib0"),
            (told, {"NCCL_SOCKET_IFNAME": "eth0"}, "eth0"),
            (told, {"NCCL_SOCKET_IFNAME": ""}, ""),
            (self.stored, {}, None),
            (replace(told, group=None), {}, None),
        ):
            with self.subTest(base=base, right=right):
                self.assertEqual(rank_environ(base, assignment, 0, "0").get("NCCL_SOCKET_IFNAME"), right)

    def test_local_rank_is_the_index_unless_it_is_said_and_flodls_is_always(self) -> None:
        environ = rank_environ({}, self.stored, 1, "5", local_rank=0)
        self.assertEqual((environ["LOCAL_RANK"], environ["FLODL_INTERNAL_LOCAL_RANK"]), ("0", "1"))

    def test_the_operators_variables_are_there_unless_the_rank_has_its_own(self) -> None:
        group = Group(
            1, 2, "id", environ={"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "4", "A": "", "MASTER_ADDR": "head"}
        )
        told = replace(self.bare, group=group)
        environ = rank_environ({"NCCL_DEBUG": "INFO"}, told, 0, "0")
        self.assertEqual(environ | {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4", "A": ""}, environ)
        self.assertEqual(environ["MASTER_ADDR"], "head")
        self.assertEqual(
            rank_environ({}, replace(told, group=replace(group, store=True)), 0, "0")["MASTER_ADDR"], "10.0.0.100"
        )

    def test_the_operators_variables_change_nothing_that_is_a_ranks_own(self) -> None:
        for name in (*TORCHRUN, *FLODL, *SECRET, *MASKS, *OTHER_LAUNCHERS):
            if name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTHONUNBUFFERED"):
                continue
            given = replace(self.stored, group=replace(Group(1, 2, "night 7"), store=True, environ={name: "theirs"}))
            with self.subTest(name):
                self.assertEqual(rank_environ({}, given, 0, "0"), rank_environ({}, self.stored, 0, "0"))
                self.assertTrue(is_per_rank(name))
        self.assertFalse(any(map(is_per_rank, ("NCCL_DEBUG", "MASTER_ADDR", "OMP_NUM_THREADS", "PATH"))))

    def test_every_rank_is_told_where_rank_0_is(self) -> None:
        told = replace(self.stored, group=replace(Group(1, 2, "id"), rank0_address="10.0.0.1"))
        self.assertEqual(rank_environ({}, told, 0, "0")["FLODL_TW_RANK0_ADDR"], "10.0.0.1")
        self.assertNotIn("FLODL_TW_RANK0_ADDR", rank_environ({"FLODL_TW_RANK0_ADDR": "old"}, self.stored, 0, "0"))

    def test_rank_0_may_have_torchs_own_store(self) -> None:
        told = replace(self.stored, group=replace(Group(1, 2, "id"), store=True, rank0_address="10.0.0.1"))
        for base, port in ((MASTER, "29500"), ({}, "29501"), ({"MASTER_PORT": ""}, "29501")):
            environ = rank_environ(base, told, 0, "0", own_store=True)
            self.assertEqual((environ["MASTER_ADDR"], environ["MASTER_PORT"]), ("10.0.0.1", port))
            self.assertNotIn("TORCHELASTIC_USE_AGENT_STORE", environ)
        self.assertEqual(stale(MASTER, told, own_store=True), ["MASTER_ADDR"])
        untold = rank_environ({"MASTER_ADDR": "mine"}, self.stored, 0, "0", own_store=True)
        self.assertEqual((untold["MASTER_ADDR"], "MASTER_PORT" in untold), ("mine", False))

    def test_an_error_file_is_the_ranks_own_or_nobodys(self) -> None:
        base = {**KEPT, **OTHER_LAUNCHERS}
        for assignment in (self.bare, self.grouped, self.stored):
            with self.subTest(assignment=assignment):
                environ = rank_environ(base, assignment, 1, "5", "/run/errors/rank.003.json")
                self.assertEqual(environ["TORCHELASTIC_ERROR_FILE"], "/run/errors/rank.003.json")
                self.assertNotIn("TORCHELASTIC_ERROR_FILE", rank_environ(base, assignment, 1, "5"))

    def test_the_masters_address_is_left_alone_where_it_has_none(self) -> None:
        for assignment in (self.bare, self.grouped):
            with self.subTest(assignment=assignment):
                environ = rank_environ(MASTER, assignment, 1, "5")
                self.assertEqual({name: environ[name] for name in MASTER}, MASTER)
                self.assertFalse(MASTER.keys() & rank_environ({}, assignment, 1, "5").keys())

    def test_threads_are_limited_where_several_ranks_share_a_host_and_nobody_said_how(self) -> None:
        alone = replace(self.grouped, ranks=(2,))
        for assignment, base, right in (
            (self.grouped, {}, "1"),
            (self.grouped, {"OMP_NUM_THREADS": "8"}, "8"),
            (self.grouped, {"OMP_NUM_THREADS": ""}, ""),
            (alone, {}, None),
            (alone, {"OMP_NUM_THREADS": "8"}, "8"),
            (self.bare, {}, None),
        ):
            with self.subTest(assignment=assignment, base=base):
                self.assertEqual(rank_environ(base, assignment, 0, "0").get("OMP_NUM_THREADS"), right)

    def test_what_a_rank_prints_appears_at_once_unless_somebody_said_otherwise(self) -> None:
        for base, right in (({}, "1"), ({"PYTHONUNBUFFERED": ""}, ""), ({"PYTHONUNBUFFERED": "0"}, "0")):
            for assignment in (self.bare, self.grouped):
                self.assertEqual(rank_environ(base, assignment, 0, "0")["PYTHONUNBUFFERED"], right)

    def test_where_nobody_chose_gpus_the_environment_s_masks_stay(self) -> None:
        base = {**KEPT, **MASKS, "CUDA_VISIBLE_DEVICES": "4,5"}
        environ = rank_environ(base, self.grouped, 1, None)
        self.assertEqual({name: environ[name] for name in base}, base)
        self.assertFalse(
            {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"} & rank_environ({}, self.grouped, 1, None).keys()
        )

    def test_nothing_of_another_launcher_or_of_the_operators_is_left(self) -> None:
        base = {**KEPT, **OTHER_LAUNCHERS, **MASTER, **SECRET, **MASKS, "CUDA_VISIBLE_DEVICES": "4,5"}
        given = dict(base)
        environ = rank_environ(base, self.stored, 1, "5")
        self.assertEqual(base, given)
        self.assertEqual(set(environ), {*KEPT, *FLODL, *TORCHRUN, *MASTER, "OMP_NUM_THREADS"})
        self.assertEqual({name: environ[name] for name in TORCHRUN}, TORCHRUN)
        self.assertEqual({name: environ[name] for name in KEPT}, KEPT)
        self.assertNotIn(TOKEN, "".join(environ.values()))

    def test_the_relay_has_its_role_alone(self) -> None:
        base = {**KEPT, **OTHER_LAUNCHERS, **MASTER, **SECRET, **MASKS, "FLODL_HOST_NAME": "old"}
        self.assertEqual(
            relay_environ(base, "7b7d", "gpu-b"),
            {**KEPT, **MASTER, "FLODL_INTERNAL_RELAY_JSON": "7b7d", "FLODL_HOST_NAME": "gpu-b"},
        )

    def test_what_other_launchers_set_is_listed_in_order_and_nothing_else(self) -> None:
        base = {**KEPT, **OTHER_LAUNCHERS, **MASTER, **SECRET, **MASKS}
        self.assertEqual(stale(base, self.bare), sorted(OTHER_LAUNCHERS))
        self.assertEqual(stale({**KEPT, **MASTER, **SECRET, **MASKS}, self.bare), [])

    def test_another_store_than_the_world_s_is_listed_and_the_same_is_not(self) -> None:
        theirs = {"MASTER_ADDR": "gpu-head", "MASTER_PORT": rank_environ({}, self.stored, 0, "0")["MASTER_PORT"]}
        self.assertEqual(stale({**KEPT, **theirs}, self.stored), ["MASTER_ADDR"])
