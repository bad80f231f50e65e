"""What scripts/gpu_check.py runs of the kernels: correctness against float64, and speed beside predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from gpu_rows import Report, Row, failed
from gpu_timing import Calls, Ceilings, Timer
from guarded_memory import GuardedMemory

from llmctl.kernels.attention import BatchDescription, PageMap
from llmctl.kernels.attention._reference import attention_of_sequence
from llmctl.kernels.attention._triton import attention
from llmctl.kernels.attention._triton_batch import to_device
from llmctl.kernels.encode import Encoder
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.packed_int import PackedIntTensor
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS
from llmctl.kernels.linear._triton import TritonWeight, linear, prepare_weight
from llmctl.kernels.rms_norm._triton import rms_norm
from llmctl.kernels.store_kv._triton import store_kv
from llmctl.kernels.store_kv._triton_pages import TritonPages
from llmctl.kernels.triton_lib import launch

BLOCK_SIZE = 16
LAUNCH_US = 2.0
"""Predicted for a kernel in a graph, beside its memory or arithmetic."""
AIMS = {"matvec": 0.8, "prefill": 0.8, "decode": 0.8, "flash": 0.48}
"""Predicted shares of the ceilings: of reading for what is bound by it, of the matrix units for the others."""
_ALLOWED = {"int8": 3e-2, "float": 4e-3}
_SEED_ROWS = 16


@dataclass(frozen=True)
class Sizes:
    """How much is tried. linears: (N, K); tokens: rows of activations; contexts: of paged decode; prompts: of flash prefill."""

    linears: tuple[tuple[int, int], ...] = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
    checked: tuple[int, int] = (512, 1024)
    tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 64, 512, 2048)
    checked_tokens: tuple[int, ...] = (1, 3, 8, 20, 70)
    formats: tuple[str, ...] = ("Q4_K", "Q6_K", "Q8_0", "I4", "Q5_K", "F16")
    heads: tuple[int, int] = (32, 8)
    head_dims: tuple[int, ...] = (128, 64, 256)
    contexts: tuple[int, ...] = (32768, 8192)
    prompts: tuple[int, ...] = (16384, 4096)
    kv_types: tuple[str, ...] = ("f16", "q8_0", "fp8")
    rotated_bytes: int = 256 << 20
    decode_linears: tuple[tuple[int, int], ...] = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (128256, 4096))


TINY = Sizes(
    linears=((48, 256),), checked=(48, 256), tokens=(1, 16), checked_tokens=(1, 20), formats=("Q4_K",), heads=(2, 1),
    head_dims=(32,), contexts=(20,), prompts=(20,), kv_types=("q8_0",), rotated_bytes=1 << 10, decode_linears=(),
)  # fmt: skip


Run = Callable[[GuardedMemory], tuple[torch.Tensor, torch.Tensor]]
"""Gives what kernels made, and what float64 says."""


@dataclass
class Bench:
    """What the checks and measurements share."""

    report: Report
    timer: Timer
    device: str
    sizes: Sizes
    ceilings: Ceilings | None = None

    def check(self, kernel: str, shape: str, allowed: float, run: Run) -> None:
        """Memory of kernels is poisoned before, and its bands are looked at after."""
        memory, allocate = GuardedMemory(), launch._allocate
        launch._allocate = memory.empty
        try:
            found, wanted = run(memory)
            error = relative(found, wanted)
            memory.check()
            remark = "" if error <= allowed else f"FAILED: at most {allowed:.0e} allowed"
            self.report.add(Row(kernel, shape, error=error, remark=remark))
        except Exception as failure:  # a kernel that does not even run is a row, and the others are still wanted
            self.report.add(Row(kernel, shape, remark=failed(failure)))
        finally:
            launch._allocate = allocate

    def time(self, row: Row, calls: Calls, nbytes: float, flops: float, torch_us: float | None) -> None:
        """Add the row with what was measured. nbytes, flops: of a call."""
        if self.report.is_late:
            self.report.add(replace(row, remark="left out: the time is used up"))
            return
        try:
            us = self.timer.microseconds(calls)
        except Exception as failure:
            self.report.add(replace(row, remark=failed(failure)))
            return
        assert self.ceilings is not None
        rates = {"gigabytes_per_s": 1e-3 * nbytes / us, "of_ceiling": 1e-3 * nbytes / us / self.ceilings.read_gb_per_s}
        if flops:
            rates = {"teraflops": 1e-6 * flops / us, "of_ceiling": 1e-6 * flops / us / self.ceilings.teraflops}
        self.report.add(replace(row, microseconds=us, of_torch=torch_us and torch_us / us, **rates))


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the error over the norm; NaN counts as infinity."""
    error = float((found.double() - wanted.double()).norm() / wanted.double().norm())
    return float("inf") if np.isnan(error) else error


def make_weight(name: str, n: int, k: int) -> np.ndarray | QuantTensor | PackedIntTensor:
    """Weights of a format: some rows encoded, and repeated."""
    seed = np.random.default_rng(1).standard_normal((min(n, _SEED_ROWS), k)).astype(np.float32) * np.float32(0.02)
    repeats = -(-n // len(seed))
    if name == "F16":
        return np.tile(seed.astype(np.float16), (repeats, 1))[:n]
    if name == "I4":
        codes = np.random.default_rng(2).integers(0, 256, (n, k // 2), np.uint8)
        scales = np.full((n, k // 128), 3e-3, np.float32)
        return PackedIntTensor(4, 128, (n, k), codes, scales, np.full((n, k // 128), 8, np.uint8))
    blocks = Encoder(1).encode(seed, FORMATS[name]).blocks
    return QuantTensor(FORMATS[name], (n, k), np.tile(blocks, (repeats, 1))[:n])


def check_all(bench: Bench) -> None:
    """Every kernel family against float64."""
    n, k = bench.sizes.checked
    for number, name in enumerate(bench.sizes.formats):
        for activations in ("float", "int8")[number > 0 :]:  # exact activations have the same code for all formats
            weight = make_weight(name, n, k)
            prepared = prepare_weight(weight, bench.device, torch.float16, activations)
            exact = torch.from_numpy(dequantize(weight)).double().to(bench.device)
            for m in bench.sizes.checked_tokens:
                _check_linear(bench, f"linear.{name}.{activations}", prepared, exact, m)
    bench.check("rms_norm", f"3x{k}", 2e-3, lambda memory: _normed(bench.device, memory, k))
    for head_dim in bench.sizes.head_dims:
        for kv_type in bench.sizes.kv_types:
            for tokens in (1, 5, bench.sizes.contexts[-1] // 2):
                _check_attention(bench, head_dim, kv_type, tokens)


def _check_linear(bench: Bench, kernel: str, prepared: TritonWeight, exact: torch.Tensor, m: int) -> None:
    x = torch.randn(m, prepared.shape[1], device=bench.device, dtype=torch.float16)

    def run(memory: GuardedMemory) -> tuple[torch.Tensor, torch.Tensor]:
        return linear(memory.guarded(x), prepared), x.double() @ exact.T

    bench.check(kernel, f"M={m} {prepared.shape[0]}x{prepared.shape[1]}", _ALLOWED[prepared.activations], run)


def _normed(device: str, memory: GuardedMemory, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = torch.randn(3, size, device=device, dtype=torch.float16), torch.randn(size, device=device)
    wide = x.double()
    wanted = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    return rms_norm(memory.guarded(x), memory.guarded(weight), 1e-5), wanted


def filled_pages(bench: Bench, head_dim: int, kv_type: str, context: int, sequences: int = 1) -> TritonPages:
    """Pages of one layer with random keys and values for every token of all sequences, one after the other."""
    blocks = -(-context // BLOCK_SIZE) * sequences
    pages = TritonPages.make(blocks, BLOCK_SIZE, bench.sizes.heads[1], head_dim, kv_type, bench.device)
    for begin in range(0, blocks * BLOCK_SIZE, 4096):
        slots = torch.arange(begin, min(begin + 4096, blocks * BLOCK_SIZE), device=bench.device)
        rows = torch.randn(2, len(slots), bench.sizes.heads[1], head_dim, device=bench.device, dtype=torch.float16)
        store_kv(rows[0], rows[1], pages, slots)
    return pages


def batch_of(bench: Bench, context: int, tokens: int, sequences: int = 1) -> BatchDescription:
    """Sequences of `context` tokens, whose last `tokens` are computed."""
    pages = -(-context // BLOCK_SIZE)
    tables = [np.arange(i * pages, (i + 1) * pages) for i in range(sequences)]
    positions = np.tile(np.arange(context - tokens, context), sequences)
    slots = np.concatenate([table[0] * BLOCK_SIZE + np.arange(context - tokens, context) for table in tables])
    page_map = PageMap(slots, [context] * sequences, tables)
    starts = [tokens * i for i in range(sequences + 1)]
    batch = BatchDescription(positions * 0, positions, [], starts, [page_map], BLOCK_SIZE)
    return to_device(batch, lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(bench.device))


def _check_attention(bench: Bench, head_dim: int, kv_type: str, tokens: int) -> None:
    context, heads = bench.sizes.contexts[-1] + 3, bench.sizes.heads[0]
    pages, batch = filled_pages(bench, head_dim, kv_type, context), batch_of(bench, context, tokens)
    queries = torch.randn(tokens, heads, head_dim, device=bench.device, dtype=torch.float16)
    slots = torch.arange(context, device=bench.device)

    def run(memory: GuardedMemory) -> tuple[torch.Tensor, torch.Tensor]:
        found = attention(memory.guarded(queries), pages, batch, head_dim**-0.5)
        keys, values = pages.keys.read(slots).double(), pages.values.read(slots).double()
        return found, attention_of_sequence(queries.double(), keys, values, head_dim**-0.5)

    bench.check(f"attention.{kv_type}", f"D={head_dim} tokens={tokens} context={context}", 4e-3, run)


def compile_part(sizes: Sizes, device: str, part: int, parts: int) -> int:
    """Run every product and attention that will be measured once, or each `parts`-th of them, so that what they compile is in
    triton's cache on the disk. For processes beside each other. Gives how many ran."""
    bench = Bench(None, None, device, sizes)  # type: ignore[arg-type]  # nothing is measured
    linears = [(name, shape, sizes.tokens, torch.float16) for name in sizes.formats for shape in sizes.linears]
    linears += [(name, sizes.checked, sizes.checked_tokens, torch.float16) for name in sizes.formats]
    linears += [(name, shape, (1,), torch.bfloat16) for name in ("Q4_K", "Q6_K") for shape in sizes.decode_linears]
    attentions = [(head_dim, kv_type) for head_dim in sizes.head_dims for kv_type in sizes.kv_types]
    jobs = [*((_run_linears, job) for job in linears), *((_run_attentions, job) for job in attentions)][part::parts]
    for run, job in jobs:
        run(bench, *job)
    return len(jobs)


def _run_linears(bench: Bench, name: str, shape: tuple[int, int], tokens: tuple[int, ...], dtype: torch.dtype) -> None:
    prepared = prepare_weight(make_weight(name, *shape), bench.device, dtype)
    for m in tokens:
        linear(torch.zeros(m, shape[1], device=bench.device, dtype=dtype), prepared)


def _run_attentions(bench: Bench, head_dim: int, kv_type: str) -> None:
    context = bench.sizes.contexts[-1]
    pages = filled_pages(bench, head_dim, kv_type, context)
    for tokens in (1, context):
        queries = torch.zeros(tokens, bench.sizes.heads[0], head_dim, device=bench.device, dtype=torch.float16)
        attention(queries, pages, batch_of(bench, context, tokens), head_dim**-0.5)


def time_all(bench: Bench) -> None:
    """What matters most first: the time may run out."""
    for tokens in (bench.sizes.tokens[:1], bench.sizes.tokens[1:]):
        for name in bench.sizes.formats:
            for n, k in bench.sizes.linears:
                _time_linears(bench, name, n, k, tokens)
    for head_dim in bench.sizes.head_dims:
        for kv_type in bench.sizes.kv_types:
            for context in bench.sizes.contexts:
                _time_decode(bench, head_dim, kv_type, context)
        for prompt in bench.sizes.prompts:
            _time_prefill(bench, head_dim, prompt)


def _time_linears(bench: Bench, name: str, n: int, k: int, tokens: tuple[int, ...]) -> None:
    if bench.report.is_late:
        bench.report.add(Row(f"linear.{name}", f"{n}x{k}", remark="left out: the time is used up"))
        return
    first = prepare_weight(make_weight(name, n, k), bench.device, torch.float16)
    copies = [first, *(copied(first) for _ in range(_more(bench, first.nbytes)))]
    plain = torch.randn(n, k, device=bench.device, dtype=torch.float16)
    plains = [plain, *(plain.clone() for _ in range(_more(bench, plain.nbytes)))]
    for m in tokens:
        _time_linear(bench, name, copies, plains, m)


def _more(bench: Bench, nbytes: int) -> int:
    """Copies, beside the first, of buffers that take turns."""
    return min(64, bench.sizes.rotated_bytes // nbytes)


def _time_linear(bench: Bench, name: str, copies: list[TritonWeight], plains: list[torch.Tensor], m: int) -> None:
    (n, k), is_few = copies[0].shape, m <= 64
    x = torch.randn(m, k, device=bench.device, dtype=torch.float16)
    torch_us = bench.timer.microseconds([lambda w=w: torch.nn.functional.linear(x, w) for w in plains])
    flops, nbytes = 2.0 * m * n * k, copies[0].nbytes + 2.0 * m * (n + k)
    ceilings = bench.ceilings
    bound = 1e-3 * nbytes / ceilings.read_gb_per_s / AIMS["matvec"]
    bound = bound if is_few else 1e-6 * flops / ceilings.teraflops / AIMS["prefill"]
    row = Row(f"linear.{name}", f"{n}x{k} M={m}", predicted_us=bound + LAUNCH_US)
    bench.time(row, [lambda w=w: linear(x, w) for w in copies], nbytes, 0.0 if is_few else flops, torch_us)


def copied(weight: TritonWeight) -> TritonWeight:
    """The same in other memory."""
    planes = weight.planes
    parts = (part if part is None else part.clone() for part in (planes.low, planes.high, planes.scales, planes.extra))
    return replace(weight, planes=type(planes)(*parts))


def _time_decode(bench: Bench, head_dim: int, kv_type: str, context: int) -> None:
    heads, kv_heads = bench.sizes.heads
    batch, pages = batch_of(bench, context, 1), [filled_pages(bench, head_dim, kv_type, context)]
    queries = torch.randn(1, heads, head_dim, device=bench.device, dtype=torch.float16)
    nbytes = sum(part.numel() for part in pages[0].parts)
    pages += [filled_pages(bench, head_dim, kv_type, context) for _ in range(_more(bench, nbytes))]
    predicted = 1e-3 * nbytes / bench.ceilings.read_gb_per_s / AIMS["decode"] + 2 * LAUNCH_US
    row = Row(f"attention.decode.{kv_type}", f"D={head_dim} heads={heads}/{kv_heads} context={context}", predicted_us=predicted)
    bench.time(row, [lambda own=own: attention(queries, own, batch, head_dim**-0.5) for own in pages], nbytes, 0.0, None)


def _time_prefill(bench: Bench, head_dim: int, prompt: int) -> None:
    heads, kv_heads = bench.sizes.heads
    pages, batch = filled_pages(bench, head_dim, "f16", prompt), batch_of(bench, prompt, prompt)
    queries = torch.randn(prompt, heads, head_dim, device=bench.device, dtype=torch.float16)
    flops = 2.0 * heads * head_dim * prompt**2  # two products, half of each masked
    sides = (torch.randn(1, count, prompt, head_dim) for count in (heads, kv_heads, kv_heads))
    q, k, v = (side.to(bench.device, torch.float16) for side in sides)
    torch_us = bench.timer.microseconds(
        [lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)]
    )
    predicted = 1e-6 * flops / bench.ceilings.teraflops / AIMS["flash"] + LAUNCH_US
    row = Row("attention.prefill", f"D={head_dim} heads={heads}/{kv_heads} tokens={prompt}", predicted_us=predicted)
    bench.time(row, [lambda: attention(queries, pages, batch, head_dim**-0.5)], 0.0, flops, torch_us)
