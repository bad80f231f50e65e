"""Wheels with the native kernels and, where none can be compiled, without them: with the reason in their place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NATIVE = "llmctl/kernels/native"
pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler, to take it away")


def make_wheel(source: Path, folder: Path, **env: str) -> tuple[Path, dict[str, bytes]]:
    """The wheel pip builds, and the files of its native folder."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--disable-pip-version-check", "-w", folder, source]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        return wheel, {n: archive.read(n) for n in archive.namelist() if n.startswith(f"{NATIVE}/")}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """What a build needs of the repository, with a single C++ file that compiles quickly."""
    root = tmp_path / "source"
    (root / NATIVE).mkdir(parents=True)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", ".gitignore"):
        shutil.copy(ROOT / name, root)
    (root / NATIVE / "__init__.py").write_text("")
    (root / NATIVE / "CMakeLists.txt").write_text(CMAKE)
    (root / NATIVE / "small.cpp").write_text('extern "C" void* PyInit__native() { return nullptr; }')
    return root


CMAKE = """cmake_minimum_required(VERSION 3.19)
project(small LANGUAGES CXX)
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
Python_add_library(_native MODULE WITH_SOABI small.cpp)
"""


def test_a_wheel_has_the_extension_and_not_its_sources(source: Path, tmp_path: Path) -> None:
    wheel, files = make_wheel(source, tmp_path / "wheels")
    assert "none-any" not in wheel.name
    (extension,) = set(files) - {f"{NATIVE}/__init__.py"}
    assert Path(extension).name.startswith("_native.")


def test_without_a_compiler_a_wheel_says_so_and_runs_anywhere(source: Path, tmp_path: Path) -> None:
    wheel, files = make_wheel(source, tmp_path / "wheels", CXX="/nonexistent/c++")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert set(files) == {f"{NATIVE}/__init__.py", f"{NATIVE}/_not_built.txt"}
    assert b"no C++ compiler was found" in files[f"{NATIVE}/_not_built.txt"]


def test_sources_that_do_not_compile_are_named(source: Path, tmp_path: Path) -> None:
    (source / NATIVE / "small.cpp").write_text("#error a compiler too old\n")
    _, files = make_wheel(source, tmp_path / "wheels")
    note = files[f"{NATIVE}/_not_built.txt"].decode()
    assert "compiling them failed" in note
    assert "a compiler too old" in note
    assert note.count("\n") == 1
