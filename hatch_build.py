"""Builds the native kernels when the package is built or installed, and lets both succeed where that is not possible.

Without a compiler the wheel is pure Python, and a line in it says why: `llmctl doctor` and the commands that would have used
the kernels repeat it. scikit-build-core would do this too, but cannot say why, and puts the build tree of an editable
install among the sources (or an import hook before every start of Python).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("llmctl/kernels/native")
NOTE = "_not_built.txt"
COMPILERS = ("c++", "g++", "clang++")


class NotBuilt(Exception):
    """Why there is no extension, in one line."""


class NativeKernels(BuildHookInterface):
    """The hook named in pyproject.toml."""

    def dependencies(self) -> list[str]:
        """What to bring for the build: nothing where there is no compiler to use it."""
        if self.target_name != "wheel" or find_compiler() is None:
            return []
        return [requirement for tool, requirement in (("cmake", "cmake>=3.19"), ("ninja", "ninja")) if not is_there(tool)]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Put the extension, or the note, into the wheel; into the source tree where `version` is "editable"."""
        root = Path(self.root)
        extension = f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
        try:
            made, other = build(root) / extension, NOTE
            build_data |= {"pure_python": False, "infer_tag": True}
        except NotBuilt as reason:
            self.app.display_warning(f"The native kernels are left out: {reason}")
            made, other = write_note(root, str(reason)), extension
        if version == "editable":
            replace(made, root / FOLDER / made.name)
            (root / FOLDER / other).unlink(missing_ok=True)  # of an earlier install
        else:
            build_data["force_include"][str(made)] = str(FOLDER / made.name)


def find_compiler() -> str | None:
    """The C++ compiler that CMake would take: CXX, else the usual names."""
    named = os.environ.get("CXX")
    candidates = [named.split()[0]] if named and named.strip() else COMPILERS
    return next((found for name in candidates if (found := shutil.which(name))), None)


def is_there(tool: str) -> bool:
    """Whether the tool is on PATH; a CMake older than what CMakeLists.txt asks for is not."""
    path = shutil.which(tool)
    if path is None or tool != "cmake":
        return path is not None
    found = re.search(r"version (\d+)\.(\d+)", subprocess.run([path, "--version"], capture_output=True, text=True).stdout)
    return found is not None and (int(found[1]), int(found[2])) >= (3, 19)


def build_folder(root: Path) -> Path:
    """Kept between builds, so that the next one compiles only what changed; scripts/build_native uses the same."""
    return root / "build" / f"native-{sys.implementation.cache_tag}"


def build(root: Path) -> Path:
    """Compile, and return the folder that holds the extension. Errors: NotBuilt."""
    if find_compiler() is None:
        named = os.environ.get("CXX")
        tried = f"CXX is {named!r}, which is not there" if named else f"none of {', '.join(COMPILERS)} is on PATH"
        raise NotBuilt(f"no C++ compiler was found when llmctl was installed ({tried})")
    tools = {tool: shutil.which(tool) for tool in ("cmake", "ninja")}
    if missing := [tool for tool, path in tools.items() if path is None]:
        raise NotBuilt(f"{' and '.join(missing)} was not found when llmctl was installed")
    folder = build_folder(root)
    configure = [tools["cmake"], "-G", "Ninja", "-S", root / FOLDER, "-B", folder, f"-DCMAKE_MAKE_PROGRAM={tools['ninja']}"]
    configure.append(f"-DPython_EXECUTABLE={sys.executable}")
    if run(configure) is not None:  # a cache from another place or compiler may be in the way
        shutil.rmtree(folder, ignore_errors=True)
        check(run(configure))
    check(run([tools["ninja"], "-C", folder]))
    return folder


def write_note(root: Path, reason: str) -> Path:
    """The file that tells an installed llmctl why it has no extension."""
    path = build_folder(root) / NOTE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{reason}\n", "utf-8")
    return path


def run(command: list[Any]) -> str | None:
    """None if it went well; else the line of its output that tells most. The whole output goes to stderr (pip -v)."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
    sys.stderr.write(done.stdout)
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    telling = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no output")
    return f"{Path(command[0]).name}: {telling}"[:300]


def check(failure: str | None) -> None:
    if failure is not None:
        raise NotBuilt(f"compiling them failed when llmctl was installed ({failure}; pip install -v shows all)")


def replace(source: Path, target: Path) -> None:
    """Copy under a new name and rename: a program that has the old extension loaded keeps it."""
    new = target.with_name(f"{target.name}.new")
    shutil.copyfile(source, new)
    new.replace(target)
