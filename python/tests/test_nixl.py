"""``python -m pushgate nixl``, over folders laid out as NIXL's wheels lay them out, with the backend that the wheel has installed."""

import ctypes
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import pushgate

LIMIT = 120
"""Seconds that guard against a hang."""


def wheel(place: Path, name: str, version: str, backends: "tuple[str, ...]" = ("UCX",)) -> Path:
    """Lays out a wheel of NIXL; returns the folder of its libraries."""
    module = name.replace("-", "_")
    info = place / f"{module}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
    libraries = place / f"{module}.libs"
    (libraries / "nixl").mkdir(parents=True)
    for backend in backends:
        (libraries / "nixl" / f"libplugin_{backend}.so").write_bytes(b"")
    (libraries / "libucp-1.so").write_bytes(b"")
    (libraries / "ucx").mkdir()
    core = place / f".{module}.mesonpy.libs"
    (core / "plugins").mkdir(parents=True)
    (core / "libfile_utils.so").write_bytes(b"")
    return libraries


class Nixl(unittest.TestCase):
    def setUp(self) -> None:
        held = tempfile.TemporaryDirectory()
        self.addCleanup(held.cleanup)
        self.folder = Path(held.name).resolve()
        self.site = self.folder / "site"

    def ended(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        path = os.pathsep.join([str(self.site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        env = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(self.folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pushgate", "nixl", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=env)

    def made(self, *arguments: str) -> str:
        ended = self.ended(*arguments)
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))
        return ended.stdout.rstrip("\n")

    def refused(self, *arguments: str) -> str:
        ended = self.ended(*arguments)
        self.assertEqual((ended.returncode, ended.stdout), (1, ""))
        self.assertNotIn("Traceback", ended.stderr)
        return ended.stderr

    def test_the_backend_loads_by_the_path_of_its_link_and_has_nixls_entry(self) -> None:
        wheel(self.site, "nixl-cu13", "1.5.1")
        library = ctypes.CDLL(f"{self.made()}/libplugin_PUSHGATE.so")
        library.nixl_plugin_init.restype = ctypes.c_void_p
        table = library.nixl_plugin_init()
        self.assertIsNotNone(table)
        # The version of the plugin interface comes first.
        self.assertEqual(ctypes.c_int.from_address(table).value, 1)

    def test_the_folder_has_the_wheels_backends_and_ours_with_the_libraries_above(self) -> None:
        libraries = wheel(self.site, "nixl-cu13", "1.5.1", ("UCX", "POSIX"))
        backends = Path(self.made())
        self.assertTrue(backends.is_relative_to(self.folder / "cache"))
        self.assertEqual(
            {link.name: link.resolve() for link in backends.iterdir()},
            {
                "libplugin_UCX.so": libraries / "nixl/libplugin_UCX.so",
                "libplugin_POSIX.so": libraries / "nixl/libplugin_POSIX.so",
                "libplugin_PUSHGATE.so": pushgate.nixl_plugin(),
            },
        )
        above = {link.name: link.resolve() for link in backends.parent.iterdir() if link.is_symlink()}
        self.assertEqual(above, {
            "libucp-1.so": libraries / "libucp-1.so",
            "ucx": libraries / "ucx",
            "libfile_utils.so": self.site / ".nixl_cu13.mesonpy.libs" / "libfile_utils.so",
        })

    def test_a_folder_that_is_named_is_made_and_print_env_is_a_line_for_a_shell(self) -> None:
        wheel(self.site, "nixl-cu12", "1.4.0")
        named = self.folder / "with 'quotes"
        self.assertEqual(self.made("--folder", str(named)), f"{named}/nixl")
        line = self.made("--folder", str(named), "--print-env")
        said = subprocess.run(["sh", "-euc", f'{line}\necho "$NIXL_PLUGIN_DIR"'], capture_output=True, text=True, timeout=LIMIT)
        self.assertEqual(said.stdout, f"{named}/nixl\n")

    def test_of_two_wheels_the_newest_is_taken_and_both_are_named(self) -> None:
        wheel(self.site, "nixl-cu13", "1.5.9")
        newest = wheel(self.site, "nixl-cu12", "1.5.10")
        ended = self.ended()
        self.assertEqual(ended.returncode, 0, ended.stderr)
        self.assertEqual(Path(ended.stdout.strip(), "libplugin_UCX.so").resolve().parent.parent, newest)
        self.assertRegex(ended.stderr, r"took nixl-cu12 1\.5\.10 in .*; there is also nixl-cu13 1\.5\.9 in ")

    def test_the_meta_package_without_backends_is_no_wheel(self) -> None:
        wheel(self.site, "nixl", "1.5.2", ())
        self.assertRegex(self.refused(), "no wheel of NIXL with backends .*pip install nixl-cu13")
        wheel(self.site, "nixl-cu13", "1.5.1")
        self.made()

    def test_a_nixl_that_the_backend_was_not_made_for_is_refused_with_those_that_it_was(self) -> None:
        for version in ("1.2.9", "1.6.0", "2.4.0"):
            self.site = self.folder / version
            wheel(self.site, "nixl-cu13", version)
            wanted = rf"nixl-cu13 {version} in .*: the backend is made for NIXL 1\.3 to 1\.5: pip install 'nixl-cu13>=1\.3,<1\.6'"
            self.assertRegex(self.refused(), wanted)

    def test_without_a_wheel_the_error_says_what_to_install(self) -> None:
        self.assertRegex(self.refused(), "no wheel of NIXL with backends .*pip install nixl-cu13")

    def test_links_of_an_earlier_wheel_go_and_files_of_others_stay(self) -> None:
        named = self.folder / "named"
        wheel(self.site, "nixl-cu13", "1.4.1", ("UCX", "GONE"))
        self.made("--folder", str(named))
        (named / "nixl" / "libmine.so").write_bytes(b"mine")
        (named / "other").symlink_to("/")
        self.site = self.folder / "later"
        wheel(self.site, "nixl-cu13", "1.5.1")
        self.made("--folder", str(named))
        names = sorted(link.name for link in (named / "nixl").iterdir())
        self.assertEqual(names, ["libmine.so", "libplugin_PUSHGATE.so", "libplugin_UCX.so"])
        self.assertTrue((named / "other").is_symlink())
        self.assertIn("later", os.readlink(named / "nixl" / "libplugin_UCX.so"))

    def test_a_file_in_the_place_of_a_link_is_kept_and_named(self) -> None:
        libraries = wheel(self.site, "nixl-cu13", "1.5.1")
        # The folder of the wheel itself, by mistake.
        self.assertRegex(self.refused("--folder", str(libraries)), "is there already and is no link: choose another --folder")
        self.assertFalse((libraries / "libucp-1.so").is_symlink())

    def test_a_folder_that_cannot_be_made_is_named(self) -> None:
        wheel(self.site, "nixl-cu13", "1.5.1")
        (self.folder / "file").write_bytes(b"")
        self.assertRegex(self.refused("--folder", str(self.folder / "file" / "below")), "cannot make .*file/below: .*choose another")


if __name__ == "__main__":
    unittest.main()
