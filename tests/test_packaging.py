"""What is in an sdist and in the wheel that is built from it."""

from __future__ import annotations

import contextlib
import tarfile
import tempfile
import unittest
import zipfile
from collections.abc import Callable
from configparser import ConfigParser
from email import message_from_string
from email.message import Message
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path, PurePath

from flodl_tw import __version__

ROOT = Path(__file__).parent.parent
NAME = f"flodl_tw-{__version__}"
PACKAGES = ("flodl_tw", "twisted")


def built(make: Callable[[str], str], source: Path, target: str) -> Path:
    """The archive that a hook of the build backend makes of ``source``; the hooks read the current folder."""
    with contextlib.chdir(source):
        return Path(target, make(target))


@cache
def archives() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The files of the sdist and of the wheel, with the bytes of each, built once; no network is needed."""
    from hatchling import build

    with tempfile.TemporaryDirectory(prefix="flodl-tw-") as made:
        sdist = built(build.build_sdist, ROOT, made)
        with tarfile.open(sdist) as archive:
            archive.extractall(made, filter="data")
        unpacked = Path(made, NAME)
        source = {str(path.relative_to(unpacked)): path.read_bytes() for path in unpacked.rglob("*") if path.is_file()}
        with zipfile.ZipFile(built(build.build_wheel, unpacked, made)) as wheel:
            return source, {name: wheel.read(name) for name in wheel.namelist()}


def modules(folder: str) -> set[str]:
    """The modules below a folder of the checkout."""
    return {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")}


class Wheel(unittest.TestCase):
    """What an install gets."""

    def setUp(self) -> None:
        _, self.files = archives()

    def metadata(self) -> Message:
        """What a package index shows of it."""
        return message_from_string(self.files[f"{NAME}.dist-info/METADATA"].decode())

    def test_it_has_every_module_the_plugin_and_the_mark_of_its_types_and_nothing_else(self) -> None:
        code = {name for name in self.files if PurePath(name).parts[0] != f"{NAME}.dist-info"}
        self.assertEqual(code, modules("flodl_tw") | {"flodl_tw/py.typed", "twisted/plugins/flodl_controller.py"})

    def test_its_packages_are_those_of_the_layout(self) -> None:
        folders = {str(PurePath(name).parent) for name in self.files if name.startswith("flodl_tw/")}
        parts = ("agent", "channels", "cli", "core", "core/store", "fdl", "testing", "web")
        self.assertEqual(folders, {"flodl_tw", *(f"flodl_tw/{part}" for part in parts)})

    def test_it_does_not_take_twisteds_package_over(self) -> None:
        self.assertEqual([name for name in self.files if name.startswith("twisted/") and "__init__" in name], [])

    def test_its_licence_goes_with_it(self) -> None:
        self.assertEqual(self.files[f"{NAME}.dist-info/licenses/LICENSE"], (ROOT / "LICENSE").read_bytes())
        self.assertEqual(self.metadata()["License-Expression"], "MIT")

    def test_its_commands_can_be_loaded(self) -> None:
        parser = ConfigParser()
        parser.read_string(self.files[f"{NAME}.dist-info/entry_points.txt"].decode())
        commands = dict(parser["console_scripts"])
        self.assertEqual(set(commands), {"flodl-tw", "flodl-tw-agent"})
        for name, value in commands.items():
            self.assertTrue(callable(EntryPoint(name, value, "console_scripts").load()), name)

    def test_it_says_which_pythons_it_is_for(self) -> None:
        metadata = self.metadata()
        named = [each.rpartition(" ")[2] for each in metadata.get_all("Classifier", []) if "Python :: 3." in each]
        self.assertEqual(metadata["Requires-Python"], f">={named[0]}")
        self.assertEqual(named, [f"3.{minor}" for minor in range(11, 11 + len(named))])

    def test_what_it_needs_to_run_has_no_tool_of_the_tests(self) -> None:
        needs = {each.partition(">")[0] for each in self.metadata().get_all("Requires-Dist", [])}
        self.assertEqual(needs, {"klein", "pyyaml", "treq", "twisted"})


class Sdist(unittest.TestCase):
    """What a packager gets: enough to build it and to test it."""

    def setUp(self) -> None:
        self.files, _ = archives()

    def test_it_has_the_source_the_tests_and_the_docs(self) -> None:
        self.assertLessEqual(modules("flodl_tw") | modules("twisted") | modules("tests"), set(self.files))
        documents = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")}
        self.assertLessEqual({*documents, "README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"}, set(self.files))
        self.assertIn("flodl_tw/py.typed", self.files)
        self.assertTrue(any(name.startswith("newsfragments/") for name in self.files))

    def test_what_the_tests_read_is_there(self) -> None:
        self.assertIn("tests/vectors/join-v4.json", self.files)
        self.assertIn("tests/fdl/cluster/fdl.yml", self.files)

    def test_it_has_nothing_that_was_made_here(self) -> None:
        made = [name for name in self.files if set(PurePath(name).parts) & {".venv", "__pycache__", "dist", ".ci"}]
        self.assertEqual(made, [])
        self.assertEqual([name for name in self.files if name.endswith((".pyc", "dropin.cache"))], [])
