"""The rules of the house that a linter can hold: who imports whom, who prints, where torch may live."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "llmctl"
FILES = sorted(PACKAGE.rglob("*.py"))
COMMANDS = [PACKAGE / "cli.py", *sorted((PACKAGE / "commands").glob("*.py"))]
# What a command may import before it runs: nothing that costs time or pulls numpy in.
LIGHT = {"typer", "llmctl", "llmctl.errors", "llmctl.commands", *(f"llmctl.commands.{file.stem}" for file in COMMANDS)}


def named(files: list[Path]) -> list[object]:
    return [pytest.param(file, id=str(file.relative_to(ROOT))) for file in files]


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"), str(file))


def at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported; a TYPE_CHECKING block does not."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            yield from at_import(statement.orelse)
        elif not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for block in ("body", "orelse", "finalbody"):
                yield from at_import(getattr(statement, block, []))
            for handler in getattr(statement, "handlers", []):
                yield from at_import(handler.body)


def imported(statements: Iterator[ast.AST]) -> set[str]:
    """Modules named by the import statements among these nodes."""
    names: set[str] = set()
    for node in statements:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import: {ast.unparse(node)}"
            names.add(node.module or "")
    return names


def test_the_layers_hold() -> None:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_is_content() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "llmctl", "tests", "scripts"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", named(COMMANDS))
def test_commands_import_nothing_heavy_before_they_run(file: Path) -> None:
    modules = imported(at_import(parse(file).body))
    heavy = {name for name in modules - LIGHT if name.partition(".")[0] not in sys.stdlib_module_names | {"typer"}}
    assert not heavy, "import it inside the function that needs it"


# Calibrated quantization computes in torch: what runs the reference ops over text, and the solvers. `--method rtn` does without.
CALIBRATION = {
    f"quant/{name}.py"
    for name in (
        *("activations", "awq", "calibrated", "capture", "gptq", "integer_descent", "integer_grid", "module_solver", "pipeline"),
        *("divergence", "error_sums", "grid_gptq", "head", "smoothing", "statistics", "walk"),
    )
}


@pytest.mark.parametrize("file", named(FILES))
def test_torch_lives_only_in_reference_and_triton_files(file: Path) -> None:
    modules = {name.partition(".")[0] for name in imported(ast.walk(parse(file)))}
    assert "transformers" not in modules, "it is what the tests compare with"
    is_triton = file.name.startswith("_triton") or file.parent.name == "triton_lib"
    is_reference = "_reference" in file.name or file.relative_to(ROOT / "llmctl").as_posix() in CALIBRATION
    allowed = {"torch", "triton"} if is_triton else {"torch"} if is_reference else set()
    assert not modules & ({"torch", "triton"} - allowed)


@pytest.mark.parametrize("file", named([file for file in FILES if file.name != "console.py"]))
def test_only_the_console_prints(file: Path) -> None:
    written = [ast.unparse(node.func) for node in ast.walk(parse(file)) if isinstance(node, ast.Call)]
    forbidden = ("print", "typer.echo", "typer.secho", "sys.stdout.write", "sys.stderr.write", "logging.basicConfig")
    assert not [call for call in written if call in forbidden]


def test_every_module_says_what_it_is_for() -> None:
    bare = [file for file in FILES if not ast.get_docstring(parse(file)) and file.read_bytes().strip()]
    assert not [str(file.relative_to(ROOT)) for file in bare]
