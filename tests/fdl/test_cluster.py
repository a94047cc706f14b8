"""The cluster file: what is read from it, and one line for each thing that can't be."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import unittest
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flodl_tw.core.errors import SettingError
from flodl_tw.core.world import WorkerFields
from flodl_tw.fdl.cluster import KNOWN_KEYS, ClusterFile, read_cluster_file
from flodl_tw.fdl.yaml_document import MAX_BYTES, MAX_DEPTH
from flodl_tw.settings import ControllerSettings

SAMPLE = Path(__file__).parent / "cluster" / "fdl.yml"
TOKEN = "0123456789abcdef0123456789abcdef"
WHOLE = (
    {
        "port": "1337",
        "min-rank-start": "4",
        "target-ranks": "6",
        "join-timeout": "300",
        "max-join-timeout": "900",
        "start": "hybrid",
    },
    {
        "gpu-a": WorkerFields(
            "eth0", "/srv/train", "precompiled/cu128", "/data/imagenet", 0.25, {"NCCL_P2P_DISABLE": "1"}
        ),
        "gpu-b": WorkerFields(
            "eth0", "/srv/train", gpu_ram_share=0.5, environ={"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "WARN"}
        ),
    },
    (None, False, WorkerFields(gpu_ram_share=0.25, environ={"NCCL_P2P_DISABLE": "1"})),
)

UNSAID = (None, False, WorkerFields())

# A file whose line numbers the tables below state: the places in it are replaced one at a time.
FILE = """\
cluster:
  controller:
    host: head
    port: 1400
    join:
      start: auto
  workers:
    - host: a
      ranks: [0, 1]
      local_devices: [0, 1]
      nccl_socket_ifname: eth0
      path: /srv
      tunnel: false
    - host: b
      ranks: [2]
      local_devices: all
      nccl_socket_ifname: eth0
      path: /srv
      env: {A: b}
  env: {C: d}
  gpu_ram_share: 0.5
"""
BARE = "controller:\n  host: head\n  join:\n    discovery: true\n    min_rank_start: 2\n"


def said(file: ClusterFile) -> tuple[object, ...]:
    """All that a file says, without the places."""
    return texts(file), file.roster, (file.token, file.open_admission, file.walk_in)


def texts(file: ClusterFile) -> dict[str, str]:
    """The options that it gives."""
    return {name: placed.text for name, placed in file.options.items()}


def sample() -> dict[str, Any]:
    found = yaml.safe_load(SAMPLE.read_text())
    assert isinstance(found, dict)
    return found


class ClusterFileTestCase(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def read(self, content: str | bytes, start: str | None = None) -> ClusterFile:
        path = self.folder / "fdl.yml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_cluster_file(str(path), start)

    def refused(self, content: str | bytes) -> str:
        """The refusal, without the folder; each is one line that shows no token."""
        with self.assertRaises(SettingError) as caught:
            self.read(content)
            ControllerSettings.from_options({"cluster": self.folder / "fdl.yml", "port-file": "port"})
        text = str(caught.exception).replace(f"{self.folder}/", "")
        self.assertTrue(text.startswith("--cluster fdl.yml"), text)
        self.assertTrue(text.isprintable(), text)
        self.assertNotIn(TOKEN[:24], text)
        return text

    def refused_join(self, *lines: str, file: str = FILE) -> str:
        return self.refused(file.replace("      start: auto\n", "".join(f"      {line}\n" for line in lines)))


class ReadingTests(ClusterFileTestCase):
    def test_the_sample_is_read_whole(self) -> None:
        self.assertEqual(said(read_cluster_file(str(SAMPLE))), WHOLE)

    def test_a_roster_of_5000_hosts_is_read(self) -> None:
        hosts = [f"gpu-{number:04d}.cluster" for number in range(5000)]
        workers = [{"host": host, "local_devices": [0], "nccl_socket_ifname": "eth0", "path": "/"} for host in hosts]
        read = self.read(json.dumps({"controller": {"host": "head"}, "workers": workers}))
        self.assertEqual((list(read.roster), texts(read)["target-ranks"]), (hosts, "5000"))

    def test_the_roster_keeps_the_order_of_the_file(self) -> None:
        self.assertEqual(list(read_cluster_file(str(SAMPLE)).roster), ["gpu-a", "gpu-b"])

    def test_the_block_alone_and_json_say_the_same(self) -> None:
        whole = sample()
        shapes = {
            "the block, YAML": yaml.safe_dump(whole["cluster"], sort_keys=False),
            "the block, JSON": json.dumps(whole["cluster"]),
            "fdl.json": json.dumps(whole, indent=2),
            "JSON indented with tabs": json.dumps(whole, indent="\t"),
            "JSON without a space": json.dumps(whole, separators=(",", ":")),
            "Windows line ends": SAMPLE.read_text().replace("\n", "\r\n"),
            "a byte order mark": "\ufeff" + SAMPLE.read_text(),
            "tabs before values and comments": SAMPLE.read_text().replace("head.lab", "\t head.lab\t# the head"),
        }
        for name, text in shapes.items():
            with self.subTest(name):
                self.assertEqual(said(self.read(text)), WHOLE)

    def test_other_top_level_keys_of_an_fdl_file_are_ignored(self) -> None:
        for text in ("join: {token: [1]}\n", "publish: 3\n", "ctroller: &x [*x]\n", "commands: {a: b, a: c}\n"):
            with self.subTest(text):
                self.assertIn("a", self.read(text + FILE).roster)

    def test_what_is_left_out_gets_its_default(self) -> None:
        read = self.read(
            "controller: {host: h}\nworkers: [{host: a, local_devices: [0], nccl_socket_ifname: '', path: /}]"
        )
        self.assertEqual(
            said(read),
            ({"port": "1337", "min-rank-start": "1", "target-ranks": "1"}, {"a": WorkerFields("", "/")}, UNSAID),
        )

    def test_a_key_without_a_value_is_one_that_is_not_given(self) -> None:
        emptied = FILE.replace("port: 1400", "port:").replace("tunnel: false", "tunnel: ~").replace("{C: d}", "null")
        read = self.read(emptied.replace("      start: auto\n", ""))
        self.assertEqual(texts(read), {"port": "1337", "min-rank-start": "3", "target-ranks": "3"})

    def test_every_key_that_is_accepted_and_unused_is_accepted(self) -> None:
        plain = said(self.read(FILE))
        unused = {
            "    port: 1400\n": ("    path: x\n", "    docker: x\n", "    arch: x\n", "    data_path: x\n"),
            "      tunnel: false\n": (
                *("      docker: x\n", "      ssh:\n"),
                *(f"      ssh: {{{key}: x}}\n" for key in KNOWN_KEYS["ssh"]),
            ),
        }
        for anchor, lines in unused.items():
            for line in lines:
                with self.subTest(line):
                    self.assertEqual(
                        said(self.read(FILE.replace(anchor, anchor * ("C: d" not in anchor) + line))), plain
                    )

    def test_scalars_are_those_of_yaml_1_2(self) -> None:
        for text in ("no", "on", "010", "1_000", "1:30", "'1'"):
            with self.subTest(text):
                read = self.read(FILE.replace("host: a", f"host: {text}"))
                self.assertIn(text.strip("'"), read.roster)
        for text, port in (("0x50", 80), ("0o17", 15), ("+80", 80)):
            with self.subTest(text):
                self.assertEqual(texts(self.read(FILE.replace("1400", text)))["port"], str(port))

    def test_a_share_is_any_number_that_is_not_negative(self) -> None:
        for text, share in (("0", 0.0), ("1", 1.0), ("1.5", 1.5), (".5", 0.5), ("5e-1", 0.5)):
            with self.subTest(text):
                self.assertEqual(self.read(FILE.replace("share: 0.5", f"share: {text}")).walk_in.gpu_ram_share, share)

    def test_variables_are_the_workers_own_over_the_clusters_and_a_walk_in_has_those(self) -> None:
        read = self.read(FILE.replace("env: {A: b}", "env: {A: b, C: 2, E: true}"))
        self.assertEqual(
            [fields.environ for fields in read.roster.values()], [{"C": "d"}, {"C": "2", "A": "b", "E": "true"}]
        )
        self.assertEqual(read.walk_in.environ, {"C": "d"})

    def test_what_is_not_used_is_named_with_its_line(self) -> None:
        self.assertEqual(self.read(FILE).notes, ())
        text = FILE.replace("port: 1400", "path: /srv").replace("tunnel: false", "ssh: {target: a}")
        text = "inherit-from: base.yml\n" + text.replace("{C: d}", "{C: d, RANK: '0', CUDA_VISIBLE_DEVICES: '1'}")
        inherits, unused = (note.replace(f"{self.folder}/", "") for note in self.read(text).notes)
        self.assertIn("--cluster fdl.yml: inherit-from (line 1): it is not merged", inherits)
        keys = "cluster.controller.path (line 5), cluster.workers[0].ssh (line 14), "
        variables = "cluster.env.RANK (line 21), cluster.env.CUDA_VISIBLE_DEVICES (line 21)"
        self.assertEqual(unused, f"--cluster fdl.yml: flodl-tw has no use for {keys}{variables}")
        self.assertEqual(self.read(text).walk_in.environ, {"C": "d"})

    def test_of_a_long_roster_a_few_are_named_and_the_others_counted(self) -> None:
        workers = "".join(
            f"- {{host: h{number}, local_devices: [0], nccl_socket_ifname: e, path: x, docker: y}}\n"
            for number in range(20)
        )
        (note,) = self.read(f"{BARE}workers:\n{workers}").notes
        self.assertTrue(note.endswith("workers[7].docker (line 14) and 12 more"), note)

    def test_the_controller_warns_of_it_at_its_start(self) -> None:
        read = self.read("inherit-from: base.yml\n" + FILE)
        settings = ControllerSettings.from_options({"cluster": self.folder / "fdl.yml"})
        self.assertEqual(settings.warnings, read.notes)
        self.assertEqual(settings.run.launch.walk_in.environ, {"C": "d"})

    def test_an_alias_is_what_it_names(self) -> None:
        text = FILE.replace("path: /srv\n      tunnel", "path: &p /data\n      tunnel")
        text = text.replace("path: /srv\n      env", "path: *p\n      env")
        self.assertEqual([fields.path for fields in self.read(text).roster.values()], ["/data", "/data"])

    def test_a_token_is_kept_as_bytes_and_never_shown(self) -> None:
        for text in (TOKEN, TOKEN.upper(), f"'{TOKEN}'", "1" * 32, "1" * 15 + "e" + "1" * 16):
            with self.subTest(text):
                read = self.read(BARE + f"    token: {text}\n")
                self.assertEqual(read.token, bytes.fromhex(text.strip("'")))
                self.assertNotIn("token", repr(read))
                self.assertNotIn(text.strip("'"), repr(read))


class WindowTests(ClusterFileTestCase):
    def join(self, *lines: str, file: str = FILE, start: str | None = None) -> tuple[str | None, ...]:
        """Quorum, target and start mode."""
        text = file.replace("      start: auto\n", "".join(f"      {line}\n" for line in lines))
        told = texts(self.read(text, start))
        return told.get("min-rank-start"), told.get("target-ranks"), told.get("start")

    def test_quorum_and_target_default_to_the_ranks_of_the_roster(self) -> None:
        self.assertEqual(self.join(), ("3", "3", None))
        self.assertEqual(self.join("min_rank_start: 2"), ("2", "3", None))
        self.assertEqual(self.join("target_ranks: 5"), ("3", "5", None))
        self.assertEqual(self.join("start: hybrid"), ("3", "3", "hybrid"))
        self.assertEqual(self.join("start: manual", start="hybrid"), ("3", "3", "manual"))

    def test_manual_mode_has_no_target(self) -> None:
        self.assertEqual(self.join("start: manual"), ("3", None, "manual"))
        self.assertEqual(self.join("target_ranks: 5", start="manual"), ("3", None, None))

    def test_discovery_states_its_quorum_and_needs_no_worker(self) -> None:
        for workers in ("", "workers: []\n", "workers:\n"):
            with self.subTest(workers):
                self.assertEqual(said(self.read(BARE + workers)), ({"port": "1337", "min-rank-start": "2"}, {}, UNSAID))
        self.assertEqual(self.join("discovery: true", "min_rank_start: 1"), ("1", None, None))

    def test_a_file_without_ranks_has_one_for_each_device(self) -> None:
        text = FILE.replace("      ranks: [0, 1]\n", "").replace("ranks: [2]", "ranks: []")
        self.assertEqual(self.join(file=text.replace("devices: all", "devices: [3, 1, 2]")), ("5", "5", None))

    def test_without_ranks_and_with_all_devices_the_quorum_is_stated(self) -> None:
        text = FILE.replace("      ranks: [0, 1]\n", "").replace("      ranks: [2]\n", "")
        self.assertEqual(self.join("min_rank_start: 2", file=text), ("2", None, None))
        refusal = self.refused_join("start: auto", file=text)
        self.assertIn(
            "cluster.controller.join.min_rank_start (line 5): it is missing; with local_devices: all", refusal
        )

    def test_a_farm_overlay_is_read_whole(self) -> None:
        """The shape that flodl's own wizard writes for walk-ins behind sshd."""
        read = self.read(
            "cluster:\n"
            "  controller:\n"
            "    host: 127.0.0.1   # overridden anyway\n"
            "    port: 1337\n"
            "    path: /srv/farm\n"
            "    join:\n"
            "      discovery: true\n"
            "      min_rank_start: 1\n"
            "      start: manual\n"
            "      join_timeout: 600\n"
            "      max_join_timeout: 1200\n"
            "      tunnel_only: true\n"
            f"      token: {TOKEN}\n\n"
            "  workers: []\n\n"
            "# commands:\n#   train:\n"
        )
        window = {"min-rank-start": "1", "start": "manual", "join-timeout": "600", "max-join-timeout": "1200"}
        self.assertEqual(
            said(read),
            ({"port": "1337", "interface": "127.0.0.1", **window}, {}, (bytes.fromhex(TOKEN), False, WorkerFields())),
        )

    def test_a_tunnelled_cluster_binds_loopback(self) -> None:
        every = FILE.replace("tunnel: false", "tunnel: true").replace("env: {A: b}", "tunnel: true")
        table = (
            ("tunnel_only", BARE + "    tunnel_only: true\n", True),
            ("every worker", every, True),
            ("one of two workers", FILE.replace("tunnel: false", "tunnel: true"), False),
            ("none", FILE, False),
            ("no worker at all", BARE, False),
            ("tunnel_only: false", BARE + "    tunnel_only: false\n", False),
        )
        for name, text, loopback in table:
            with self.subTest(name):
                self.assertIs("interface" in self.read(text).options, loopback)

    def test_contradictions_of_the_window_name_what_gave_each_value(self) -> None:
        join = "--cluster fdl.yml: cluster.controller.join"
        table: tuple[tuple[tuple[str, ...], str], ...] = (
            (
                ("start: manual", "target_ranks: 4"),
                f"{join}.target_ranks (line 7) 4: --start manual leaves the close to the operator; drop it, or use ",
            ),
            (
                ("min_rank_start: 3", "target_ranks: 2"),
                f"{join}.target_ranks (line 7) 2: the least is --min-rank-start, 3; raise it, or lower --min-rank-st",
            ),
            (("target_ranks: 2",), f"{join}.target_ranks (line 6) 2: the least is --min-rank-start, 3; raise it"),
            (
                ("min_rank_start: 4",),
                "--cluster fdl.yml: the roster's ranks 3: the least is --min-rank-start, 4; raise it, or lower ",
            ),
            (
                ("join_timeout: 20", "max_join_timeout: 10"),
                f"{join}.max_join_timeout (line 7) 10: the least is --join-timeout, 20 s; raise it, or lower --join",
            ),
            (
                ("max_join_timeout: 299",),
                f"{join}.max_join_timeout (line 6) 299: the least is --join-timeout, 300 s; raise it",
            ),
            (
                ("discovery: true",),
                f"{join}.min_rank_start (line 5): it is missing; with discovery: true the roster can't tell it: give",
            ),
        )
        for lines, expected in table:
            with self.subTest(lines):
                self.assertIn(expected, self.refused_join(*lines))

    def test_values_of_the_join_block(self) -> None:
        counts = "the limits are 1 and 2147483648; give a whole number between them"
        seconds = "the limits are 1 and 31622400; give a whole number between them"
        table = (
            ("min_rank_start: 0", f"'0': {counts}"),
            ("min_rank_start: true", "is true: it must be a whole number; give one"),
            ("min_rank_start: 1.0", "is 1.0: it must be a whole number"),
            ("target_ranks: '2'", "is '2': it must be a whole number"),
            ("target_ranks: -1", f"'-1': {counts}"),
            ("join_timeout: -1", f"'-1': {seconds}"),
            ("max_join_timeout: 99999999", f"'99999999': {seconds}"),
            ("join_timeout: 5s", "is '5s': it must be a whole number"),
            ("join_timeout: 1e2", "is 1e2: it must be a whole number"),
            ("start: operator", "is 'operator': the choices are auto, manual, hybrid; give one of them"),
            ("start: true", "is true: it must be a text; write it as a text, in quotes"),
            ("discovery: yes", "is 'yes': it must be true or false; write one of the two without quotes"),
            ("discovery: 1", "is 1: it must be true or false"),
            ("open_admission: 'true'", "is 'true': it must be true or false"),
            ("tunnel_only: [true]", "is a list: it must be true or false"),
            ("min_rank_start: {a: b}", "is a mapping: it must be a whole number"),
            ("min_rank_start: !!int many", "is many: it is no whole number that can be read"),
            ("discovery: !!bool perhaps", "is perhaps: it must be true or false"),
            ("start: !mine auto", "is 'auto': it must be a text"),
            ("token: abc", ": a token is 32 hex digits, this is 3 characters; make one with: flodl-tw token"),
            ("token: [1]", ": it must be a text of 32 hex digits; make one with: flodl-tw token"),
        )
        for line, expected in table:
            with self.subTest(line):
                path = f"cluster.controller.join.{line.split(':')[0]} (line 6)"
                told = expected if expected.startswith(":") else f" {expected}"
                self.assertIn(f"--cluster fdl.yml: {path}{told}", self.refused_join(line))


class RefusalTests(ClusterFileTestCase):
    def test_values_of_the_other_levels(self) -> None:
        ports = "the limits are 0 and 65535; give a whole number between them"
        text = "it must be a text; write it as a text, in quotes"
        ranks = (
            "the ranks of its workers must be 0 to 2, each once, and each worker must have some; number them without"
        )
        table = (
            ("port: 1400", "port: 70000", f"controller.port (line 4) '70000': {ports}"),
            ("port: 1400", "port: 1337.0", "controller.port (line 4) is 1337.0: it must be a whole number; give one"),
            ("port: 1400", "port: " + "9" * 5000, "controller.port (line 4) is (not shown): it is no whole number"),
            ("host: head", "host: 7", f"controller.host (line 3) is 7: {text}"),
            ("host: head", "path: /", "controller.host (line 2): it is missing; give the name or address that workers"),
            (
                "host: head",
                'host: "\\ud800"',
                "controller.host (line 3) is '\\ud800': it has a NUL or half a character",
            ),
            ("host: head", 'host: "a\\0"', "controller.host (line 3) is 'a\\x00': it has a NUL or half a character"),
            ("- host: a", "- path: /x", "workers[0].path (line 12): the key is there twice, first in line 8; drop one"),
            (
                "- host: a",
                "- docker: x",
                "workers[0].host (line 8): it is missing; give the name that the worker joins",
            ),
            (
                "- host: a",
                "- host: b",
                "workers[1].host (line 14) is 'b': another worker has this host, too; give",
            ),
            ("[0, 1]\n      local", "0\n      local", "workers[0].ranks (line 9) is 0: it must be a list; write it as"),
            ("ranks: [0, 1]", "ranks: [0, 0]", "workers[0].ranks[1] (line 9) is 0: it is in this list twice; drop one"),
            ("ranks: [0, 1]", "ranks: [0, -1]", "workers[0].ranks[1] (line 9) is -1: the limits are 0 and 2147483648"),
            ("ranks: [0, 1]", "ranks: [0, a]", "workers[0].ranks[1] (line 9) is 'a': it must be a whole number; give"),
            ("ranks: [2]", "ranks: [1]", f"workers (line 7): {ranks}"),
            ("ranks: [2]", "ranks: [4]", f"workers (line 7): {ranks}"),
            ("ranks: [2]", "ranks: []", "workers (line 7): the ranks of its workers must be 0 to 1, each once, and"),
            ("ranks: [2]", "docker: x", "workers (line 7): the ranks of its workers must be 0 to 1, each once, and"),
            (
                "devices: [0, 1]",
                "devices: [3, 3]",
                "workers[0].local_devices[1] (line 10) is 3: it is in this list twice",
            ),
            (
                "devices: [0, 1]",
                "devices: [0, 256]",
                "local_devices[1] (line 10) is 256: the limits are 0 and 255; give",
            ),
            (
                "devices: [0, 1]",
                "devices: []",
                "workers[0].local_devices (line 10): it has no device; list one or more",
            ),
            ("devices: all", "devices: every", "workers[1].local_devices (line 16) is 'every': it must be a list of"),
            ("devices: all", "devices: 0", "workers[1].local_devices (line 16) is 0: it must be a list of devices, or"),
            ("devices: all", "devices: {a: 0}", "workers[1].local_devices (line 16) is a mapping: it must be a list"),
            (
                "devices: all",
                "devices:",
                "workers[1].local_devices (line 14): it is missing; list the worker's devices",
            ),
            ("path: /srv\n      tunnel", "arch: x\n      tunnel", "workers[0].path (line 8): it is missing; give the"),
            ("tunnel: false", "tunnel: no", "workers[0].tunnel (line 13) is 'no': it must be true or false; write one"),
            ("tunnel: false", "arch: [x]", f"workers[0].arch (line 13) is a list: {text}"),
            (
                "tunnel: false",
                "gpu_ram_share: half",
                "workers[0].gpu_ram_share (line 13) is 'half': it must be a number",
            ),
            ("{C: d}", "x", "cluster.env (line 20): it must be a mapping, this is a text"),
            ("{C: d}", "{C: [d]}", "cluster.env.C (line 20) is a list: it must be a text"),
            ("{C: d}", "{C-D: d}", "cluster.env (line 20): these cannot be a rank's variables: 'C-D' is no name"),
            ("{C: d}", f"{{{TOKEN}: d}}", "cluster.env (line 20): these cannot be a rank's variables: "),
            (
                "{C: d}",
                f"{{C: {'x' * 16384}}}",
                "cluster.env (line 20): these cannot be a rank's variables: it has 16385",
            ),
            ("{A: b}", f"{{A: {'x' * 16382}}}", "workers[1].env (line 19): with the cluster's it has 16385 bytes"),
            ("gpu_ram_share: 0.5", "[a]: b", "cluster (line 21): a key must be a text; put it in quotes"),
            ("gpu_ram_share: 0.5", "1: b", "cluster (line 21): a key must be a text"),
            (
                "gpu_ram_share: 0.5",
                "gpu_ram_share: 0.5\n  gpu_ram_share: 1",
                "cluster.gpu_ram_share (line 22): the key is there twice, first in line 21; drop one",
            ),
            ("share: 0.5", "share: -0.1", "cluster.gpu_ram_share (line 21) is -0.1: the least is 0, and it must be"),
            ("share: 0.5", "share: .nan", "cluster.gpu_ram_share (line 21) is .nan: "),
            ("share: 0.5", "share: .inf", "cluster.gpu_ram_share (line 21) is .inf: "),
            ("share: 0.5", "share: 1e999", "cluster.gpu_ram_share (line 21) is 1e999: the least is 0, and it must be"),
            (
                "share: 0.5",
                "share: true",
                "cluster.gpu_ram_share (line 21) is true: it must be a number; give a number",
            ),
        )
        for old, new, expected in table:
            with self.subTest(f"{old} -> {new}"[:80]):
                self.assertEqual(FILE.count(old), 1, "the place is there once")
                self.assertIn(expected, self.refused(FILE.replace(old, new)))

    def test_an_unknown_key_is_named_with_the_nearest_known_one(self) -> None:
        table = (
            ("  env: {C: d}", "  worker: []", "cluster.worker (line 20): unknown key; did you mean workers?"),
            ("port: 1400", "prt: 1", "cluster.controller.prt (line 4): unknown key; did you mean port?"),
            (
                "      start: auto",
                "      min_rank: 2",
                "cluster.controller.join.min_rank (line 6): unknown key; did you mean min_rank_start?",
            ),
            ("tunnel: false", "tunel: true", "cluster.workers[0].tunel (line 13): unknown key; did you mean tunnel?"),
            (
                "tunnel: false",
                "ssh: {usr: x}",
                "cluster.workers[0].ssh.usr (line 13): unknown key; did you mean user?",
            ),
            (
                "port: 1400",
                "zzz: 1",
                "cluster.controller.zzz (line 4): unknown key; the known ones are host, port, join, path, docker, "
                "arch, data_path",
            ),
            ("port: 1400", "<<: {port: 1}", "cluster.controller.'<<' (line 4): unknown key; the known ones are host"),
        )
        for old, new, expected in table:
            with self.subTest(new):
                self.assertEqual(
                    f"--cluster fdl.yml: {expected}", self.refused(FILE.replace(old, new))[: 20 + len(expected) - 1]
                )
        self.assertIn(
            "fdl.yml: controler (line 1): unknown key; did you mean controller?", self.refused("controler: {}")
        )
        self.assertIn("fdl.yml: clutser (line 1): unknown key; did you mean cluster?", self.refused("clutser: {}"))

    def test_paths_start_at_the_block_where_the_file_is_the_block(self) -> None:
        self.assertIn("fdl.yml: controller.port (line 6) is a: ", self.refused(BARE + "  port: !!int a\n"))
        self.assertIn("fdl.yml: workers[0] (line 6): it must be a mapping", self.refused(BARE + "workers: [a]\n"))
        self.assertIn("fdl.yml: controller (line 1): it is missing; ", self.refused("workers: []\n"))

    def test_what_is_missing_is_named(self) -> None:
        table = (
            ("cluster: {}", "cluster.controller (line 1): it is missing; it has the host"),
            ("cluster: 3", "cluster (line 1): it must be a mapping, this is a whole number"),
            ("\ncluster:\n  controller:\n", "cluster.controller (line 2): it is missing"),
            ("controller: {host: h}", "workers (line 1): it is missing; list one or more, or set controller.join.disc"),
            ("controller: {host: h}\nworkers: []", "workers (line 1): it is missing"),
            ("controller: {host: h}\nworkers: {a: b}", "workers (line 2) is a mapping: it must be a list"),
        )
        for text, expected in table:
            with self.subTest(text):
                self.assertIn(f"--cluster fdl.yml: {expected}", self.refused(text))

    def test_a_file_that_is_no_cluster_file(self) -> None:
        nest = "[" * (MAX_DEPTH + 1)
        table: tuple[tuple[str | bytes, str], ...] = (
            ("", "--cluster fdl.yml: it is empty; name a file with a cluster: block"),
            ("# nothing\n", "--cluster fdl.yml: it is empty; "),
            ("~", "--cluster fdl.yml: it is empty; "),
            ("- a", "fdl.yml (line 1): it must be a mapping, this is a list; "),
            ("\nwords", "fdl.yml (line 2): it must be a mapping, this is a text; "),
            ("{}", "fdl.yml: controller (line 1): it is missing"),
            (
                "description: x\ncommands: {}",
                "fdl.yml (line 1): it has no cluster: block; name the file that has one; an",
            ),
            ("cluster:\n", "fdl.yml (line 1): it has no cluster: block; "),
            (b"a: b\nc: \xff", "fdl.yml (line 2): it is not UTF-8; save it as UTF-8"),
            (b"a: b\nc: \x07", "fdl.yml (line 2): it is neither YAML nor JSON: it has the character #x0007; correct"),
            ("a: b\nc: [d", "fdl.yml (line 2): it is neither YAML nor JSON: expected ',' or ']'"),
            ("a: b\n\tc: d", "fdl.yml (line 2): it is neither YAML nor JSON: "),
            (
                "a: 'b",
                "fdl.yml (line 1): it is neither YAML nor JSON: found unexpected end of stream; correct that line",
            ),
            ("a: *nowhere", "fdl.yml (line 1): it is neither YAML nor JSON: found undefined alias"),
            ('a: "\\UFFFFFFFF"', "it is neither YAML nor JSON: an escape in it names no character"),
            ("a: b\n---\nc: d", "fdl.yml (line 2): it is neither YAML nor JSON: but found another document"),
            ("a:\n" + nest, f"fdl.yml (line 2): it is neither YAML nor JSON: it is nested deeper than {MAX_DEPTH}"),
            ("a: " + "[" * 100_000, "nested deeper than"),
            (b"#" * (MAX_BYTES + 1), f"--cluster fdl.yml: it is larger than {MAX_BYTES} bytes; name the fdl.yml, or"),
        )
        for content, expected in table:
            with self.subTest(content[:40]):
                self.assertIn(expected, self.refused(content))

    def test_a_file_that_cannot_be_read(self) -> None:
        pipe = str(self.folder / "pipe.yml")
        os.mkfifo(pipe)
        table = (
            (pipe, "pipe.yml: it cannot be read (it is no regular file); check the path"),
            (str(self.folder / "none.yml"), "none.yml: it cannot be read (No such file or directory); check the path"),
            (str(self.folder), "it cannot be read (Is a directory); check the path and its owner"),
            ("a\0b", "--cluster 'a\\x00b': it cannot be read (embedded null byte); check the path"),
        )
        for path, expected in table:
            with self.subTest(path), self.assertRaises(SettingError) as caught:
                read_cluster_file(path)
            self.assertIn(expected, str(caught.exception))

    def test_aliases_of_aliases_cost_nothing(self) -> None:
        names = "abcdefghijklmnopqrstuvwxyz"
        lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
        lines += [f"{name}: &{name} [{', '.join([f'*{last}'] * 9)}]" for last, name in pairwise(names)]
        bomb = "\n".join(lines) + "\n"
        self.assertEqual(list(self.read(bomb + FILE).roster), ["a", "b"])
        self.assertIn(
            "cluster.workers[0] (line 25): it must be a mapping",
            self.refused(bomb + "cluster: {controller: {host: h}, workers: *z}"),
        )
        self.assertIn("cluster (line 1): it must be", self.refused("cluster: &c [*c]"))
        self.assertIn(
            "controller.host (line 2) is a mapping: it must be a text",
            self.refused(BARE.replace("host: head", "host: &e {x: *e}", 1)),
        )


class SecretTests(ClusterFileTestCase):
    def test_no_fault_around_a_token_shows_it(self) -> None:
        places = (
            f"token:{TOKEN}",
            f"token: {TOKEN}00",
            f"token: {TOKEN[:-1]}",
            f"token: [{TOKEN}]",
            f"token: {{{TOKEN}: a}}",
            f"token: '{TOKEN}",
            f"token: *{TOKEN}",
            f"token: !{TOKEN}!a b",
            f"token: %{TOKEN}",
            f"token: @{TOKEN}",
            f"token: {TOKEN}: a",
            f"token: {TOKEN}\n      token: {TOKEN}",
            f"tokn: {TOKEN}",
            f"{TOKEN}: token",
            f"? {TOKEN}\n      : token",
            f"start: {TOKEN}",
            f"min_rank_start: {TOKEN}",
            f"discovery: {'1' * 32}",
        )
        for place in places:
            with self.subTest(place):
                refusal = self.refused_join(place)
                self.assertNotIn(TOKEN[:24], refusal)
                self.assertNotIn("1" * 24, refusal)
        for text in (f"token:{TOKEN}", f"{{token:{TOKEN}}}", f"[{TOKEN}]"):
            with self.subTest(text):
                self.refused(FILE.replace("join:\n      start: auto", f"join: {text}"))


FRAGMENTS = st.sampled_from(
    [line + "\n" for line in FILE.splitlines()]
    + [
        "      ",
        "  ",
        "- ",
        ": ",
        "? ",
        "[",
        "]",
        "{",
        "}",
        ", ",
        "&a ",
        "*a ",
        "!!int ",
        "!x ",
        "| \n",
        "> \n",
        "\t",
        "\n",
    ]
    + [
        "#",
        "'",
        '"',
        "\\",
        "%YAML 1.2\n",
        "--- ",
        "...\n",
        "<<: ",
        "~",
        "0x",
        ".5",
        "true",
        "all",
        "ssh: ",
        "token: ",
        "\0",
    ]
)


class ArbitraryTests(unittest.TestCase):
    """Whatever the file holds: it is read, or one SettingError says why not."""

    def check(self, content: bytes) -> None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            try:
                read_cluster_file(file.name)
            except SettingError as error:
                self.assertTrue(str(error).isprintable(), str(error))

    @settings(max_examples=150, deadline=None)
    @given(st.binary(max_size=200))
    def test_bytes(self, content: bytes) -> None:
        self.check(content)

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.one_of(FRAGMENTS, FRAGMENTS, st.text(max_size=5)), max_size=40))
    def test_pieces_of_yaml(self, pieces: list[str]) -> None:
        self.check("".join(pieces).encode("utf-8", "surrogatepass"))

    @settings(max_examples=300, deadline=None)
    @given(st.integers(0, len(FILE)), st.integers(0, 12), st.one_of(FRAGMENTS, st.text(max_size=8)))
    def test_a_good_file_with_one_place_overwritten(self, at: int, cut: int, piece: str) -> None:
        self.check((FILE[:at] + piece + FILE[at + cut :]).encode("utf-8", "surrogatepass"))

    @settings(max_examples=200, deadline=None)
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(st.sampled_from([*chain(*KNOWN_KEYS.values())]), inner, max_size=6)
            ),
            max_leaves=20,
        )
    )
    def test_json_of_any_shape(self, value: object) -> None:
        self.check(json.dumps(value).encode())
        self.check(json.dumps({"cluster": value}, indent="\t").encode())
