"""ControllerSettings that a real ``twistd`` refuses, busy ports, and who may join by where it is bound."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import unittest
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flodl_tw.core.messages import Accept
from tests.loopback.process import (
    LOOPBACK,
    TWISTD,
    Client,
    Forker,
    ProcessTestCase,
    Twistd,
    body_of,
    ends,
    environment,
    free_port,
    shared,
)

TOKEN = "00112233445566778899aabbccddeeff"
OTHER_TOKEN = "ffeeddccbbaa99887766554433221100"
LONG_LABEL = "a" * 70

# What is given, and what the one line must have in it: the option, the value, the limit and the way out.
# FOLDER stands for the folder that the controller runs in.
BAD_OPTIONS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("--port", "http"), ("--port", "'http'", "whole number", "0 and 65535")),
    (("--port", "65536"), ("--port '65536'", "0 and 65535")),
    (("--port", "-1"), ("--port '-1'", "0 and 65535")),
    (("--port", "0"), ("--port 0", "--port-file")),
    (("-p", "nine"), ("--port", "'nine'", "0 and 65535")),
    (("--min-rank-start", "0"), ("--min-rank-start '0'", "1")),
    (("--min-rank-start", "1.5"), ("--min-rank-start", "'1.5'", "whole number")),
    (("--min-rank-start", "4", "--target-ranks", "3"), ("--target-ranks 3", "--min-rank-start, 4", "lower")),
    (("--start", "manual", "--target-ranks", "3"), ("--target-ranks 3", "--start manual", "--start hybrid")),
    (("--join-timeout", "-5"), ("--join-timeout '-5'", "1 and", "give")),
    (("--join-timeout", "5m"), ("--join-timeout", "'5m'", "whole number")),
    (("--join-timeout", "60", "--max-join-timeout", "59"), ("--max-join-timeout 59", "--join-timeout, 60 s", "raise")),
    (("--start", "now"), ("--start", "'now'", "auto, manual, hybrid")),
    (("--backend", "gloo"), ("--backend", "'gloo'", "nccl, cpu")),
    (("--on-loss", "retry"), ("--on-loss", "'retry'", "abort, continue")),
    (("--after-run", "loop"), ("--after-run", "'loop'", "exit, hold, rearm")),
    (("--max-rejects", "-1"), ("--max-rejects '-1'", "0", "give")),
    (("--max-pending", "0"), ("--max-pending '0'", "1", "give")),
    (("--max-pending-per-host", "many"), ("--max-pending-per-host", "'many'", "whole number")),
    (("--dataset-sig", "abc"), ("--dataset-sig", "'abc'", "64 hex digits", "copy")),
    (("--model-sig", "g" * 64), ("--model-sig", "ggg", "64 hex digits", "copy")),
    (("--interface", "no.such.host.invalid"), ("--interface no.such.host.invalid", "resolve", "addresses")),
    (("--interface", LONG_LABEL), (f"--interface {LONG_LABEL}", "resolve", "addresses")),
    (("--interface", "203.0.113.9"), ("--interface 203.0.113.9", "bound", "addresses")),
    (("--token-file", "no-such-file"), ("--token-file no-such-file", "No such file", "check")),
    (("--token-file", "."), ("--token-file .", "directory", "check")),
    (("--token-file", "short"), ("--token-file short", "32 hex digits", "5 characters", "flodl-tw token")),
    (("--token-file", "not-hex"), ("--token-file not-hex", "32 hex digits", "flodl-tw token")),
    (("--token-file", "empty"), ("--token-file empty", "32 hex digits", "flodl-tw token")),
    (("--token-file", "open-mode"), ("--token-file open-mode", "0644", "chmod 600 open-mode")),
    (("--token-file", "group-mode"), ("--token-file group-mode", "0640", "chmod 600 group-mode")),
    (("--token-file", "good", "--open-admission"), ("--open-admission", "--token-file", "drop")),
    (("--state-dir", "short"), ("--state-dir", "/short/", "folder")),
    (("--state-dir", "/proc/nowhere"), ("--state-dir /proc/nowhere", "folder")),
    (("--port-file", "no-such-folder/port"), ("--port-file", "no-such-folder/port", "No such file")),
)

BAD_ENVIRONMENTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (" ", ("FLODL_JOIN_TOKEN", "32 hex digits", "0 characters", "flodl-tw token")),
    ("s3cret-that-nobody-sees", ("FLODL_JOIN_TOKEN", "(not shown)", "32 hex digits", "flodl-tw token")),
    ("s3cret" + "z" * 26, ("FLODL_JOIN_TOKEN", "(not shown)", "32 hex digits", "flodl-tw token")),
)


def write(path: Path, text: str, mode: int = 0o600) -> None:
    """A file with this mode, whatever the umask."""
    path.write_text(text)
    path.chmod(mode)


@dataclass(frozen=True)
class Ended:
    """How a ``twistd`` ended, and the files that a daemonised one left."""

    status: int
    stdout: str
    stderr: str
    left: list[str]


class RefusalTestCase(unittest.TestCase):
    """Runs ``twistd`` for settings that it must refuse."""

    def setUp(self) -> None:
        self.forker = shared(self, Forker)
        made = tempfile.TemporaryDirectory(prefix="flodl-tw-")
        self.addCleanup(made.cleanup)
        self.folder = Path(made.name)
        write(self.folder / "good", TOKEN)
        write(self.folder / "short", TOKEN[:5])
        write(self.folder / "not-hex", "g" + TOKEN[1:])
        write(self.folder / "empty", "")
        write(self.folder / "open-mode", TOKEN, 0o644)
        write(self.folder / "group-mode", TOKEN, 0o640)

    def refuse(self, *options: str, environ: Mapping[str, str] | None = None, daemonised: bool = False) -> Ended:
        """Run ``twistd`` to its end, in a folder of its own where it is to be daemonised."""
        folder = Path(tempfile.mkdtemp(dir=self.folder)) if daemonised else self.folder
        words = (*(() if daemonised else ("-n", "--pidfile=")), "flodl-controller", *options)
        ended = self.forker.run(words, folder, environment({"HOME": str(self.folder), **(environ or {})}))
        left = sorted(path.name for path in folder.iterdir()) if daemonised else []
        if "twistd.pid" in left:
            os.kill(int((folder / "twistd.pid").read_text()), signal.SIGKILL)
        return Ended(*ended, left)

    def assert_one_line(self, ended: Ended, parts: tuple[str, ...]) -> None:
        """Assert that it ended with 2 and one line that has all ``parts``."""
        self.assertEqual((ended.status, ended.stderr.count("\n")), (2, 1), ended.stderr[-1000:] + ended.stdout[-1000:])
        self.assertEqual(ended.stdout, "")
        self.assertTrue(ended.stderr.startswith("flodl-controller: "), ended.stderr)
        for part in parts:
            self.assertIn(part, ended.stderr)


class BadSettings(RefusalTestCase):
    """One line that names the option, the value, the limit and the way out; status 2."""

    def test_each_bad_option_is_refused_with_one_line(self) -> None:
        for options, parts in BAD_OPTIONS:
            with self.subTest(options=options):
                self.assert_one_line(self.refuse(*self.with_defaults(options)), parts)

    def test_a_refusal_looks_the_same_from_a_fresh_interpreter(self) -> None:
        fresh = subprocess.run(
            [*TWISTD, "-n", "flodl-controller", "--port", "65536"], cwd=self.folder, capture_output=True, text=True
        )
        ended = self.refuse("--port", "65536")
        self.assert_one_line(ended, ("--port '65536'",))
        self.assertEqual((fresh.returncode, fresh.stdout, fresh.stderr), (2, "", ended.stderr))

    def with_defaults(self, options: tuple[str, ...]) -> tuple[str, ...]:
        """The options, with a free port and the loopback unless they are about those."""
        given = set(options)
        defaults: tuple[str, ...] = ()
        if not given & {"--port", "-p"}:
            # The system's choice cannot meet a busy port; a row about the port file has its own.
            defaults += ("--port", "0")
            defaults += () if "--port-file" in given else ("--port-file", "port")
        if "--interface" not in given:
            # A state folder is looked at where a token has to be kept.
            defaults += ("--interface", "0.0.0.0" if "--state-dir" in given else LOOPBACK)
        if "--state-dir" not in given:
            defaults += ("--state-dir", "state")
        return (*defaults, *options)

    def test_a_bad_token_in_the_environment_is_refused_and_not_shown(self) -> None:
        for token, parts in BAD_ENVIRONMENTS:
            with self.subTest(token=token):
                ended = self.refuse(*self.with_defaults(()), environ={"FLODL_JOIN_TOKEN": token})
                self.assert_one_line(ended, parts)
                self.assertNotIn("s3cret", ended.stderr)

    def test_a_bad_token_file_is_not_shown(self) -> None:
        for name in ("short", "not-hex", "open-mode"):
            with self.subTest(file=name):
                ended = self.refuse(*self.with_defaults(("--token-file", name)))
                self.assertEqual(ended.status, 2)
                self.assertNotIn(TOKEN[1:5], ended.stderr)

    def test_a_token_in_the_environment_contradicts_open_admission(self) -> None:
        ended = self.refuse(*self.with_defaults(("--open-admission",)), environ={"FLODL_JOIN_TOKEN": TOKEN})
        self.assert_one_line(ended, ("--open-admission", "FLODL_JOIN_TOKEN", "drop"))

    def test_a_name_of_several_addresses_is_refused_with_their_list(self) -> None:
        addresses = sorted({info[4][0] for info in socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM)})
        if len(addresses) < 2:
            self.skipTest("localhost has one address here")
        ended = self.refuse("--port", "0", "--port-file", "port", "--interface", "localhost")
        self.assert_one_line(ended, ("--interface localhost", *map(str, addresses), "name one of them"))

    def test_an_unknown_option_ends_with_status_2(self) -> None:
        self.assertEqual(self.refuse("--no-such-option").status, 2)

    def test_a_bad_left_over_token_is_refused_with_its_path(self) -> None:
        port = free_port()
        for text, mode, part in ((TOKEN, 0o644, "0644"), ("rubbish", 0o600, "32 hex digits")):
            with self.subTest(part=part):
                folder = self.folder / "state" / str(port)
                folder.mkdir(parents=True, exist_ok=True)
                write(folder / "token", text, mode)
                ended = self.refuse("--port", str(port), "--state-dir", "state")
                self.assert_one_line(ended, (str(folder / "token"), part))


class BusyPort(RefusalTestCase):
    """A port that is held is refused before the fork, whoever holds which of its addresses."""

    def occupy(self, family: socket.AddressFamily, address: str) -> int:
        """Listen on ``address`` in this process; gives the port."""
        holder = socket.socket(family, socket.SOCK_STREAM)
        self.addCleanup(holder.close)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        holder.bind((address, 0))
        holder.listen()
        return int(holder.getsockname()[1])

    def test_in_use_the_port_and_how_to_find_its_holder_are_named(self) -> None:
        for family, address in (
            (socket.AF_INET, "0.0.0.0"),
            (socket.AF_INET6, "::"),
            (socket.AF_INET, LOOPBACK),
            (socket.AF_INET6, "::1"),
        ):
            for daemonised in (False, True):
                with self.subTest(address=address, daemonised=daemonised):
                    port = self.occupy(family, address)
                    ended = self.refuse("--port", str(port), "--state-dir", "state", daemonised=daemonised)
                    self.assert_one_line(ended, (f"--port {port}", "in use", f"ss -ltnp 'sport = :{port}'", "choose"))
                    self.assertEqual(ended.left, [])

    def test_an_interface_of_its_own_is_not_busy_because_another_is(self) -> None:
        port = self.occupy(socket.AF_INET, "127.0.0.2")
        controller = Twistd(port=port)
        self.addCleanup(controller.close)
        controller.listening()

    def test_a_second_controller_is_refused_and_the_first_goes_on(self) -> None:
        first = Twistd("--min-rank-start", "8")
        self.addCleanup(first.close)
        port = first.listening().port
        for daemonised in (False, True):
            with self.subTest(daemonised=daemonised):
                ended = self.refuse("--port", str(port), "--interface", LOOPBACK, daemonised=daemonised)
                self.assert_one_line(ended, (f"--port {port}", "in use"))
        self.assertEqual(first.state()["phase"], "waiting")

    def test_a_state_folder_in_use_is_refused(self) -> None:
        port = free_port()
        folder = self.folder / "state" / f"{socket.gethostname()}-{port}"
        folder.mkdir(parents=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for daemonised in (False, True):
                with self.subTest(daemonised=daemonised):
                    ended = self.refuse(
                        *("--port", str(port), "--state-dir", str(self.folder / "state")), daemonised=daemonised
                    )
                    self.assert_one_line(ended, ("--state-dir", str(folder), "lock", "each its own --state-dir"))

    def test_daemonised_the_lock_is_held_as_long_as_the_server_lives(self) -> None:
        controller = Twistd("--min-rank-start", "8", daemonised=True, interface=None)
        self.addCleanup(controller.close)
        self.assertEqual(controller.listening().ended(), 0)
        with (controller.folder / "state" / f"{socket.gethostname()}-{controller.port}" / "lock").open("w") as lock:
            with self.assertRaises(OSError) as held:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.assertEqual(held.exception.errno, errno.EWOULDBLOCK)
            controller.stop()
            controller.gone()
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Restart(ProcessTestCase):
    """What a start finds that an earlier one left."""

    def test_a_killed_controller_starts_again_on_its_port_while_its_clients_are_connected(self) -> None:
        made = tempfile.TemporaryDirectory(prefix="flodl-tw-")
        self.addCleanup(made.cleanup)
        port = free_port()
        first = self.start("--min-rank-start", "8", port=port, folder=Path(made.name))
        host = self.joined(first, "gpu-a")
        silent = self.connect(first)
        self.assertEqual(first.stop(signal.SIGKILL), -signal.SIGKILL)
        self.assertTrue(first.pidfile.exists())
        self.assertTrue(ends(silent))
        with self.assertRaises(EOFError):
            host.next()
        second = self.start("--min-rank-start", "8", port=port, folder=Path(made.name))
        self.assertIsInstance(self.dial(second).join("gpu-a"), Accept)
        self.assertEqual(second.pidfile.read_text(), str(second.pid))


class Admission(ProcessTestCase):
    """Open or by token: judged by where the socket is really bound."""

    def test_a_loopback_bind_is_open(self) -> None:
        interfaces = (LOOPBACK, "127.0.0.2", "::1", "::ffff:127.0.0.1")
        for interface, controller in [
            (interface, self.launch("--min-rank-start", "8", interface=interface)) for interface in interfaces
        ]:
            with self.subTest(interface=interface):
                controller.listening()
                host = self.dial(controller, interface)
                answer = host.join("gpu-a")
                assert isinstance(answer, Accept)
                self.assertRegex(str(answer.salt_hex), r"\A[0-9a-f]{32}\Z")
                controller.said("admission open")
                self.assertFalse(list(controller.folder.glob("state/*/token")))

    def test_a_bind_on_one_loopback_address_is_not_on_another(self) -> None:
        controller = self.start("--min-rank-start", "8", interface="127.0.0.2")
        with self.assertRaises(ConnectionRefusedError):
            socket.create_connection((LOOPBACK, controller.port), 2)

    def test_a_left_over_token_makes_no_loopback_bind_credentialed(self) -> None:
        port = free_port()
        made = tempfile.TemporaryDirectory(prefix="flodl-tw-")
        self.addCleanup(made.cleanup)
        folder = Path(made.name) / "state" / str(port)
        folder.mkdir(parents=True)
        write(folder / "token", TOKEN + "\n")
        controller = self.start("--min-rank-start", "8", port=port, folder=Path(made.name))
        self.assertIsInstance(self.dial(controller).join("gpu-a"), Accept)

    def test_the_default_bind_answers_both_families_and_makes_a_token_that_it_keeps(self) -> None:
        port = free_port()
        made = tempfile.TemporaryDirectory(prefix="flodl-tw-")
        self.addCleanup(made.cleanup)
        tokens = []
        for _ in range(2):
            controller = self.start("--min-rank-start", "8", port=port, interface=None, folder=Path(made.name))
            file = Path(made.name) / "state" / f"{socket.gethostname()}-{port}" / "token"
            self.assertEqual(stat.S_IMODE(file.stat().st_mode), 0o600)
            self.assertEqual(stat.S_IMODE(file.parent.stat().st_mode), 0o700)
            text = file.read_text().strip()
            self.assertRegex(text, r"\A[0-9a-f]{32}\Z")
            tokens.append(text)
            for number, address in enumerate((LOOPBACK, "::1")):
                answer = self.dial(controller, address, token=bytes.fromhex(text)).join(f"gpu-{number}")
                self.assertEqual(answer, Accept((number,), None, answer.formation_wait_secs))  # type: ignore[union-attr]
            stranger = Client(port)
            self.addCleanup(stranger.close)
            with self.assertRaises(EOFError):
                stranger.join("gpu-z")
            self.assertIn(f"127.0.0.1:{stranger.socket.getsockname()[1]}", controller.said("it has no token"))
            log = controller.log
            self.assertIn(str(file), log)
            self.assertIn("--token", log)
            self.assertNotIn(text, log)
            self.assertNotIn(text, controller.stderr)
            page = controller.http(b"GET / HTTP/1.0\r\nAccept: text/html\r\n\r\n")
            self.assertIn(b"<h1>", body_of(page))
            self.assertNotIn(text.encode(), page)
            self.assertEqual(controller.stop(), -signal.SIGTERM)
        self.assertEqual(tokens[0], tokens[1])

    def test_an_ipv4_bind_of_all_addresses_is_credentialed_too(self) -> None:
        controller = self.start("--min-rank-start", "8", interface="0.0.0.0")
        with self.assertRaises(EOFError):
            self.dial(controller).join("gpu-a")
        with self.assertRaises(ConnectionRefusedError):
            socket.create_connection(("::1", controller.port), 2)

    def test_open_admission_elsewhere_is_a_warning_and_no_token(self) -> None:
        controller = self.start("--min-rank-start", "8", "--open-admission", interface=None)
        self.assertIsInstance(self.dial(controller).join("gpu-a"), Accept)
        controller.said("#warn] --open-admission: whoever reaches")
        self.assertFalse(list(controller.folder.glob("state/*/token")))

    def test_a_configured_token_is_needed_on_loopback_too(self) -> None:
        made = tempfile.TemporaryDirectory(prefix="flodl-tw-")
        self.addCleanup(made.cleanup)
        write(Path(made.name) / "token", TOKEN + "\n")
        rows: tuple[tuple[tuple[str, ...], dict[str, str], str], ...] = (
            (("--token-file", str(Path(made.name) / "token")), {}, f"needs the token in {made.name}/token;"),
            ((), {"FLODL_JOIN_TOKEN": TOKEN.upper()}, "FLODL_JOIN_TOKEN"),
            # The file goes before the variable.
            (
                ("--token-file", str(Path(made.name) / "token")),
                {"FLODL_JOIN_TOKEN": OTHER_TOKEN},
                f"needs the token in {made.name}/token;",
            ),
        )
        for controller, environ, source in [
            (self.launch("--min-rank-start", "8", *options, environ=environ), environ, source)
            for options, environ, source in rows
        ]:
            with self.subTest(source=source, environ=environ):
                controller.listening()
                answer = self.dial(controller, token=bytes.fromhex(TOKEN)).join("gpu-a")
                self.assertEqual(type(answer), Accept)
                with self.assertRaises(EOFError):
                    self.dial(controller).join("gpu-b")
                with self.assertRaises(EOFError):
                    self.dial(controller, token=b"w" * 16).join("gpu-c")
                controller.said("under no key")
                log = controller.log
                self.assertIn(source, log)
                self.assertEqual(len(re.findall("it has no token", log)), 1)
                self.assertEqual(len(re.findall("under no key", log)), 1)
                for text in (TOKEN, TOKEN.upper(), OTHER_TOKEN):
                    self.assertNotIn(text, log + controller.stderr)
                command = Path(f"/proc/{controller.pid}/cmdline").read_bytes()
                self.assertNotIn(TOKEN.encode(), command.lower())

    def test_the_state_folder_follows_its_variables(self) -> None:
        made = tempfile.TemporaryDirectory(prefix="flodl-tw-")
        self.addCleanup(made.cleanup)
        base = Path(made.name)
        rows = (
            ({"STATE_DIRECTORY": str(base / "a"), "XDG_STATE_HOME": str(base / "b")}, base / "a"),
            ({"XDG_STATE_HOME": str(base / "b")}, base / "b" / "flodl-tw"),
            ({"HOME": str(base / "c")}, base / "c" / ".local" / "state" / "flodl-tw"),
        )
        for folder, controller in [
            (folder, self.launch("--min-rank-start", "8", state_dir=None, interface=None, environ=environ))
            for environ, folder in rows
        ]:
            with self.subTest(folder=folder):
                port = controller.listening().port
                self.assertTrue((folder / f"{socket.gethostname()}-{port}" / "token").exists())

    def test_without_a_token_to_keep_no_folder_is_made_or_needed(self) -> None:
        controller = self.start("--min-rank-start", "8", state_dir="/proc/nowhere")
        self.assertEqual(controller.state()["phase"], "waiting")
        controller = self.start("--min-rank-start", "8")
        self.assertFalse((controller.folder / "state").exists())

    def test_a_user_without_an_entry_or_a_home_is_served_where_no_token_must_be_kept(self) -> None:
        if os.geteuid() or shutil.which("setpriv") is None:
            self.skipTest("only root can be another user, and by setpriv")
        made = tempfile.TemporaryDirectory(prefix="flodl-tw-")
        self.addCleanup(made.cleanup)
        Path(made.name).chmod(0o777)
        command = ("setpriv", "--reuid", "54321", "--clear-groups", *TWISTD)
        for home in ("", "/"):
            with self.subTest(home=home):
                options = {"state_dir": None, "folder": Path(made.name), "environ": {"HOME": home}}
                controller = Twistd("--min-rank-start", "8", command=command, **options)  # type: ignore[arg-type]
                self.addCleanup(controller.close)
                self.assertEqual(controller.listening().state()["phase"], "waiting")
                self.assertEqual(controller.stop(), -signal.SIGTERM)
                needy = Twistd("--min-rank-start", "8", interface=None, command=command, **options)  # type: ignore[arg-type]
                self.addCleanup(needy.close)
                self.assertEqual(needy.ended(), 2)
                self.assertRegex(needy.stderr, r"\Aflodl-controller: --state-dir.*--token-file\n\Z")

    def test_a_bad_time_scale_is_a_warning_and_1(self) -> None:
        controller = self.start("--join-timeout", "100", "--min-rank-start", "8", scale=0.01)
        controller.said("#warn] FLODL_NET_TIMEOUT_SCALE '0.01'")
        controller.said("open for 100 s")
