"""What an agent is told: options over environment over defaults, and one line for what cannot be used."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import unittest
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flodl_tw.agent.devices import Device
from flodl_tw.agent.gpu_view import GpuView
from flodl_tw.agent.settings import AgentSettings, find_program, knows_flodl, read_agent_settings
from flodl_tw.core.errors import SettingError
from flodl_tw.core.messages import Hello
from flodl_tw.options import OptionReader, environment_name

TOKEN = "00112233445566778899aabbccddeeff"
OTHER = "ffeeddccbbaa99887766554433221100"
SIG = bytes(range(32))
OPTION_TEXTS: tuple[tuple[str, str, str, Any, str, Any], ...] = (
    # the option, the field, a text and its value, another text and its value
    ("host", "host", "gpu-a", "gpu-a", "gpu-b", "gpu-b"),
    ("libtorch", "libtorch", "sm90", "sm90", "cpu", "cpu"),
    ("nccl-version", "nccl_version", "2.23.4", (2, 23, 4), "2.27", (2, 27, 0)),
    ("dataset-sig", "dataset_sig", SIG.hex(), SIG, "FF" * 32, b"\xff" * 32),
    ("run-id", "run_id", "night 7", "night 7", "night 8", "night 8"),
    ("model-sig", "model_sig", SIG.hex(), SIG, "00" * 32, bytes(32)),
    ("data-path", "data_path", "/data", "/data", "/other data", "/other data"),
    ("gpu-ram-share", "gpu_ram_share", "0.5", 0.5, "1e-7", 1e-7),
    ("stop-grace", "stop_grace", "0", 0.0, "12.5", 12.5),
    ("persist", "persist", "1", True, "yes", True),
    ("master-addr", "own_store", "rank0", True, "controller", False),
)
WRONG: tuple[tuple[str, str, str], ...] = (
    ("host", "gpu-\udcff", "'gpu-\\udcff': it is not UTF-8; give a text that is"),
    ("libtorch", "\udcff", "'\\udcff': it is not UTF-8; give a text that is"),
    ("run-id", "\ud800", "'\\ud800': it is not UTF-8; give a text that is"),
    (
        "nccl-version",
        "2",
        "'2': a version is MAJOR.MINOR or MAJOR.MINOR.PATCH; give one such as 2.23.4",
    ),
    ("nccl-version", "2.x", "'2.x': a version is MAJOR.MINOR or MAJOR.MINOR.PATCH; give one such as 2.23.4"),
    (
        "nccl-version",
        "2.1.0.0",
        "'2.1.0.0': a version is MAJOR.MINOR or MAJOR.MINOR.PATCH; give one such as 2.23.4",
    ),
    ("dataset-sig", "ab", "'ab': a signature is 64 hex digits; copy it whole"),
    ("model-sig", "zz" * 32, f"'{'zz' * 32}': a signature is 64 hex digits; copy it whole"),
    ("model-sig", "a" * 500, f"'{'a' * 100}…': a signature is 64 hex digits; copy it whole"),
    ("gpu-ram-share", "0", "'0': it must be above 0; give a fraction such as 0.5"),
    ("gpu-ram-share", "nan", "'nan': the limits are 0 and 1024; give a number between them"),
    ("gpu-ram-share", "-0.5", "'-0.5': the limits are 0 and 1024; give a number between them"),
    ("gpu-ram-share", "1e999", "'1e999': the limits are 0 and 1024; give a number between them"),
    ("gpu-ram-share", "½", "'½': the limits are 0 and 1024; give a number between them"),
    ("stop-grace", "inf", "'inf': the limits are 0 and 86400; give a number between them"),
    ("stop-grace", "86401", "'86401': the limits are 0 and 86400; give a number between them"),
    ("stop-grace", "30s", "'30s': the limits are 0 and 86400; give a number between them"),
)


class SettingsTestCase(unittest.TestCase):
    """A folder, and settings that are good but for what a test gives."""

    def setUp(self) -> None:
        made = tempfile.TemporaryDirectory(prefix="flodl-tw-")
        self.addCleanup(made.cleanup)
        self.folder = Path(made.name)

    def told(
        self, options: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None, **more: Any
    ) -> tuple[AgentSettings, list[str]]:
        """Settings and warnings."""
        given = {"controller": "10.0.0.100", **(options or {})}
        return read_agent_settings(OptionReader(given, environ or {}), more.pop("program", [sys.executable]), **more)

    def settings(
        self, options: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None, **more: Any
    ) -> AgentSettings:
        """Settings alone."""
        return self.told(options, environ, **more)[0]

    def refused(
        self, options: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None, **more: Any
    ) -> str:
        """The line for settings that cannot be used."""
        with self.assertRaises(SettingError) as caught:
            self.told(options, environ, **more)
        line = str(caught.exception)
        self.assertNotIn("\n", line)
        return line

    def file(self, text: str, mode: int = 0o600) -> str:
        """A file with a token."""
        path = self.folder / "token"
        path.write_text(text)
        path.chmod(mode)
        return str(path)


class TestGpuView(SettingsTestCase):
    """Which GPUs the ranks see."""

    def program(self, content: bytes) -> list[str]:
        path = self.folder / "train"
        path.write_bytes(content)
        path.chmod(0o700)
        return [str(path)]

    def test_ranks_see_all_gpus_of_their_host_as_under_torchrun(self) -> None:
        self.assertIs(self.settings().gpu_view, GpuView.ALL)

    def test_a_native_program_of_flodls_gets_one_gpu_a_rank_and_a_line_says_so(self) -> None:
        padding = bytes(1 << 20)
        program = self.program(b"\x7fELF" + padding + b"FLODL_INTERNAL_CLUSTER_JSONFLODL_INTERNAL_LOCAL_RANK" + padding)
        settings, (line,) = self.told(program=program)
        self.assertIs(settings.gpu_view, GpuView.OWN)
        self.assertIn("is a program of flodl's, so each rank sees its own GPU alone", line)

    def test_other_programs_are_no_programs_of_flodls(self) -> None:
        for content in (b"\x7fELF" + bytes(99), b"#!/bin/sh\n: $FLODL_INTERNAL_LOCAL_RANK\n", b"\x7fELF", b""):
            with self.subTest(content=content[:20]):
                settings, lines = self.told(program=self.program(content))
                self.assertEqual((settings.gpu_view, lines), (GpuView.ALL, []))
        self.assertFalse(knows_flodl(str(self.folder / "missing")))

    def test_under_flodls_launcher_a_rank_sees_its_own_and_a_virtual_local_rank_wins(self) -> None:
        self.assertIs(self.settings(flodl=True).gpu_view, GpuView.OWN)
        for options, environ in (({"virtual-local-rank": True}, {}), ({}, {"FLODL_TW_VIRTUAL_LOCAL_RANK": "1"})):
            for flodl in (True, False):
                self.assertIs(self.settings(options, environ, flodl=flodl).gpu_view, GpuView.VIRTUAL)


class TestSources(SettingsTestCase):
    """Where a setting comes from."""

    def test_an_option_wins_over_its_variable_and_both_over_the_default(self) -> None:
        for option, field, text, value, other, other_value in OPTION_TEXTS:
            with self.subTest(option):
                variable = environment_name(option)
                given = True if option == "persist" else text
                self.assertEqual(getattr(self.settings({option: given}), field), value)
                self.assertEqual(getattr(self.settings({}, {variable: other}), field), other_value)
                self.assertEqual(getattr(self.settings({option: given}, {variable: other}), field), value)
                self.assertEqual(getattr(self.settings({option: None}, {variable: other}), field), other_value)

    def test_the_defaults(self) -> None:
        settings = self.settings({}, {"FLODL_HOST_NAME": "gpu-a"})
        self.assertEqual(
            settings,
            AgentSettings(("10.0.0.100", 29500), "gpu-a", (sys.executable,)),
        )
        self.assertEqual((settings.stop_grace, settings.scale, settings.persist), (30.0, 1.0, False))

    def test_a_variable_that_is_empty_gives_nothing(self) -> None:
        unset = {"FLODL_HOST_NAME": "gpu-a"}
        names = ["log-dir", "token-file", *(option for option, *_ in OPTION_TEXTS)]
        for variable in (*map(environment_name, names), "FLODL_JOIN_TOKEN", "FLODL_NET_TIMEOUT_SCALE"):
            with self.subTest(variable):
                self.assertEqual(self.told({}, {**unset, variable: ""}), self.told({}, unset))

    def test_the_host_s_name_has_three_sources(self) -> None:
        environ = {"FLODL_HOST_NAME": "gpu-b"}
        self.assertEqual(self.settings({"host": "gpu-a"}, environ).host, "gpu-a")
        self.assertEqual(self.settings({}, {**environ, "FLODL_TW_HOST": "gpu-c"}).host, "gpu-c")
        self.assertEqual(self.settings({}, environ).host, "gpu-b")
        self.assertEqual(self.settings({}, {"FLODL_HOST_NAME": ""}).host, socket.gethostname())

    def test_an_option_wins_over_what_the_host_s_files_tell(self) -> None:
        self.assertEqual(self.settings({}, nccl=(2, 27, 3)).nccl_version, (2, 27, 3))
        self.assertEqual(self.settings({"nccl-version": "0.0"}, nccl=(2, 27, 3)).nccl_version, (0, 0, 0))

    def test_the_scale_is_the_network_s_and_leaves_the_grace_alone(self) -> None:
        settings = self.settings({"stop-grace": "3"}, {"FLODL_NET_TIMEOUT_SCALE": "2.5"})
        self.assertEqual((settings.scale, settings.stop_grace), (2.5, 3.0))
        settings, warnings = self.told({}, {"FLODL_NET_TIMEOUT_SCALE": "fast"})
        self.assertEqual(settings.scale, 1.0)
        self.assertEqual(
            warnings, ["FLODL_NET_TIMEOUT_SCALE 'fast': it must be a number of at least 0.1; going on with 1.0"]
        )


class TestWrongValues(SettingsTestCase):
    """One line: where it came from, the value, the limit and the way out."""

    def test_a_wrong_value_names_itself_and_the_option_or_variable_that_gave_it(self) -> None:
        for option, text, error in WRONG:
            with self.subTest(option, text=text):
                self.assertEqual(self.refused({option: text}), f"--{option} {error}")
                self.assertEqual(
                    self.refused({}, {environment_name(option): text}), f"{environment_name(option)} {error}"
                )

    def test_other_names_of_this_host_are_checked_as_well(self) -> None:
        self.assertEqual(
            self.refused({}, {"FLODL_HOST_NAME": "\udcff"}),
            "FLODL_HOST_NAME '\\udcff': it is not UTF-8; give a text that is",
        )

    def test_a_wrong_controller_is_named(self) -> None:
        self.assertEqual(
            self.refused({"controller": "gpu-a:0"}),
            "HOST[:PORT] 'gpu-a:0': 'gpu-a:0' has the port '0', the limits are 1 and 65535: write HOST:PORT; "
            "name the controller",
        )

    def test_a_program_that_is_not_there_is_named(self) -> None:
        plain = self.folder / "plain"
        plain.write_text("#!/bin/sh\n")
        plain.chmod(0o644)
        for words, error in (
            ([], "PROGRAM: there is none; give it after --, with its arguments"),
            (["no-such-program"], "PROGRAM 'no-such-program': it is not on PATH; give the path of an executable file"),
            ([""], "PROGRAM '': it is not on PATH; give the path of an executable file"),
            (
                ["/nonexistent/x"],
                "PROGRAM '/nonexistent/x': there is no such file; give the path of an executable file",
            ),
            ([str(plain)], f"PROGRAM '{plain}': it cannot be executed; give the path of an executable file"),
            (
                [str(self.folder)],
                f"PROGRAM '{self.folder}': it cannot be executed; give the path of an executable file",
            ),
        ):
            with self.subTest(words):
                self.assertEqual(self.refused(program=words), error)

    def test_a_script_that_is_only_in_this_folder_says_how_to_name_it(self) -> None:
        (self.folder / "train.py").write_text("")
        with contextlib.chdir(self.folder):
            self.assertEqual(
                self.refused(program=["train.py"]),
                "PROGRAM 'train.py': it is not on PATH, though in this folder: write ./ before it, or python before "
                "a script; give the path of an executable file",
            )

    def test_a_script_that_cannot_be_executed_says_how_it_can_be_started(self) -> None:
        script = self.folder / "my train.py"
        script.write_text("")
        self.assertEqual(
            self.refused(program=[str(script)]),
            f"PROGRAM '{script}': it cannot be executed; give the path of an executable file, "
            f"or start the script by Python: -- python '{script}'",
        )

    def test_a_program_is_found_on_path_and_its_arguments_are_left_alone(self) -> None:
        found = find_program(["sh", "-c", "exit $0", "--host", ""])
        self.assertTrue(os.path.isabs(found[0]))
        self.assertEqual(os.path.basename(found[0]), "sh")
        self.assertEqual(found[1:], ("-c", "exit $0", "--host", ""))

    def test_a_relative_program_becomes_absolute_and_no_link_is_followed(self) -> None:
        link = self.folder / "python"
        link.symlink_to(sys.executable)
        self.assertEqual(find_program([os.path.relpath(link)]), (str(link),))

    def test_a_log_folder_is_made(self) -> None:
        path = self.folder / "a" / "b"
        self.assertEqual(self.settings({"log-dir": str(path)}).log_dir, path)
        self.assertTrue(path.is_dir())
        relative = os.path.relpath(path)
        self.assertEqual(self.settings({}, {"FLODL_TW_LOG_DIR": relative}).log_dir, Path(relative).absolute())

    def test_a_log_folder_that_cannot_be_made_is_named(self) -> None:
        file = self.folder / "file"
        file.write_text("")
        for path, reason in ((file, "File exists"), (file / "logs", "Not a directory")):
            with self.subTest(reason):
                self.assertEqual(
                    self.refused({"log-dir": str(path)}),
                    f"--log-dir '{path}': it cannot be made ({reason}); name a folder of your own",
                )
        self.assertEqual(self.refused({"log-dir": ""}), "--log-dir '': it names no folder; name a folder of your own")


class TestToken(SettingsTestCase):
    """Where the token comes from, and where its text never goes."""

    def test_a_file_wins_over_the_variable_and_a_launcher_s_over_both(self) -> None:
        path = self.file(TOKEN)
        environ = {"FLODL_JOIN_TOKEN": OTHER}
        self.assertIsNone(self.settings().token)
        self.assertEqual(self.settings({}, environ).token, bytes.fromhex(OTHER))
        self.assertEqual(self.settings({"token-file": path}, environ).token, bytes.fromhex(TOKEN))
        self.assertEqual(self.settings({}, {**environ, "FLODL_TW_TOKEN_FILE": path}).token, bytes.fromhex(TOKEN))
        self.assertEqual(self.settings({"token-file": path}, environ, token=bytes(16)).token, bytes(16))

    def test_a_newline_at_its_end_and_capitals_are_fine(self) -> None:
        for text in (TOKEN + "\n", TOKEN.upper() + "\r\n", f"  {TOKEN}\n\n"):
            with self.subTest(text):
                self.assertEqual(self.settings({"token-file": self.file(text)}).token, bytes.fromhex(TOKEN))
        self.assertEqual(self.settings({}, {"FLODL_JOIN_TOKEN": TOKEN + "\n"}).token, bytes.fromhex(TOKEN))

    def test_settings_do_not_show_it(self) -> None:
        settings = self.settings({"token-file": self.file(TOKEN)})
        self.assertNotIn(TOKEN, repr(settings))
        self.assertNotIn(repr(settings.token), repr(settings))

    def test_a_file_that_is_cut_short_or_open_to_others_is_refused_without_its_text(self) -> None:
        for text, mode, error in (
            (TOKEN[:31], 0o600, "a token is 32 hex digits, this is 31 characters; make one with: flodl-tw token"),
            (
                TOKEN + "0",
                0o600,
                "a token is 32 hex digits, this is 33 characters; make one with: flodl-tw token",
            ),
            (
                "g" + TOKEN[1:],
                0o600,
                "a token is 32 hex digits, this is 32 characters with others among them; make one with: flodl-tw token",
            ),
            ("", 0o600, "a token is 32 hex digits, this is 0 characters; make one with: flodl-tw token"),
            (TOKEN, 0o644, "others can read it (mode 0644), and a token is a credential; chmod 600 {}"),
            (TOKEN, 0o640, "others can read it (mode 0640), and a token is a credential; chmod 600 {}"),
        ):
            with self.subTest(error):
                path = self.file(text, mode)
                line = self.refused({"token-file": path})
                self.assertEqual(line, f"--token-file {path}: {error.format(path)}")
                self.assertNotIn(TOKEN[1:31], line)

    def test_a_file_that_cannot_be_read_is_named_by_what_gave_it(self) -> None:
        path = str(self.folder / "none")
        self.assertEqual(
            self.refused({}, {"FLODL_TW_TOKEN_FILE": path}),
            f"FLODL_TW_TOKEN_FILE {path}: it cannot be read (No such file or directory); check the path and its owner",
        )
        self.assertIn("(Is a directory)", self.refused({"token-file": str(self.folder)}))

    def test_a_token_where_a_file_is_due_is_not_repeated(self) -> None:
        line = self.refused({"token-file": TOKEN})
        self.assertNotIn(TOKEN, line)
        self.assertIn("(not shown)", line)

    def test_a_variable_s_text_is_not_repeated(self) -> None:
        for text in (TOKEN[:30], TOKEN + "00", " "):
            with self.subTest(text):
                line = self.refused({}, {"FLODL_JOIN_TOKEN": text})
                self.assertEqual(
                    line,
                    f"FLODL_JOIN_TOKEN (not shown): a token is 32 hex digits, this is {len(text.strip())} characters; "
                    "make one with: flodl-tw token, or unset it",
                )


class TestHello(SettingsTestCase):
    """What a host says of itself."""

    DEVICES = (Device(5, "5", "NVIDIA H100 (80GB, sm_90)"), Device(0, "GPU-ab", "NVIDIA GPU-ab"))

    def test_a_hello_has_the_devices_and_what_was_given(self) -> None:
        given = {"host": "gpu-a", "nccl-version": "2.27.3", "dataset-sig": SIG.hex(), "run-id": "r"}
        settings = self.settings({**given, "model-sig": "ff" * 32})
        self.assertEqual(
            settings.hello(self.DEVICES, "sm90"),
            Hello(
                "gpu-a",
                b"\5\0",
                ("NVIDIA H100 (80GB, sm_90)", "NVIDIA GPU-ab"),
                "sm90",
                SIG,
                "r",
                (2, 27, 3),
                b"\xff" * 32,
            ),
        )

    def test_ranks_without_gpus_have_no_labels_and_an_option_wins_for_libtorch(self) -> None:
        settings = self.settings({"host": "gpu-a", "libtorch": "precompiled/cu128"})
        hello = settings.hello((Device(0, "-1", ""), Device(1, "-1", "")), "cpu")
        self.assertEqual(hello, Hello("gpu-a", b"\0\1", (), "precompiled/cu128", bytes(32)))

    def test_the_controller_is_shown_with_its_port(self) -> None:
        self.assertEqual(self.settings({"controller": "::1"}).endpoint, "[::1]:29500")
        self.assertEqual(self.settings({"controller": "gpu-a:1"}).endpoint, "gpu-a:1")
