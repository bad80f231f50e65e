"""Tile choice of the linear kernels, in one place: from the shape of a product and a table of the GPU, never by trying.

Tables are JSON files in `configs`, one a GPU; LLMCTL_GPU_TILES names another file of the same keys:
multiprocessors                of the GPU, where none can be asked
matvec.num_warps               of a program
matvec.rows_per_thread         rows of the weight, by the largest number of rows of x that it is for
matvec.sub_blocks              32-column pieces of K a turn, in the same way
matmul.block_n, .sub_blocks    columns of the result and 32-column pieces of K that a program takes at a time
….blocks_per_multiprocessor    programs to have at least, before K is split no further
….max_splits                   of K
attention.prefill, .decode     rows, keys, warps, stages by the largest width of a key that they are for
….prefill_codes, .decode_codes the same where pages hold codes (q8_0, fp8)
attention.float32              the same where products are of float32
attention.programs             to have at least in a step of decode, before keys are split no further, at most max_splits times
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from math import gcd
from pathlib import Path
from typing import Any

import torch

from llmctl.errors import UsageError
from llmctl.kernels.triton_lib.forms import GROUPS, PAIRS, SIGNED16, Form
from llmctl.kernels.triton_lib.launch import cdiv, power_of_two

VARIABLE = "LLMCTL_GPU_TILES"
MAX_MATVEC_ROWS = 8
MAX_MATMUL_ROWS = 64
"""Rows of x up to which one launch does it all; more are multiplied with torch, after the weight was written out."""
_FOLDER = Path(__file__).with_name("configs")
_BY_NAME = {"H200": "h200", "H100": "h200", "A100": "a100", "4090": "rtx4090"}
_KEYS = {
    "matvec": {"num_warps", "rows_per_thread", "sub_blocks", "blocks_per_multiprocessor", "max_splits"},
    "matmul": {"num_warps", "num_stages", "block_n", "sub_blocks", "blocks_per_multiprocessor", "max_splits"},
    "attention": {"prefill", "decode", "prefill_codes", "decode_codes", "float32", "programs", "max_splits"},
}


@dataclass(frozen=True)
class MatvecTile:
    """Rows of the weight a program, sub-blocks a turn, parts of K."""

    block_n: int
    step: int
    splits: int
    num_warps: int


@dataclass(frozen=True)
class MatmulTile:
    """Rows and columns of the result a program, sub-blocks a turn, parts of K."""

    block_m: int
    block_n: int
    sub_blocks: int
    splits: int
    num_warps: int
    num_stages: int


def matvec_tile(
    form: Form, m: int, n: int, k: int, matrices: int, table: dict[str, Any], is_int8: bool = True
) -> MatvecTile:
    """For m rows of x, rounded (is_int8) or not, times each of `matrices` of (n, k), on the GPU of the table."""
    own = table["matvec"]
    block_n = 32 * own["num_warps"] * _for_rows(own["rows_per_thread"], m)
    most = _for_rows(own["sub_blocks"], m)
    step = matvec_step(form, k, most if is_int8 else max(2, most // 2))  # floats take more registers
    splits = _splits(cdiv(n, block_n) * matrices, k // (32 * step), own, table["multiprocessors"])
    return MatvecTile(block_n, step, splits, own["num_warps"])


def max_matvec_rows(form: Form, is_int8: bool) -> int:
    """Rows of x up to which they are multiplied one by one. Beyond three a row of floats costs more than a tile; beyond four,
    codes of five and six bits whose scales are small integers need more registers than there are."""
    if not is_int8:
        return 3
    is_wide = form.bits > 4 and form.kind in (PAIRS, SIGNED16)
    return MAX_MATVEC_ROWS // 2 if is_wide and form.low == 4 else MAX_MATVEC_ROWS


def matvec_step(form: Form, k: int, most: int) -> int:
    """Sub-blocks a turn, at most so many: they share a group's scale, and divide K. Codes of eight bits are twice the words."""
    most = most // 2 if form.bits == 8 else most
    return gcd(most, k // 32, form.group if form.kind == GROUPS else most)


def _for_rows(choices: dict[str, int], m: int) -> int:
    """The choice for m rows of x: keys are the largest numbers of rows."""
    return next(choice for most, choice in sorted((int(key), choice) for key, choice in choices.items()) if m <= most)


def matmul_tile(m: int, n: int, k: int, matrices: int, table: dict[str, Any]) -> MatmulTile:
    """For blocks of up to m rows of x times each of `matrices` of (n, k), on the GPU of the table."""
    own = table["matmul"]
    block_m = min(power_of_two(m, 16), MAX_MATMUL_ROWS)
    programs = cdiv(n, own["block_n"]) * cdiv(m, block_m) * matrices
    splits = _splits(programs, cdiv(k, 32 * own["sub_blocks"]), own, table["multiprocessors"])
    return MatmulTile(block_m, own["block_n"], own["sub_blocks"], splits, own["num_warps"], own["num_stages"])


def _splits(programs: int, turns: int, own: dict[str, Any], multiprocessors: int) -> int:
    """A power of two, so that few variants are compiled: so many parts that every multiprocessor has its programs."""
    wanted = cdiv(own["blocks_per_multiprocessor"] * multiprocessors, programs)
    most = min(turns, own["max_splits"], wanted)
    return 1 << (most.bit_length() - 1) if most else 1


@cache
def gpu_table(device: torch.device) -> dict[str, Any]:
    """The table for a device. Errors: UsageError for a file that LLMCTL_GPU_TILES names and that is none."""
    named = os.environ.get(VARIABLE)
    if named:
        return _read(Path(named))
    if device.type != "cuda":
        return named_table("interpreter")  # few programs and large ones: every operation costs the same
    properties = torch.cuda.get_device_properties(device)
    usual = "a100" if properties.major == 8 and properties.minor == 0 else "rtx4090" if properties.major <= 8 else "h200"
    name = next((table for word, table in _BY_NAME.items() if word in properties.name), usual)
    return named_table(name) | {"multiprocessors": properties.multi_processor_count}


def named_table(name: str) -> dict[str, Any]:
    """One of `configs`."""
    return _read(_FOLDER / f"{name}.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"tiles of a GPU: {path} cannot be read: {error}") from error
    wrong = [name for name, keys in _KEYS.items() if not isinstance(table, dict) or set(table.get(name, {})) != keys]
    if wrong or "multiprocessors" not in table:
        raise UsageError(f"tiles of a GPU: {path} needs multiprocessors and {_KEYS}, see {_FOLDER / 'h200.json'}")
    return table
