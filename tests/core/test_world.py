"""The formed world: final ranks, and the envelope of each host."""

from __future__ import annotations

import json
import unittest
from dataclasses import replace

from flodl_tw.core.facts import Offer
from flodl_tw.core.ledger import Ledger, Member
from flodl_tw.core.messages import Hello
from flodl_tw.core.world import LaunchSettings, RelaySettings, WorkerFields, World, wrong_environ

SALT = bytes.fromhex("00112233445566778899aabbccddeeff")
HOSTS = (("c", b"\0\1"), ("gone", b"\0"), ('a "ü"', b"\7\3\xff"))


def world_of_two(launch: LaunchSettings | None = None) -> World:
    """Two hosts, after one in the middle has left."""
    ledger = Ledger()
    for host, devices in HOSTS:
        ledger.enter(Offer(Hello(host, devices, (), "", bytes(32)), 4, "10.0.0.1"), 0.0)
    gone = ledger.member("gone")
    assert gone is not None
    ledger.depart(gone)
    return World(tuple(ledger.roster()), SALT, launch or LaunchSettings(), 'run "7"')


class TestWorld(unittest.TestCase):
    """What every host is told."""

    def assignment(self, index: int) -> tuple[World, Member, range]:
        world = world_of_two()
        return world, *world.assignments[index]

    def test_the_world_counts_its_ranks(self) -> None:
        self.assertEqual(world_of_two().world_size, 5)
        self.assertEqual([ranks for _, ranks in world_of_two().assignments], [range(2), range(2, 5)])

    def test_an_envelope_is_lower_case_hex_of_this_text(self) -> None:
        world, member, ranks = self.assignment(0)
        envelope = world.envelope_hex(member, ranks, "10.0.0.100", 29500)
        self.assertEqual(
            bytes.fromhex(envelope).decode("utf-8"),
            '{"controller":{"host":"10.0.0.100","port":29500},"world_size":5,"num_workers":2,'
            '"worker":{"host":"c","ranks":[0,1],"local_devices":[0,1],"nccl_socket_ifname":"","path":""},'
            '"salt":"00112233445566778899aabbccddeeff",'
            '"flodl_tw":{"group_rank":0,"group_world_size":2,"run_id":"run \\"7\\"",'
            '"store":false,"reports":true,"heartbeats":true,"rank0_address":"10.0.0.1","environ":{}}}',
        )
        self.assertRegex(envelope, "^([0-9a-f]{2})+$")

    def test_a_host_of_the_roster_gets_its_entry_and_a_walk_in_the_default(self) -> None:
        entry = WorkerFields("eth0", "/srv", "precompiled/cu128", "/data", 0.5)
        world = world_of_two(LaunchSettings({"c": entry}, WorkerFields(nccl_socket_ifname="ib0")))
        workers = [
            json.loads(bytes.fromhex(world.envelope_hex(member, ranks, "h", 1)))["worker"]
            for member, ranks in world.assignments
        ]
        self.assertEqual(
            workers,
            [
                {
                    "host": "c",
                    "ranks": [0, 1],
                    "local_devices": [0, 1],
                    "nccl_socket_ifname": "eth0",
                    "path": "/srv",
                    "arch": "precompiled/cu128",
                    "data_path": "/data",
                    "gpu_ram_share": 0.5,
                },
                {
                    "host": 'a "ü"',
                    "ranks": [2, 3, 4],
                    "local_devices": [7, 3, 255],
                    "nccl_socket_ifname": "ib0",
                    "path": "",
                },
            ],
        )

    def test_there_is_a_relay_spec_only_where_there_is_a_coordinator(self) -> None:
        world, member, ranks = self.assignment(1)
        self.assertIsNone(world.relay_spec_hex(member, ranks, "10.0.0.100", 29500))
        for relay, data_channel, ceiling in (
            (RelaySettings(), "false", 1073741824),
            (RelaySettings(True, 4096), "true", 4096),
        ):
            spec = world_of_two(LaunchSettings(relay=relay)).relay_spec_hex(member, ranks, "10.0.0.100", 29500)
            assert spec is not None
            with self.subTest(relay):
                self.assertEqual(
                    bytes.fromhex(spec).decode("utf-8"),
                    '{"host":"a \\"ü\\"","controller_host":"10.0.0.100","controller_port":29500,"ranks":[2,3,4],'
                    '"salt_hex":"00112233445566778899aabbccddeeff","world_size":5,'
                    f'"data_channel":{data_channel},"frame_ceiling_bytes":{ceiling}}}',
                )

    def test_the_salt_is_not_in_a_world_s_repr(self) -> None:
        self.assertNotIn("salt", repr(world_of_two()))

    def test_each_host_has_its_own_ranks_devices_and_way_to_the_controller(self) -> None:
        world, member, ranks = self.assignment(1)
        envelope = json.loads(bytes.fromhex(world.envelope_hex(member, ranks, "fd00::1", 1)))
        self.assertEqual(
            envelope,
            {
                "controller": {"host": "fd00::1", "port": 1},
                "world_size": 5,
                "num_workers": 2,
                "worker": {
                    "host": 'a "ü"',
                    "ranks": [2, 3, 4],
                    "local_devices": [7, 3, 255],
                    "nccl_socket_ifname": "",
                    "path": "",
                },
                "salt": SALT.hex(),
                "flodl_tw": {
                    "group_rank": 1,
                    "group_world_size": 2,
                    "run_id": 'run "7"',
                    "store": False,
                    "reports": True,
                    "heartbeats": True,
                    "rank0_address": "10.0.0.1",
                    "environ": {},
                },
            },
        )

    def test_each_host_is_told_whether_there_is_a_store(self) -> None:
        without, member, ranks = self.assignment(0)
        for world, right in ((without, False), (replace(without, store=True), True)):
            envelope = json.loads(bytes.fromhex(world.envelope_hex(member, ranks, "h", 1)))
            self.assertIs(envelope["flodl_tw"]["store"], right)

    def test_each_host_is_told_the_variables_of_its_ranks(self) -> None:
        entry = WorkerFields("eth0", environ={"A": "ä"})
        world = world_of_two(LaunchSettings({"c": entry}, WorkerFields(environ={"B": ""})))
        told = [
            json.loads(bytes.fromhex(world.envelope_hex(member, ranks, "h", 1))) for member, ranks in world.assignments
        ]
        self.assertEqual([each["flodl_tw"]["environ"] for each in told], [{"A": "ä"}, {"B": ""}])
        self.assertEqual([each["worker"].get("environ") for each in told], [None, None])

    def test_rank_0_is_where_its_host_came_from_and_on_loopback_only_where_all_are(self) -> None:
        for offers, right in (
            ((("10.0.0.1", "10.0.0.100"), ("10.0.0.2", "10.0.0.100")), "10.0.0.1"),
            ((("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "127.0.0.1")), "127.0.0.1"),
            # It is on the controller's machine, and others have dialed that by another address.
            ((("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("10.0.0.2", "10.0.0.100")), "10.0.0.100"),
            ((("10.0.0.1", "10.0.0.100"), ("127.0.0.1", "127.0.0.1")), "10.0.0.1"),
            ((("fd00::1", "fd00::100"),), "fd00::1"),
        ):
            ledger = Ledger()
            for number, (address, dialed) in enumerate(offers):
                ledger.enter(Offer(Hello(f"h{number}", b"\0", (), "", bytes(32)), 4, address, dialed), 0.0)
            with self.subTest(offers):
                self.assertEqual(World(tuple(ledger.roster()), SALT).rank0_address, right)
        self.assertEqual(World((), SALT).rank0_address, "")

    def test_what_can_be_no_variable_is_told_in_words(self) -> None:
        self.assertIsNone(wrong_environ({"A": "", "_b2": "x=y\n", "C": "x" * 16_000}))
        for environ, said in (
            ({"": "x"}, "'' is no name of a variable"),
            ({"A=B": "x"}, "'A=B' is no name of a variable"),
            ({"2A": "x"}, "'2A' is no name of a variable"),
            ({"Ä": "x"}, "'Ä' is no name of a variable"),
            ({"A\n": "x"}, "is no name of a variable"),
            ({"A": "x\0"}, "'A' has a NUL in its value"),
            ({"A": "ä" * 8192}, "it has 16385 bytes, the limit is 16384"),
        ):
            with self.subTest(environ=str(environ)[:20]):
                self.assertIn(said, wrong_environ(environ) or "")

    def test_a_name_in_another_script_is_utf_8_in_the_envelope(self) -> None:
        world, member, ranks = self.assignment(1)
        self.assertIn('"host":"a \\"ü\\""'.encode(), bytes.fromhex(world.envelope_hex(member, ranks, "h", 1)))
