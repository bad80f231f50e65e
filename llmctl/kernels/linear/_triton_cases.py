"""The kernels of linear as they are compiled without a GPU, with what their hot loops may take.

Limits of instructions a weight are for one row of x; every further row may add `MOST_PER_ROW` where activations are int8.
"""

from __future__ import annotations

from typing import Any

from llmctl.kernels.linear._triton import PLAIN
from llmctl.kernels.linear._triton_matmul import dequantize_kernel, matmul_kernel
from llmctl.kernels.linear._triton_matvec import add_splits_kernel, matvec_kernel
from llmctl.kernels.triton_lib.activations import quantize_rows_kernel
from llmctl.kernels.triton_lib.compilation import Case
from llmctl.kernels.triton_lib.forms import AFFINE, FORMS, GROUPS, HALF, SIGNED16, Form, integer_form
from llmctl.kernels.triton_lib.tiles import matmul_tile, matvec_tile, named_table

MOST_PER_ROW = 0.55
_ARCHS = (80, 90)
_ALSO_89 = ("linear.decode.Q4_K.m1", "linear.decode.I4.float.m1")
_N, _K = 4096, 4096
_FORMS = {**FORMS, "I4": integer_form(4, 128, True), "I8": integer_form(8, 128, False)}
_LIMITS = {"Q4_K": 1.5, "Q5_K": 2.0, "Q6_K": 2.0, "Q8_0": 1.0, "I4": 1.5, "I8": 1.0}
_FLOAT_LIMITS = {"I4": 4.5}
_ROWS = {"Q4_K": (1, 2, 4, 8), "I4": (1, 4, 8), "Q5_K": (1, 4), "Q6_K": (1, 4)}
_OFTEN_BATCHES = tuple(f"linear.batch.{name}.{table}" for name in ("Q4_K.m16", "F16.m64") for table in ("a100", "h200"))
_EVERY_COMMIT = ("linear.decode.Q4_K.m1", "linear.decode.I4.float.m1", *_OFTEN_BATCHES)
_TABLES = {"a100": 80, "rtx4090": 89, "h200": 90}


def kernel_cases() -> list[Case]:
    """Every form decoding one row and eight, some rows between; small batches; writing out; rounding of activations."""
    rounded = [_matvec(name, m, True) for name in _FORMS for m in _ROWS.get(name, (1, 8))]
    exact = [_matvec(name, m, False) for name, m in (("I4", 1), ("I4", 3), ("Q4_K", 1), ("Q6_K", 1), ("Q8_0", 1))]
    shapes = (("Q4_K", 16), ("Q4_K", 64), ("F16", 16), ("F16", 64), ("Q6_K", 64), ("I4", 64))
    batches = [_matmul(name, m, table) for name, m in shapes for table in _TABLES]
    written = [_dequantize(name) for name in ("Q6_K", "I4")]
    experts = [_matvec("Q4_K", 1, True, EXPERTS=True), *(_matmul("Q4_K", 64, table, SORTED=True) for table in _TABLES)]
    return [*rounded, *exact, *batches, *experts, *written, _add_splits(), _quantize(True), _quantize(False)]


def weight_types(form: Form | None) -> dict[str, str]:
    """Of the four tensors of a weight; float16 numbers where there is no form."""
    if form is None:
        return {"low": "*fp16", "high": "*fp16", "scales": "*fp16", "extra": "*fp16"}
    scales = {HALF: "*fp16", AFFINE: "*i32", GROUPS: "*fp32"}.get(form.kind, "*i32")
    extra = {SIGNED16: "*fp16", GROUPS: "*i8" if form.has_zeros else "*fp32"}.get(form.kind, scales)
    return {"low": "*i32", "high": "*i32", "scales": scales, "extra": extra}


def _case(
    name: str, kernel: Any, types: dict[str, str], constants: dict[str, Any], loose: tuple[str, ...] = (), **choices: Any
) -> Case:
    """Tensors, and numbers that are multiples of 16 in every model, are aligned; `loose` are not."""
    types = {argument: types.get(argument, "i32") for argument in kernel.arg_names if argument not in constants}
    aligned = tuple(argument for argument in types if argument not in loose)
    archs = (*_ARCHS, 89) if name in _ALSO_89 else _ARCHS
    is_often = name in _EVERY_COMMIT or not name.startswith(("linear.decode", "linear.batch"))
    return Case(name, kernel, types, constants, aligned, **{"archs": archs, "every_commit": is_often, **choices})


def _matvec(name: str, m: int, is_int8: bool, **changes: bool) -> Case:
    form = _FORMS[name]
    tile = matvec_tile(form, m, _N, _K, 1, named_table("h200"), is_int8)
    constants = form.constants() | {
        "M": m, "INT8": is_int8, "EXPERTS": False, "BATCHED": False, "HAS_BIAS": False, "STEP": tile.step, "SPLITS": tile.splits,
        "BLOCK_N": tile.block_n, "INTERPRET": False,
    } | changes  # fmt: skip
    types = weight_types(form) | {"x": "*i64", "x_scales": "*fp32", "x_sums": "*fp32", "experts": "*i32", "bias": "*fp32"}
    limit = _LIMITS.get(name) if is_int8 else _FLOAT_LIMITS.get(name) if m == 1 else None
    kind = "experts" if changes else "" if is_int8 else "float"
    return _case(
        ".".join(filter(None, ("linear.decode", name, kind, f"m{m}"))), matvec_kernel, types | {"out": "*fp32"}, constants,
        ("x_share", "x_between", "N"), num_warps=tile.num_warps, num_stages=1,
        weights_per_loop=32 * tile.step * tile.block_n // (32 * tile.num_warps),
        most_per_weight=limit and round(limit + MOST_PER_ROW * (m - 1), 2),
    )  # fmt: skip


def _matmul(name: str, m: int, table: str, **changes: bool) -> Case:
    form = _FORMS.get(name)
    tile = matmul_tile(m, _N, _K, 1, named_table(table))
    constants = (PLAIN if form is None else form.constants()) | {
        "SORTED": False, "BATCHED": False, "HAS_BIAS": False, "SPLITS": tile.splits, "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n, "UPCAST": False, "SUB_BLOCKS": tile.sub_blocks if form else max(1, tile.sub_blocks // 4),
    } | changes  # fmt: skip
    types = weight_types(form) | {"x": "*fp16", "order": "*i32", "experts": "*i32", "bias": "*fp16", "out": "*fp32"}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    name = f"linear.batch.{name}{'.experts' if changes else ''}.m{m}.{table}"
    loose = ("M", "N", "x_share", "between")
    return _case(name, matmul_kernel, types, constants, loose, archs=(_TABLES[table],), **options)


def _dequantize(name: str) -> Case:
    constants = _FORMS[name].constants() | {"BLOCK_N": 128, "SUB_BLOCKS": 8}
    types = weight_types(_FORMS[name]) | {"out": "*fp16"}
    return _case(f"linear.write.{name}", dequantize_kernel, types, constants, ("sub_blocks",))


def _add_splits() -> Case:
    types = {"parts": "*fp32", "experts": "*i32", "bias": "*fp16", "out": "*fp16"}
    constants = {"SPLITS": 8, "HAS_BIAS": True, "EXPERTS": False, "BLOCK": 1024}
    return _case("linear.add_splits", add_splits_kernel, types, constants)


def _quantize(is_rounded: bool) -> Case:
    types = {"x": "*fp16", "codes": "*i8" if is_rounded else "*fp32", "scales": "*fp32", "sums": "*fp32"}
    name = f"linear.activations.{'int8' if is_rounded else 'float'}"
    return _case(name, quantize_rows_kernel, types, {"BLOCKS": 32, "ROUND": is_rounded})
