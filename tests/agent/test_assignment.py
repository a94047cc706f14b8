"""What a host is told of its world, checked."""

from __future__ import annotations

import json
import unittest
from typing import Any

from flodl_tw.agent.assignment import MAX_VARIABLE, Assignment, Group, read_world
from flodl_tw.core.facts import Offer
from flodl_tw.core.fields import MAX_DEPTH
from flodl_tw.core.ledger import Ledger
from flodl_tw.core.messages import Hello, WorldFormed
from flodl_tw.core.world import LaunchSettings, RelaySettings, World

SALT = "00112233445566778899aabbccddeeff"
DIALED = ("10.0.0.100", 29500)
GROUP = {"group_rank": 1, "group_world_size": 2, "run_id": "night 7"}
MISSING = object()


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


def read(
    envelope_hex: str, relay_hex: str | None = None, data_path: str | None = None, gpu_ram_share: float | None = None
) -> Assignment:
    formed = WorldFormed(envelope_hex, relay_hex)
    return read_world(formed, devices=2, dialed=DIALED, data_path=data_path, gpu_ram_share=gpu_ram_share)


def relay_of(spec_hex: str) -> str:
    """What the relay reads."""
    relay_hex = read(hexed(envelope()), spec_hex).relay_hex
    assert relay_hex is not None
    return relay_hex


def told(assignment: Assignment) -> Any:
    """What its ranks read."""
    return json.loads(bytes.fromhex(assignment.envelope_hex))


class EnvelopeTests(unittest.TestCase):
    """What WorldFormed carries."""

    def test_the_interface_is_the_operators_where_one_is_named(self) -> None:
        for interface, right in (("ib0", "ib0"), (" ", ""), ("", ""), (MISSING, ""), (None, "")):
            self.assertEqual(read(hexed(worker(nccl_socket_ifname=interface))).interface, right)
        self.assertIn("nccl_socket_ifname", self.refused(hexed(worker(nccl_socket_ifname="a\0"))))

    def refused(self, envelope_hex: str) -> str:
        with self.assertRaises(ValueError) as caught:
            read(envelope_hex)
        return str(caught.exception)

    def test_a_good_one_is_an_assignment(self) -> None:
        assignment = read(hexed(envelope(flodl_tw=GROUP)))
        self.assertEqual(
            (assignment.host, assignment.ranks, assignment.world_size, assignment.num_workers, assignment.group),
            ("gpu-b", (2, 3), 4, 2, Group(1, 2, "night 7", False)),
        )

    def test_our_controllers_own_is_an_assignment(self) -> None:
        ledger = Ledger()
        for host in ("a", "b"):
            ledger.enter(Offer(Hello(host, b"\0\1", (), "", bytes(32)), 4, "10.0.0.1"), 0.0)
        world = World(tuple(ledger.roster()), bytes.fromhex(SALT), LaunchSettings(relay=RelaySettings()))
        member, ranks = world.assignments[1]
        assignment = read(world.envelope_hex(member, ranks, "head", 1))
        self.assertEqual(
            (assignment.host, assignment.ranks, assignment.world_size, assignment.num_workers), ("b", (2, 3), 4, 2)
        )
        spec_hex = world.relay_spec_hex(member, ranks, "head", 1)
        assert spec_hex is not None
        spec = json.loads(bytes.fromhex(relay_of(spec_hex)))
        self.assertEqual((spec["controller_host"], spec["controller_port"], spec["ranks"]), (*DIALED, [2, 3]))

    def test_it_names_the_controller_as_it_was_dialed_and_keeps_the_rest(self) -> None:
        given = envelope(flodl_tw={**GROUP, "more": [1.5]}, rank_resources=True, later={"x": None, "ü": "ü"})
        assignment = read(hexed(given))
        self.assertEqual(told(assignment), {**given, "controller": {"host": "10.0.0.100", "port": 29500}})

    def test_the_envelope_is_lower_case_hex_of_compact_json(self) -> None:
        text = read(hexed(envelope(flodl_tw=GROUP))).envelope_hex
        self.assertEqual(
            bytes.fromhex(text).decode("utf-8"),
            '{"controller":{"host":"10.0.0.100","port":29500},"world_size":4,"num_workers":2,'
            '"worker":{"host":"gpu-b","ranks":[2,3],"local_devices":[0,1],"nccl_socket_ifname":"","path":""},'
            f'"salt":"{SALT}","flodl_tw":{{"group_rank":1,"group_world_size":2,"run_id":"night 7"}}}}',
        )
        self.assertRegex(text, "^([0-9a-f]{2})+$")

    def test_the_hosts_own_settings_win_over_the_controllers(self) -> None:
        given = worker(data_path="/theirs", gpu_ram_share=0.9, arch="cu128")
        for data_path, share, right in (
            (None, None, ("/theirs", 0.9)),
            ("/ours", None, ("/ours", 0.9)),
            ("", 0.5, ("", 0.5)),
        ):
            with self.subTest(data_path=data_path, share=share):
                assignment = read(hexed(given), None, data_path, share)
                self.assertEqual(
                    (told(assignment)["worker"]["data_path"], told(assignment)["worker"]["gpu_ram_share"]), right
                )
                self.assertEqual(told(assignment)["worker"]["arch"], "cu128")
        self.assertNotIn("data_path", told(read(hexed(envelope())))["worker"])

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

    def test_rank_0_is_where_the_group_says_if_that_is_an_address(self) -> None:
        for address in ("10.0.0.1", "fd00::1", "fe80::1%eth0", ""):
            group = read(hexed(envelope(flodl_tw={**GROUP, "rank0_address": address}))).group
            assert group is not None
            self.assertEqual(group.rank0_address, address)
        for wrong in ("gpu-a", "10.0.0.1:1", 7):
            self.assertIn("rank0_address", self.refused(hexed(envelope(flodl_tw={**GROUP, "rank0_address": wrong}))))

    def test_the_operators_variables_are_texts_under_names_that_variables_have(self) -> None:
        group = read(hexed(envelope(flodl_tw={**GROUP, "environ": {"A": "b c", "_": ""}}))).group
        assert group is not None
        self.assertEqual(group.environ, {"A": "b c", "_": ""})
        for wrong in ([], {"A": 1}, {"A=": "b"}, {"A": "\0"}, {"A": "x" * 20_000}):
            with self.subTest(wrong=str(wrong)[:20]):
                self.assertIn("environ", self.refused(hexed(envelope(flodl_tw={**GROUP, "environ": wrong}))))

    def test_our_controller_takes_reports(self) -> None:
        ledger = Ledger()
        ledger.enter(Offer(Hello("b", b"\0\1", (), "", bytes(32)), 4, "10.0.0.1"), 0.0)
        for store in (False, True):
            world = World(tuple(ledger.roster()), bytes.fromhex(SALT), run_id="night 7", store=store)
            member, ranks = world.assignments[0]
            group = read(world.envelope_hex(member, ranks, "head", 1)).group
            right = Group(0, 1, "night 7", store=store, reports=True, heartbeats=True, rank0_address="10.0.0.1")
            self.assertEqual(group, right)

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
        ranks = "it must be a list of 2 whole numbers from 0 to 3"
        rank = "it must be a whole number from 0 to 3"
        wrong: dict[str, tuple[tuple[Any, str], ...]] = {
            "host": (
                (MISSING, "worker.host is missing"),
                ("", "worker.host ''"),
                (7, "worker.host 7"),
                ("a\nb", "worker.host 'a\\nb'"),
                ("ü" * 128, "worker.host 'ü"),
            ),
            "ranks": (
                (MISSING, f"worker.ranks is missing: {ranks}"),
                ({"2": 3}, f"worker.ranks (an object): {ranks}"),
                ([], f"worker.ranks (a list of 0): {ranks}"),
                ([2], f"worker.ranks (a list of 1): {ranks}"),
                ([1, 2, 3], f"worker.ranks (a list of 3): {ranks}"),
                ([2, 2], "worker.ranks (a list of 2): it must be a list of different ranks, not [2, 2]"),
                ([2, 4], f"worker.ranks[1] 4: {rank}"),
                ([-1, 2], f"worker.ranks[0] -1: {rank}"),
                ([0, True], f"worker.ranks[1] true: {rank}"),
                ([0, 1.0], f"worker.ranks[1] 1.0: {rank}"),
                ([0, "1"], f"worker.ranks[1] '1': {rank}"),
                ([0, None], f"worker.ranks[1] null: {rank}"),
                ([0, [1]], f"worker.ranks[1] (a list of 1): {rank}"),
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
            "heartbeats": (None, 1, "false", []),
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
                self.assertEqual(self.refused(text), "the envelope is not hex")

    def test_a_depth_that_no_program_needs_is_refused(self) -> None:
        bomb = 100_000
        for raw in (b"[" * bomb, b"[" * bomb + b"]" * bomb, b'{"a":' * bomb + b"1" + b"}" * bomb):
            with self.subTest(raw=raw[:5], size=len(raw)):
                self.assertIn("nested deeper than 64", self.refused(raw.hex()))
        deep: Any = []
        for _ in range(MAX_DEPTH - 2):
            deep = [deep]
        self.assertEqual(told(read(hexed(envelope(deep=deep))))["deep"], deep)
        self.assertIn("nested deeper than 64", self.refused(hexed(envelope(deep=[deep]))))

    def test_what_no_variable_can_hold_is_refused_before_a_child_is_started(self) -> None:
        self.assertIn("too long", self.refused(hexed(envelope(x="x" * (MAX_VARIABLE // 2)))))
        size = len(read(hexed(envelope(x=""))).envelope_hex)
        room = (MAX_VARIABLE - len("FLODL_INTERNAL_CLUSTER_JSON=") - 1 - size) // 2
        read(hexed(envelope(x="x" * room)))
        self.assertIn(f"the limit is {MAX_VARIABLE}", self.refused(hexed(envelope(x="x" * (room + 1)))))

    def test_text_that_is_not_unicode_is_refused(self) -> None:
        self.assertIn("not Unicode", self.refused(hexed(envelope(x="\ud800"))))

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
        spec_hex = relay_of(hexed(given))
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
                relay_of(text)
