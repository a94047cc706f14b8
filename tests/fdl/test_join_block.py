"""A flodl user's fdl.yml: what its join: block says, and one line for what cannot be used."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from flodl_tw.agent.gpu_view import GpuView
from flodl_tw.agent.settings import AgentSettings, read_agent_settings
from flodl_tw.core.errors import SettingError
from flodl_tw.fdl.join_block import KEYS, UNUSED, JoinFile, read_join_file
from flodl_tw.fdl.yaml_document import MAX_BYTES
from flodl_tw.options import OptionReader
from tests.agent.test_settings import OTHER, TOKEN, SettingsTestCase

FILE = f"""\
description: a farm's worker
commands:
  train: {{run: cargo run}}
join:
  controller: gpu-head:1400
  token: {TOKEN}
  host: gpu-a
  devices: [0, 2]
  persist: true
  data_path: /data/imagenet
  gpu_ram_share: 0.5
  args: [--model, lenet, --lr, 1e-4, --epochs, 3, --amp, true, '']
"""
ARGS = ["--model", "lenet", "--lr", "1e-4", "--epochs", "3", "--amp", "true", ""]
MODES: tuple[tuple[int, bool], ...] = ((0o600, False), (0o400, False), (0o640, True), (0o604, True), (0o644, True))
WRONG: tuple[tuple[str, str], ...] = (
    # a line of the block, and what is said of it after the place
    ("host: ''", " is '': it must not be blank; give a text, or drop it"),
    ("host: [a]", " is a list: it must be a text; write it as a text, in quotes"),
    ("devices: 0", " is 0: it must be a list of devices, or the word all; write it as [0, 1], or all"),
    ("devices: '0,1'", " is '0,1': it must be a list of devices, or the word all; write it as [0, 1], or all"),
    ("devices: [256]", "[0] (line 4) is 256: the limits are 0 and 255; give a number between them"),
    ("devices: [0, -1]", "[1] (line 4) is -1: the limits are 0 and 255; give a number between them"),
    ("devices: [1, 1]", "[1] (line 4) is 1: it is in this list twice; drop one of the two"),
    ("devices: [GPU-1]", "[0] (line 4) is 'GPU-1': it must be a whole number; give one"),
    ("persist: yes", " is 'yes': it must be true or false; write one of the two without quotes"),
    ("persist: 1", " is 1: it must be true or false; write one of the two without quotes"),
    ("data_path: ' '", " is ' ': it must not be blank; give a text, or drop it"),
    ("gpu_ram_share: '0.5'", " is '0.5': it must be a number; give a number that is 0 or more, such as 0.5"),
    (
        "gpu_ram_share: -1",
        " is -1: the least is 0, and it must be finite; give a number that is 0 or more, such as 0.5",
    ),
    (
        "gpu_ram_share: .inf",
        " is .inf: the least is 0, and it must be finite; give a number that is 0 or more, such as 0.5",
    ),
    ("gpu_ram_share: 1025", " '1025': the limits are 0 and 1024; give a number between them"),
    ("gpu_ram_share: 0", " '0': it must be above 0; give a fraction such as 0.5"),
    ("args: --lr", " is '--lr': it must be a list; write it as [...], or a line with - for each item"),
    ("args: [a, ~]", "[1] (line 4) is '~': it must be a text; write it as a text, in quotes"),
    ('args: ["a\\0b"]', "[0] (line 4) is 'a\\x00b': it has a NUL or half a character; write it without"),
    ("token: abc", " (not shown): a token is 32 hex digits, this is 3 characters; make one with: flodl-tw token"),
    ("token: ''", " (not shown): a token is 32 hex digits, this is 0 characters; make one with: flodl-tw token"),
    ("token: [1]", ": it must be a text of 32 hex digits; make one with: flodl-tw token"),
    ("controler: gpu-b", ": unknown key; did you mean controller?"),
    ("data-path: /data", ": unknown key; did you mean data_path?"),
    ("min_rank_start: 2", ": unknown key; the known ones are controller, token, host, devices, persist, "),
    ("host: a\n  host: b", " (line 5): the key is there twice, first in line 4; drop one of the two"),
)
NO_FILE: tuple[tuple[str | bytes, str], ...] = (
    ("", ": it is empty; name a file with a join: block"),
    ("# join:\n", ": it is empty; name a file with a join: block"),
    ("\ncommands: {}\n", " (line 2): it has no join: block; name the file that has one"),
    ("join:\n", " (line 1): it has no join: block; name the file that has one"),
    ("cluster: {controller: {join: {token: x}}}", " (line 1): it has no join: block; name the file that has one"),
    ("join: [a]", ": join (line 1): it must be a mapping, this is a list; write `key: value` lines under it"),
    ("join: gpu-head", ": join (line 1): it must be a mapping, this is a text; write `key: value` lines under it"),
    ("- a", " (line 1): it must be a mapping, this is a list; write `key: value` lines under it"),
    ("a: b\njoin: [c", " (line 2): it is neither YAML nor JSON: expected ',' or ']'"),
    (b"a: b\nc: \xff", " (line 2): it is not UTF-8; save it as UTF-8"),
    (os.urandom(MAX_BYTES + 1), f": it is larger than {MAX_BYTES} bytes; name the fdl.yml, or its join block alone"),
)
LEAKS: tuple[str, ...] = (
    f"token:{TOKEN}",
    f"token: {TOKEN}0",
    f"token: [{TOKEN}]",
    f"token: '{TOKEN}",
    f"tokn: {TOKEN}",
    f"{TOKEN}: token",
    f"devices: {TOKEN}",
    f"devices: [{TOKEN}]",
    f"persist: {TOKEN}",
    f"gpu_ram_share: {TOKEN}",
    f"controller: '{TOKEN} {TOKEN}'",
    f"controller: x:{TOKEN}",
    f"args: {TOKEN}",
)


class FileTestCase(SettingsTestCase):
    """A file, and what ``join`` makes of it."""

    def setUp(self) -> None:
        super().setUp()
        self.path = self.folder / "fdl.yml"

    def read(self, content: str | bytes, option: str = "--fdl-yml") -> JoinFile:
        """The file's block."""
        self.path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_join_file(str(self.path), option)

    def joined(
        self, content: str, options: dict[str, Any] | None = None, environ: dict[str, str] | None = None
    ) -> AgentSettings:
        """The settings of a ``join`` that has the file."""
        file = self.read(content)
        return read_agent_settings(OptionReader(options or {}, environ or {}), [sys.executable], file=file)[0]

    def line(self, content: str | bytes, **more: Any) -> str:
        """The refusal, without the folder."""
        with self.assertRaises(SettingError) as caught:
            self.joined(content, **more) if isinstance(content, str) else self.read(content)
        text = str(caught.exception)
        self.assertTrue(text.isprintable(), text)
        return text.replace(f"{self.folder}/", "")


class TestReading(FileTestCase):
    """What the block's keys are."""

    def test_a_block_is_read_whole_and_the_rest_of_the_file_is_not_looked_at(self) -> None:
        file = self.read(FILE)
        self.assertEqual(
            {name: placed.text for name, placed in file.texts.items()},
            {
                "host": "gpu-a",
                "devices": "0,2",
                "persist": "True",
                "data-path": "/data/imagenet",
                "gpu-ram-share": "0.5",
            },
        )
        self.assertEqual((file.controller(), file.token()), (("gpu-head", 1400), bytes.fromhex(TOKEN)))
        self.assertEqual(file.args, tuple(ARGS))
        self.assertEqual(file.texts["gpu-ram-share"].place, f"--fdl-yml {self.path}: join.gpu_ram_share (line 11)")

    def test_nothing_shows_the_token(self) -> None:
        self.assertNotIn(TOKEN, repr(self.read(FILE)))

    def test_a_controller_without_a_port_has_flodl_s(self) -> None:
        for text, right in (
            ("gpu-head", ("gpu-head", 1337)),
            ("10.0.0.100:29500", ("10.0.0.100", 29500)),
            ("'[fd00::1]:80'", ("fd00::1", 80)),
            ("'fd00::1'", ("fd00::1", 1337)),
        ):
            with self.subTest(text):
                self.assertEqual(self.joined(f"join: {{controller: {text}}}").controller, right)

    def test_devices_are_a_list_or_all(self) -> None:
        for text, right in (("[3]", "3"), ("[0x1, 0]", "1,0"), ("all", "all"), ("[]", None), ("", None)):
            with self.subTest(text):
                file = self.read(f"join:\n  devices: {text}\n")
                self.assertEqual(OptionReader({}, {}, file.texts).get("devices"), right)

    def test_a_number_may_be_a_text_and_nothing_in_a_text_is_expanded(self) -> None:
        settings = self.joined("join: {controller: a, host: 12, data_path: ~/$HOME/../data}")
        self.assertEqual((settings.host, settings.data_path), ("12", str(Path("~/$HOME/../data").absolute())))

    def test_a_share_is_the_same_number(self) -> None:
        for text in ("0.1", "1e-7", "1", "5e-324", "+.5", "0x10"):
            with self.subTest(text):
                share = self.joined(f"join: {{controller: a, gpu_ram_share: {text}}}").gpu_ram_share
                self.assertEqual(share, float(int(text, 0)) if text.startswith("0x") else float(text))

    def test_a_key_without_a_value_gives_nothing(self) -> None:
        keys = ("token", "host", "devices", "persist", "data_path", "gpu_ram_share", "args")
        block = "".join(f"  {key}:\n" for key in keys)
        environ = {"FLODL_HOST_NAME": "gpu-b"}
        self.assertEqual(
            self.joined(f"join:\n  controller: a\n{block}", {}, environ),
            AgentSettings(("a", 1337), "gpu-b", (sys.executable,), gpu_view=GpuView.OWN),
        )

    def test_json_is_read_and_an_alias_is_what_it_names(self) -> None:
        self.assertEqual(self.joined('{"join": {"controller": "a:5", "host": "b"}}').host, "b")
        self.assertEqual(self.joined("x: &x {controller: a, host: c}\njoin: *x\n").host, "c")


class TestPrecedence(FileTestCase):
    """The command line wins over the environment, and both over the file."""

    OTHERS = (
        # the option, its field, the file's value, and a text that is given elsewhere with its value
        ("host", "host", "gpu-a", "gpu-b", "gpu-b"),
        ("data-path", "data_path", "/data/imagenet", "/other", "/other"),
        ("gpu-ram-share", "gpu_ram_share", 0.5, "0.25", 0.25),
        ("persist", "persist", True, "0", False),
    )

    def test_an_option_or_a_variable_wins_over_the_file(self) -> None:
        for option, field, of_file, text, value in self.OTHERS:
            with self.subTest(option):
                variable = f"FLODL_TW_{option.upper().replace('-', '_')}"
                self.assertEqual(getattr(self.joined(FILE), field), of_file)
                self.assertEqual(getattr(self.joined(FILE, {option: None}, {variable: ""}), field), of_file)
                self.assertEqual(getattr(self.joined(FILE, {}, {variable: text}), field), value)
                if option != "persist":
                    self.assertEqual(getattr(self.joined(FILE, {option: text}, {variable: "x"}), field), value)

    def test_persist_is_turned_on_by_either(self) -> None:
        off = FILE.replace("persist: true", "persist: false")
        self.assertIs(self.joined(off).persist, False)
        self.assertIs(self.joined(off, {"persist": True}).persist, True)
        self.assertIs(self.joined(off, {}, {"FLODL_TW_PERSIST": "1"}).persist, True)

    def test_the_file_s_host_wins_over_the_name_of_the_machine(self) -> None:
        self.assertEqual(self.joined(FILE, {}, {"FLODL_HOST_NAME": "gpu-b"}).host, "gpu-a")

    def test_a_controller_that_is_named_has_our_port_and_the_file_s_is_not_looked_at(self) -> None:
        for content in (FILE, "join: {controller: 'a:b:c'}", "join: {ssh: {target: a}, controller: b}"):
            with self.subTest(content):
                self.assertEqual(self.joined(content, {"controller": "gpu-b"}).controller, ("gpu-b", 29500))

    def test_a_token_that_is_given_elsewhere_wins_and_the_file_s_is_not_looked_at(self) -> None:
        other = self.file(OTHER)
        for content in (FILE, FILE.replace(TOKEN, "set-by-the-image")):
            for options, environ in (
                ({"token-file": other}, {"FLODL_JOIN_TOKEN": TOKEN}),
                ({}, {"FLODL_TW_TOKEN_FILE": other}),
                ({}, {"FLODL_JOIN_TOKEN": OTHER}),
            ):
                with self.subTest(environ=environ):
                    self.assertEqual(self.joined(content, options, environ).token, bytes.fromhex(OTHER))
        self.assertEqual(self.joined(FILE).token, bytes.fromhex(TOKEN))


class TestArguments(FileTestCase):
    """``args`` are PROGRAM's, as flodl's are the binary's."""

    def test_a_program_without_arguments_gets_the_file_s(self) -> None:
        self.assertEqual(self.read(FILE).command(["python"]), (["python", *ARGS], []))

    def test_a_program_s_own_arguments_replace_them_and_that_is_said(self) -> None:
        program, notes = self.read(FILE).command(["python", "train.py"])
        self.assertEqual(program, ["python", "train.py"])
        self.assertEqual(
            notes,
            [f"--fdl-yml {self.path}: join.args (line 12): it is not used, since PROGRAM has arguments of its own"],
        )

    def test_a_file_without_arguments_adds_none(self) -> None:
        for program in (["python"], ["python", "train.py"], []):
            with self.subTest(program):
                self.assertEqual(self.read("join: {controller: a}").command(program), (program, []))
        self.assertEqual(self.read(FILE).command([]), ([], []))


class TestNotes(FileTestCase):
    """What is said before anything is dialed."""

    def test_a_token_that_others_can_read_is_warned_about_as_a_controller_does(self) -> None:
        for mode, warned in MODES:
            with self.subTest(mode=oct(mode)):
                self.read(FILE)
                self.path.chmod(mode)
                notes = read_join_file(str(self.path), "--fdl-yml").notes
                warning = f"--fdl-yml {self.path}: others can read the token in it; chmod 600 it, or use --token-file"
                self.assertEqual(notes, (warning,) if warned else ())
                self.path.chmod(0o600)

    def test_a_file_without_a_token_is_everybody_s(self) -> None:
        self.read("join: {controller: a}")
        self.path.chmod(0o644)
        self.assertEqual(read_join_file(str(self.path), "--fdl-yml").notes, ())

    def test_flodl_s_other_keys_are_accepted_and_named(self) -> None:
        block = "join: {bin: b, source: {from: x}, libtorch: auto, data_source: 's', sig_probe: false, host: a}"
        self.assertEqual(
            self.read(block).notes,
            (
                f"--fdl-yml {self.path}: join (line 1): "
                "flodl-tw has no use for bin, source, libtorch, data_source, sig_probe",
            ),
        )

    def test_what_it_inherits_is_not_merged_and_a_line_says_so(self) -> None:
        (note,) = self.read("inherit-from: base.yml\njoin: {host: a}").notes
        self.assertIn("inherit-from (line 1): it is not merged", note)
        self.assertEqual(self.read("inherit-from:\njoin: {host: a}").notes, ())


class TestWrongFiles(FileTestCase):
    """One line: what named the file, the file, the key and its line, the limit and the way out."""

    def test_a_wrong_value_names_its_key_and_line(self) -> None:
        for line, expected in WRONG:
            with self.subTest(line):
                key = line.split(":")[0]
                place = key if expected.startswith(("[", " (line")) else f"{key} (line 4)"
                self.assertIn(
                    f"--fdl-yml fdl.yml: join.{place}{expected}", self.line(f"a: b\njoin:\n  controller: c\n  {line}\n")
                )

    def test_a_wrong_controller_is_named_where_the_file_s_is_dialed(self) -> None:
        limit = "it is no HOST or HOST:PORT with a port from 1 to 65535; write the address that workers dial"
        for text, shown in (
            ("''", "''"),
            ("':9000'", "':9000'"),
            ("a:0", "'a:0'"),
            ("a:b", "'a:b'"),
            ("'a b'", "'a b'"),
            ("[a]", "a list"),
        ):
            with self.subTest(text):
                self.assertEqual(
                    self.line(f"join:\n  controller: {text}\n"),
                    f"--fdl-yml fdl.yml: join.controller (line 2) is {shown}: {limit}",
                )

    def test_a_tunnel_is_not_opened(self) -> None:
        self.assertEqual(
            self.line("join:\n  controller: 127.0.0.1\n  ssh: {target: gpu-head}\n"),
            "--fdl-yml fdl.yml: join.ssh (line 3): it asks for a tunnel to the controller, and flodl-tw opens none; "
            "open it yourself, and give its end as HOST[:PORT]",
        )

    def test_without_a_controller_in_either_place_it_says_so(self) -> None:
        error = "HOST[:PORT]: there is none; name the controller, or a file whose join: block does with --fdl-yml"
        self.assertEqual(self.line("join: {host: a}"), error)
        self.assertEqual(self.refused({"controller": None}), error)

    def test_what_is_no_such_file_is_one_line(self) -> None:
        for content, expected in NO_FILE:
            with self.subTest(content[:40]), self.assertRaises(SettingError) as caught:
                self.read(content, "FLODL_TW_FDL_YML")
            self.assertIn(f"FLODL_TW_FDL_YML {self.path}{expected}", str(caught.exception))

    def test_a_file_that_cannot_be_read_is_one_line(self) -> None:
        for path, expected in (
            (str(self.folder / "none.yml"), "none.yml: it cannot be read (No such file or directory); check the path"),
            (str(self.folder), "it cannot be read (Is a directory); check the path and its owner"),
            (TOKEN, "--fdl-yml (not shown): it cannot be read (No such file or directory); check the path and"),
            ("/dev/zero", "--fdl-yml /dev/zero: it cannot be read (it is no regular file); check the path and"),
        ):
            with self.subTest(path), self.assertRaises(SettingError) as caught:
                read_join_file(path, "--fdl-yml")
            self.assertIn(expected, str(caught.exception))

    @settings(deadline=None)
    @given(
        st.dictionaries(
            st.sampled_from((*KEYS, *UNUSED)),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
                max_leaves=6,
            ),
        )
    )
    def test_whatever_the_block_holds_it_is_read_or_one_line_says_why_not(self, block: dict[str, Any]) -> None:
        with contextlib.suppress(SettingError):
            file = self.read(json.dumps({"join": block}))
            program, _ = file.command([sys.executable])
            agent, _ = read_agent_settings(OptionReader({}, {}), program, file=file)
            self.assertEqual(agent.program[1:], file.args)
            self.assertTrue(agent.host.strip())

    def test_no_fault_around_a_token_shows_it(self) -> None:
        for line in LEAKS:
            with self.subTest(line):
                controller = "" if line.startswith("controller") else "  controller: a\n"
                self.assertNotIn(TOKEN[:24], self.line(f"join:\n{controller}  {line}\n"))
