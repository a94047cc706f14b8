"""What a host is told of its world, checked, and what its children find in their environment."""

from __future__ import annotations

import json
import unittest
from typing import Any

from flodl_tw.agent.rank_environ import (
    MAX_DEPTH,
    MAX_VARIABLE,
    Assignment,
    Group,
    rank_environ,
    read_envelope,
    read_relay_spec,
    relay_environ,
    stale,
)
from flodl_tw.core.facts import Offer
from flodl_tw.core.ledger import Ledger
from flodl_tw.core.messages import Hello
from flodl_tw.core.world import LaunchSettings, RelaySettings, World

SALT = "00112233445566778899aabbccddeeff"
TOKEN = "ffeeddccbbaa99887766554433221100"
DIALED = ("10.0.0.100", 29500)
GROUP = {"group_rank": 1, "group_world_size": 2, "run_id": "night 7"}
MISSING = object()

FLODL = {
    "FLODL_INTERNAL_CLUSTER_JSON",
    "FLODL_INTERNAL_LOCAL_RANK",
    "FLODL_HOST_NAME",
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
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
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "OMPI_COMM_WORLD_RANK": "2",
    "PMI_RANK": "2",
    "PMIX_RANK": "2",
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
    "SLURM_JOB_ID": "9",
    "FLODL_NET_TIMEOUT_SCALE": "2",
    "RANKS": "1",
    "MY_RANK": "1",
    "NAME\udcff": "bytes \udcfe",
    "EMPTY": "",
}


def envelope(**changes: Any) -> dict[str, Any]:
    """A good envelope of a host with the ranks 2 and 3 of 4, with changes; MISSING takes a key out."""
    given: dict[str, Any] = {
        "controller": {"host": "192.0.2.1", "port": 1},
        "world_size": 4,
        "num_workers": 2,
        "worker": {"host": "gpu-b", "ranks": [2, 3], "local_devices": [0, 1], "nccl_socket_ifname": "", "path": ""},
        "salt": SALT,
        **changes,
    }
    return {name: value for name, value in given.items() if value is not MISSING}


def worker(**changes: Any) -> dict[str, Any]:
    """An envelope whose worker is changed so."""
    given = {**envelope()["worker"], **changes}
    return envelope(worker={name: value for name, value in given.items() if value is not MISSING})


def hexed(value: Any) -> str:
    return json.dumps(value).encode().hex()


def read(envelope_hex: str, data_path: str | None = None, gpu_ram_share: float | None = None) -> Assignment:
    return read_envelope(envelope_hex, devices=2, dialed=DIALED, data_path=data_path, gpu_ram_share=gpu_ram_share)


def told(environ: dict[str, str]) -> Any:
    """What a rank reads."""
    return json.loads(bytes.fromhex(environ["FLODL_INTERNAL_CLUSTER_JSON"]))


class EnvelopeTests(unittest.TestCase):
    """What WorldFormed carries."""

    def refused(self, envelope_hex: str) -> str:
        with self.assertRaises(ValueError) as caught:
            read(envelope_hex)
        return str(caught.exception)

    def test_a_good_one_is_a_seat(self) -> None:
        assignment = read(hexed(envelope(flodl_tw=GROUP)))
        self.assertEqual(
            (assignment.host, assignment.ranks, assignment.world_size, assignment.num_workers, assignment.group),
            ("gpu-b", (2, 3), 4, 2, Group(1, 2, "night 7", False)),
        )

    def test_our_controllers_own_is_a_seat(self) -> None:
        ledger = Ledger()
        for host in ("a", "b"):
            ledger.admit(Offer(Hello(host, b"\0\1", (), "", bytes(32)), 4, "10.0.0.1"), 0.0)
        world = World(tuple(ledger.roster()), bytes.fromhex(SALT), LaunchSettings(relay=RelaySettings()))
        member, ranks = world.assignments[1]
        assignment = read(world.envelope_hex(member, ranks, "head", 1))
        self.assertEqual(
            (assignment.host, assignment.ranks, assignment.world_size, assignment.num_workers), ("b", (2, 3), 4, 2)
        )
        spec_hex = world.relay_spec_hex(member, ranks, "head", 1)
        assert spec_hex is not None
        spec = json.loads(bytes.fromhex(read_relay_spec(spec_hex, DIALED)))
        self.assertEqual((spec["controller_host"], spec["controller_port"], spec["ranks"]), (*DIALED, [2, 3]))

    def test_it_names_the_controller_as_it_was_dialed_and_keeps_the_rest(self) -> None:
        given = envelope(flodl_tw={**GROUP, "more": [1.5]}, rank_resources=True, later={"x": None, "ü": "ü"})
        assignment = read(hexed(given))
        self.assertEqual(assignment.envelope, {**given, "controller": {"host": "10.0.0.100", "port": 29500}})

    def test_the_hosts_own_settings_win_over_the_controllers(self) -> None:
        given = worker(data_path="/theirs", gpu_ram_share=0.9, arch="cu128")
        for data_path, share, right in (
            (None, None, ("/theirs", 0.9)),
            ("/ours", None, ("/ours", 0.9)),
            ("", 0.5, ("", 0.5)),
        ):
            with self.subTest(data_path=data_path, share=share):
                assignment = read(hexed(given), data_path, share)
                self.assertEqual(
                    (assignment.envelope["worker"]["data_path"], assignment.envelope["worker"]["gpu_ram_share"]), right
                )
                self.assertEqual(assignment.envelope["worker"]["arch"], "cu128")
        self.assertNotIn("data_path", read(hexed(envelope())).envelope["worker"])

    def test_a_real_launchers_has_no_group(self) -> None:
        self.assertIsNone(read(hexed(envelope())).group)

    def test_a_store_is_there_only_where_the_group_says_so(self) -> None:
        for given, right in ((GROUP, False), ({**GROUP, "store": False}, False), ({**GROUP, "store": True}, True)):
            with self.subTest(given=given):
                group = read(hexed(envelope(flodl_tw=given))).group
                assert group is not None
                self.assertIs(group.store, right)

    def test_reports_are_taken_only_where_the_group_says_so(self) -> None:
        for given, right in ((GROUP, False), ({**GROUP, "reports": False}, False), ({**GROUP, "reports": True}, True)):
            with self.subTest(given=given):
                group = read(hexed(envelope(flodl_tw=given))).group
                assert group is not None
                self.assertIs(group.reports, right)

    def test_our_controller_takes_reports(self) -> None:
        ledger = Ledger()
        ledger.admit(Offer(Hello("b", b"\0\1", (), "", bytes(32)), 4, "10.0.0.1"), 0.0)
        for store in (False, True):
            world = World(tuple(ledger.roster()), bytes.fromhex(SALT), run_id="night 7", store=store)
            member, ranks = world.assignments[0]
            group = read(world.envelope_hex(member, ranks, "head", 1)).group
            self.assertEqual(group, Group(0, 1, "night 7", store=store, reports=True))

    def test_what_is_missing_or_of_a_wrong_type_is_named(self) -> None:
        wrong: dict[str, tuple[Any, ...]] = {
            "world_size": (MISSING, None, "4", 4.0, True, 0, -1, (1 << 31) + 1, [4]),
            "num_workers": (MISSING, None, "2", 2.0, True, 0, 5),
            "controller": (MISSING, None, [], "10.0.0.1:1"),
            "worker": (MISSING, None, [], "gpu-b"),
            "salt": (MISSING, None, 7, "", SALT[1:], SALT + "0", SALT + "\n", "g" * 32),
            "flodl_tw": (None, [], True, {}, "x"),
        }
        for name, values in wrong.items():
            for value in values:
                with self.subTest(name=name, value=value):
                    self.assertIn(name, self.refused(hexed(envelope(**{name: value}))))

    def test_what_is_wrong_with_the_worker_is_named(self) -> None:
        wrong: dict[str, tuple[tuple[Any, str], ...]] = {
            "host": ((MISSING, "worker.host"), ("", "worker.host"), (7, "worker.host"), ("a\nb", "worker.host")),
            "ranks": (
                (MISSING, "worker.ranks is None, not a list"),
                ({"2": 3}, "not a list"),
                ([], "0 ranks for this host, which offered 2 devices"),
                ([2], "1 ranks for this host"),
                ([1, 2, 3], "3 ranks for this host"),
                ([2, 2], "[2, 2], not a list of different ranks"),
                ([2, 4], "the rank 4 in a world of 4"),
                ([-1, 2], "the rank -1"),
                ([0, True], "the rank True"),
                ([0, 1.0], "the rank 1.0"),
                ([0, "1"], "the rank '1'"),
                ([0, None], "the rank None"),
                ([0, [1]], "the rank [1]"),
            ),
        }
        for name, values in wrong.items():
            for value, text in values:
                with self.subTest(name=name, value=value):
                    self.assertIn(text, self.refused(hexed(worker(**{name: value}))))

    def test_what_is_wrong_with_the_group_is_named(self) -> None:
        wrong: dict[str, tuple[Any, ...]] = {
            "group_rank": (None, "1", True, -1, 2),
            "group_world_size": (None, "2", True, 0, (1 << 31) + 1),
            "run_id": (None, 7, "a\0b"),
            "store": (None, 0, "true"),
            "reports": (None, 1, "false", []),
        }
        for name, values in wrong.items():
            for value in values:
                with self.subTest(name=name, value=value):
                    self.assertIn(f"flodl_tw.{name}", self.refused(hexed(envelope(flodl_tw={**GROUP, name: value}))))

    def test_what_is_no_object_is_refused(self) -> None:
        for raw in (b"", b"{", b"[]", b"7", b"null", b'"x"', b"\xff", b'{"a":NaN}', b'{"a":-Infinity}', b'{"a":1e999}'):
            with self.subTest(raw=raw):
                self.assertIn("the envelope", self.refused(raw.hex()))
        for text in ("7", "xx", "7b 7d", "7b7d\n", "ü"):
            with self.subTest(text=text):
                self.assertIn("the envelope cannot be read", self.refused(text))

    def test_a_depth_that_no_program_needs_is_refused(self) -> None:
        bomb = 100_000
        for raw in (b"[" * bomb, b"[" * bomb + b"]" * bomb, b'{"a":' * bomb + b"1" + b"}" * bomb):
            with self.subTest(raw=raw[:5], size=len(raw)):
                self.assertIn("nested deeper than 64", self.refused(raw.hex()))
        deep: Any = []
        for _ in range(MAX_DEPTH - 2):
            deep = [deep]
        self.assertEqual(read(hexed(envelope(deep=deep))).envelope["deep"], deep)
        self.assertIn("nested deeper than 64", self.refused(hexed(envelope(deep=[deep]))))

    def test_what_no_variable_can_hold_is_refused_before_a_child_is_started(self) -> None:
        self.assertIn("too long", self.refused(hexed(envelope(x="x" * (MAX_VARIABLE // 2)))))
        size = len(rank_environ({}, read(hexed(envelope(x=""))), 0, "")["FLODL_INTERNAL_CLUSTER_JSON"])
        room = (MAX_VARIABLE - len("FLODL_INTERNAL_CLUSTER_JSON=") - 1 - size) // 2
        read(hexed(envelope(x="x" * room)))
        self.assertIn(f"the limit is {MAX_VARIABLE}", self.refused(hexed(envelope(x="x" * (room + 1)))))

    def test_text_that_is_not_unicode_is_refused(self) -> None:
        self.assertIn("not Unicode", self.refused(hexed(envelope(x="\ud800"))))
        with self.assertRaises(ValueError) as caught:
            read(hexed(envelope()), data_path="/data/\udcff")
        self.assertIn(r"the data path '/data/\udcff' is not UTF-8", str(caught.exception))

    def test_the_salt_is_in_no_text(self) -> None:
        self.assertNotIn(SALT, repr(read(hexed(envelope()))))
        for wrong in (
            envelope(salt=SALT + "0"),
            envelope(world_size=0),
            worker(ranks=[]),
            [envelope()],
            envelope(x="\ud800"),
        ):
            with self.subTest(wrong=wrong):
                self.assertNotIn(SALT, self.refused(hexed(wrong)))

    def test_nothing_is_read_into_the_relays_spec_but_where_it_dials(self) -> None:
        given = {"host": "gpu-b", "controller_host": "x", "salt_hex": SALT, "ranks": [2, 3], "later": {"x": 1}}
        spec_hex = read_relay_spec(hexed(given), DIALED)
        self.assertRegex(spec_hex, "^([0-9a-f]{2})+$")
        self.assertEqual(
            json.loads(bytes.fromhex(spec_hex)), {**given, "controller_host": "10.0.0.100", "controller_port": 29500}
        )
        for text in (
            "",
            "7",
            hexed([]),
            hexed({"x": "\ud800"}),
            hexed({"x": "x" * MAX_VARIABLE}),
            (b"[" * 100_000).hex(),
        ):
            with self.subTest(text=text[:20]), self.assertRaisesRegex(ValueError, "^the relay's spec"):
                read_relay_spec(text, DIALED)


class RankTests(unittest.TestCase):
    """A rank's environment."""

    def setUp(self) -> None:
        self.bare = read(hexed(envelope()))
        self.grouped = read(hexed(envelope(flodl_tw=GROUP)))
        self.stored = read(hexed(envelope(flodl_tw={**GROUP, "store": True})))

    def test_flodls_variables_are_set_for_every_rank(self) -> None:
        for assignment in (self.bare, self.grouped, self.stored):
            for index in (0, 1):
                with self.subTest(assignment=assignment, index=index):
                    environ = rank_environ(KEPT, assignment, index, "GPU-8932f937")
                    self.assertEqual(told(environ), assignment.envelope)
                    self.assertEqual(told(environ)["salt"], SALT)
                    self.assertEqual(environ["FLODL_INTERNAL_LOCAL_RANK"], str(index))
                    self.assertEqual(environ["FLODL_HOST_NAME"], "gpu-b")
                    self.assertEqual(environ["CUDA_DEVICE_ORDER"], "PCI_BUS_ID")
                    self.assertEqual(environ["CUDA_VISIBLE_DEVICES"], "GPU-8932f937")
                    self.assertEqual(environ["HIP_VISIBLE_DEVICES"], "GPU-8932f937")

    def test_the_envelope_is_lower_case_hex_of_compact_json(self) -> None:
        text = rank_environ({}, self.grouped, 0, "")["FLODL_INTERNAL_CLUSTER_JSON"]
        self.assertEqual(
            bytes.fromhex(text).decode("utf-8"),
            '{"controller":{"host":"10.0.0.100","port":29500},"world_size":4,"num_workers":2,'
            '"worker":{"host":"gpu-b","ranks":[2,3],"local_devices":[0,1],"nccl_socket_ifname":"","path":""},'
            f'"salt":"{SALT}","flodl_tw":{{"group_rank":1,"group_world_size":2,"run_id":"night 7"}}}}',
        )
        self.assertRegex(text, "^([0-9a-f]{2})+$")

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
        alone = read_envelope(
            hexed(envelope(worker={"host": "gpu-b", "ranks": [2]}, flodl_tw=GROUP)),
            devices=1,
            dialed=DIALED,
            data_path=None,
            gpu_ram_share=None,
        )
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
