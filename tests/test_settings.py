"""From options, environment and cluster file to settings: who wins, and what contradicts."""

from __future__ import annotations

import socket
import tempfile
import unittest
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from flodl_tw.core.errors import SettingError
from flodl_tw.core.store.wire import StoreLimits
from flodl_tw.core.window import StartMode
from flodl_tw.core.world import RelaySettings, WorkerFields
from flodl_tw.settings import NAMES, ControllerSettings
from flodl_tw.state_folder import default_state_dir
from flodl_tw.tap import Options

TOKEN_HEX = "00112233445566778899aabbccddeeff"
WORKERS = """
  workers:
    - {host: gpu-a, ranks: [0, 1], local_devices: [0, 1], nccl_socket_ifname: eth0, path: /srv, arch: precompiled/cu128}
    - {host: gpu-b, ranks: [2], local_devices: all, nccl_socket_ifname: ib0, path: /opt, gpu_ram_share: 0.5}
  gpu_ram_share: 0.25
"""


class SettingsTestCase(unittest.TestCase):
    """With a cluster file in a folder of its own."""

    def setUp(self) -> None:
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.file = Path(made.name, "cluster.yml")

    def settings(
        self, *arguments: str, environ: dict[str, str] | None = None, join: str | None = None
    ) -> ControllerSettings:
        """What the arguments ask for; ``join`` is the join block of a cluster file with three ranks."""
        options = Options()
        if join is not None:
            self.file.write_text(
                f"cluster:\n  controller:\n    host: head\n    port: 1444\n    join: {{{join}}}{WORKERS}"
            )
            arguments = ("--cluster", str(self.file), *arguments)
        options.parseOptions(list(arguments))
        return ControllerSettings.from_options(options, {"XDG_STATE_HOME": "/nowhere", **(environ or {})})

    def refused(self, *arguments: str, **more: Any) -> str:
        """The one line that refuses the arguments."""
        with self.assertRaises(SettingError) as caught:
            self.settings(*arguments, **more)
        self.assertNotIn("\n", str(caught.exception))
        return str(caught.exception)


class JoinEndpointTests(SettingsTestCase):
    """Where workers dial, as log and page say it."""

    def test_it_is_the_cluster_file_s_host_or_what_is_listened_on(self) -> None:
        settings, name = self.settings(), socket.gethostname()
        for host, endpoint in (("::", f"{name}:7"), ("0.0.0.0", f"{name}:7"), ("fd00::1", "[fd00::1]:7")):
            with self.subTest(host):
                self.assertEqual(settings.join_endpoint(host, 7), endpoint)
                self.assertEqual(self.settings(join="").join_endpoint(host, 7), "head:7")


class OptionTests(SettingsTestCase):
    """Without a cluster file."""

    def test_the_defaults(self) -> None:
        given = self.settings()
        window = given.run.window
        self.assertEqual((given.port, given.interface, given.token, given.open_admission), (29500, "", None, False))
        self.assertEqual((window.min_rank_start, window.target_ranks, window.start_mode), (1, None, StartMode.AUTO))
        self.assertEqual((window.window_secs, window.cap_secs), (300, 600))
        self.assertEqual((given.native_rendezvous, dict(given.backends), given.run.one_salt), (True, {}, False))
        self.assertIsNone(given.run.launch.relay)

    def test_the_cap_follows_a_window_that_was_made_longer_than_it(self) -> None:
        self.assertEqual(self.settings("--join-timeout", "900").run.window.max_join_timeout, 900)

    def test_the_rendezvous_is_native_with_nccl_and_off_with_cpu_unless_it_is_said(self) -> None:
        for arguments, native, backends in (
            ((), True, {}),
            (("--backend", "cpu"), False, {}),
            (("--backend", "cpu", "--rendezvous", "native"), True, {}),
            (("--rendezvous", "off"), False, {}),
            (("--rendezvous", "tcp:h:1"), False, {"rendezvous": "tcp:h:1"}),
        ):
            with self.subTest(arguments):
                given = self.settings(*arguments)
                self.assertEqual((given.native_rendezvous, dict(given.backends)), (native, backends))

    def test_ranks_and_backends_share_one_salt_where_there_is_a_backend(self) -> None:
        for arguments, one_salt in (
            ((), False),
            (("--rendezvous", "off"), False),
            (("--data", "tcp:h:1"), True),
            (("--control", "unix:/run/c"), True),
            (("--rendezvous", "tcp:h:1"), True),
        ):
            with self.subTest(arguments):
                self.assertIs(self.settings(*arguments).run.one_salt, one_salt)

    def test_relays_get_a_spec_where_the_control_channel_has_a_backend(self) -> None:
        for arguments, relay in (
            (("--data", "tcp:h:1"), None),
            (("--control", "tcp:h:1"), RelaySettings(False, 1 << 30)),
            (("--control", "tcp:h:1", "--data", "tcp:h:2"), RelaySettings(True, 1 << 30)),
            (("--control", "tcp:h:1", "--frame-ceiling", "65536"), RelaySettings(False, 65536)),
        ):
            with self.subTest(arguments):
                self.assertEqual(self.settings(*arguments).run.launch.relay, relay)

    def test_what_names_no_backend_is_refused_with_its_option_and_the_reason(self) -> None:
        for name, words in (("data", ""), ("control", ""), ("rendezvous", "native, off, ")):
            for text in ("", "tcp:only-a-host", "nonsense:1", *(() if words else ("off", "native"))):
                with self.subTest(name=name, text=text), self.assertRaises(SettingError) as caught:
                    self.settings(f"--{name}", text)
                self.assertRegex(
                    str(caught.exception),
                    rf"\A--{name} {text!r}: it names no backend \(.*\); give {words}tcp:HOST:PORT or unix:PATH\Z",
                )

    def test_the_store_is_there_with_its_caps_unless_it_is_off(self) -> None:
        for arguments, store in (
            ((), StoreLimits(total_bytes=256 << 20, total_keys=1_000_000)),
            (("--store", "native"), StoreLimits()),
            (("--store-max-bytes", "1048576", "--store-max-keys", "1"), StoreLimits(total_bytes=1 << 20, total_keys=1)),
            (("--store", "off"), None),
            (("--store", "off", "--store-max-keys", "5"), None),
        ):
            with self.subTest(arguments):
                self.assertEqual(self.settings(*arguments).run.store, store)

    def test_bad_values_name_option_value_limit_and_way_out(self) -> None:
        for arguments, parts in (
            (("--frame-ceiling", "1", "--control", "tcp:h:1"), ("--frame-ceiling '1':", "4096", "give a whole number")),
            (("--allowed-host", "gpu-head:29680"), ("--allowed-host 'gpu-head:29680':", "without a port")),
            (("--allowed-host", "a b"), ("--allowed-host 'a b':", "no host name")),
            (("--store", "tcp:h:1"), ("--store 'tcp:h:1':", "native, off", "give one of them")),
            (("--store-max-bytes", "1048575"), ("--store-max-bytes '1048575':", "1048576", "1099511627776")),
            (("--store-max-bytes", "1099511627777"), ("--store-max-bytes '1099511627777':", "1099511627776")),
            (("--store-max-bytes", "1e9"), ("--store-max-bytes", "1e9")),
            (("--store-max-keys", "0"), ("--store-max-keys '0':", "limits are 1")),
            (("--store", "off", "--store-max-keys", "x"), ("--store-max-keys", "x")),
        ):
            with self.subTest(arguments):
                line = self.refused(*arguments)
                for part in parts:
                    self.assertIn(part, line)

    def test_a_token_as_an_argument_is_refused_and_not_shown(self) -> None:
        for arguments in (("--token", TOKEN_HEX), (f"--token={TOKEN_HEX}",), ("-p", "1", "--token", TOKEN_HEX)):
            with self.subTest(arguments=arguments[0]):
                self.assertEqual(
                    self.ended(*arguments),
                    "flodl-controller: --token (not shown): every user of this machine can see an argument; "
                    "use --token-file or FLODL_JOIN_TOKEN\n",
                )

    def ended(self, *words: str) -> str:
        """The line with which the command ends, with status 2."""
        with redirect_stderr(StringIO()) as said, self.assertRaises(SystemExit) as caught:
            Options().parseOptions(words)
        self.assertEqual(caught.exception.code, 2)
        return said.getvalue()

    def test_an_argument_is_named_and_what_may_be_a_token_is_not(self) -> None:
        for words, told in ((["29500"], "'29500'"), (["--port", "1", TOKEN_HEX, "x"], "'(not shown)'")):
            line = f"flodl-controller: {told} stands alone: options begin with --; --help lists the options\n"
            self.assertEqual(self.ended(*words), line)

    def test_a_variable_that_is_empty_is_an_unset_one(self) -> None:
        for name in ("FLODL_JOIN_TOKEN", "FLODL_NET_TIMEOUT_SCALE", "STATE_DIRECTORY"):
            with self.subTest(name):
                self.assertEqual(self.settings(environ={name: ""}), self.settings())
        home = Path.home() / ".local" / "state" / "flodl-tw"
        self.assertEqual(default_state_dir({"XDG_STATE_HOME": ""}), home)

    def test_no_variable_gives_an_option(self) -> None:
        self.assertEqual(self.settings(environ={"FLODL_TW_PORT": "1", "FLODL_TW_TOKEN_FILE": "x"}), self.settings())


class ClusterTests(SettingsTestCase):
    """With one."""

    def test_the_file_speaks_where_the_command_does_not(self) -> None:
        given = self.settings(join="min_rank_start: 2, join_timeout: 30, max_join_timeout: 90, start: hybrid")
        window = given.run.window
        self.assertEqual(given.port, 1444)
        self.assertEqual((window.min_rank_start, window.target_ranks, window.start_mode), (2, 3, StartMode.HYBRID))
        self.assertEqual((window.join_timeout, window.max_join_timeout), (30, 90))

    def test_options_win_over_the_file(self) -> None:
        given = self.settings(
            *("--port", "29500", "--min-rank-start", "1", "--target-ranks", "2", "--join-timeout", "7"),
            *("--max-join-timeout", "8", "--start", "auto", "--interface", "127.0.0.2"),
            join="min_rank_start: 2, join_timeout: 30, max_join_timeout: 90, start: hybrid",
        )
        window = given.run.window
        self.assertEqual((given.port, given.interface), (29500, "127.0.0.2"))
        self.assertEqual((window.min_rank_start, window.target_ranks, window.start_mode), (1, 2, StartMode.AUTO))
        self.assertEqual((window.join_timeout, window.max_join_timeout), (7, 8))

    def test_a_manual_start_by_option_drops_the_file_s_target(self) -> None:
        self.assertIsNone(self.settings("--start", "manual", join="").run.window.target_ranks)
        self.assertIn("--target-ranks 3", self.refused("--start", "manual", "--target-ranks", "3", join=""))

    def test_the_default_target_follows_the_start_mode_that_counts(self) -> None:
        for arguments, join, target in (
            ((), "start: manual", None),
            (("--start", "auto"), "start: manual", 3),
            (("--start", "hybrid"), "start: manual", 3),
            (("--start", "auto"), "start: manual, discovery: true, min_rank_start: 1", None),
            (("--start", "manual"), "start: hybrid, target_ranks: 3", None),
        ):
            with self.subTest(arguments=arguments, join=join):
                self.assertEqual(self.settings(*arguments, join=join).run.window.target_ranks, target)

    def test_the_roster_s_fields_go_into_the_envelopes(self) -> None:
        launch = self.settings("--nccl-socket-ifname", "en0", join="").run.launch
        self.assertEqual(
            dict(launch.roster),
            {
                "gpu-a": WorkerFields("eth0", "/srv", "precompiled/cu128", None, 0.25),
                "gpu-b": WorkerFields("ib0", "/opt", None, None, 0.5),
            },
        )
        self.assertEqual(launch.walk_in, WorkerFields("en0", gpu_ram_share=0.25))

    def test_the_token_s_sources_in_their_order(self) -> None:
        file = self.file.with_name("token")
        file.write_text("ff" * 16)
        file.chmod(0o600)
        join = f"token: {TOKEN_HEX}"
        variable = {"FLODL_JOIN_TOKEN": "ee" * 16}
        for arguments, environ, token, source in (
            ((), {}, bytes.fromhex(TOKEN_HEX), str(self.file)),
            ((), {"FLODL_JOIN_TOKEN": ""}, bytes.fromhex(TOKEN_HEX), str(self.file)),
            ((), variable, b"\xee" * 16, "FLODL_JOIN_TOKEN"),
            (("--token-file", str(file)), variable, b"\xff" * 16, str(file)),
        ):
            with self.subTest(source, environ=environ):
                given = self.settings(*arguments, join=join, environ=environ)
                self.assertEqual((given.token, given.token_source), (token, source))
        self.assertIsNone(self.settings(join="").token_source)

    def test_a_token_contradicts_open_admission_wherever_each_was_said(self) -> None:
        for arguments, join, environ in (
            (("--open-admission",), f"token: {TOKEN_HEX}", {}),
            ((), "open_admission: true", {"FLODL_JOIN_TOKEN": TOKEN_HEX}),
            (("--open-admission",), None, {"FLODL_JOIN_TOKEN": TOKEN_HEX}),
        ):
            with self.subTest(arguments=arguments, join=join):
                line = self.refused(*arguments, join=join, environ=environ)
                self.assertIn("--open-admission", line)
                self.assertIn("drop one of the two", line)
                self.assertNotIn(TOKEN_HEX, line)

    def test_open_admission_may_be_said_in_the_file(self) -> None:
        self.assertTrue(self.settings(join="open_admission: true").open_admission)

    def test_a_token_that_others_can_read_is_warned_about(self) -> None:
        for mode, count in ((0o644, 1), (0o600, 0)):
            with self.subTest(mode=mode):
                self.file.touch()
                self.file.chmod(mode)
                given = self.settings(join=f"token: {TOKEN_HEX}")
                self.assertEqual(len(given.warnings), count)
                self.assertNotIn(TOKEN_HEX, repr(given))

    def test_tunnelled_workers_bind_loopback(self) -> None:
        join = "discovery: true, tunnel_only: true, min_rank_start: 1"
        self.assertEqual(self.settings(join=join).interface, "127.0.0.1")
        self.assertEqual(self.settings("--interface", "::1", join=join).interface, "::1")


class EmbeddedSettingsTests(unittest.TestCase):
    """Settings as an application makes them, without a command line."""

    def test_an_option_that_is_not_named_has_the_commands_default(self) -> None:
        command = Options()
        command.parseOptions([])
        self.assertEqual(ControllerSettings.from_options({}), ControllerSettings.from_options(command))
        self.assertEqual(set(command), set(NAMES))

    def test_numbers_and_flags_do_as_texts(self) -> None:
        made = ControllerSettings.from_options({"min-rank-start": 2, "target-ranks": "4", "open-admission": True})
        self.assertEqual((made.run.window.min_rank_start, made.run.window.target_ranks), (2, 4))
        self.assertTrue(made.open_admission)

    def test_what_cannot_be_used_is_refused_as_the_command_refuses_it(self) -> None:
        with self.assertRaisesRegex(SettingError, "--target-ranks 1: the least is --min-rank-start, 2"):
            ControllerSettings.from_options({"min-rank-start": 2, "target-ranks": 1})

    def test_a_name_that_is_no_option_is_refused(self) -> None:
        with self.assertRaisesRegex(SettingError, "--min_rank_start: there is no such option; "):
            ControllerSettings.from_options({"min_rank_start": 2})
