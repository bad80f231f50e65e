#!/usr/bin/env python3
"""Write a GGUF file of the llama family, of mixtral or of deepseek, with random weights: to measure speed on.

    python scripts/make_random_model.py OUT.gguf --tokenizer SmolLM2-135M-Instruct.Q4_1.gguf
    python scripts/make_random_model.py OUT.gguf --tokenizer ANY.gguf --type Q8_0 --layers 4 --hidden 512
    python scripts/make_random_model.py OUT.gguf --tokenizer ANY.gguf --mixtral
    python scripts/make_random_model.py OUT.gguf --tokenizer ANY.gguf --deepseek

The default is a model of one billion parameters in llama.cpp's Q4_K_M mix, 669 MB; --mixtral is one of 1.1 billion in eight
experts, of which a token passes two: 29 % of the parameters; --deepseek is a DeepSeek V3 of a billion, see random_deepseek.py.
The vocabulary, and with it the number of embedding rows, is that of the GGUF file given as --tokenizer. Blocks hold random
codes under scales that give every matrix the gain of a freshly initialized one, so activations stay finite; the text is noise.
Memory needed is one tensor.
Same arguments, same bytes.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from random_deepseek import DeepSeekShape

from llmctl.errors import LlmctlError, UnsupportedError, UsageError
from llmctl.kernels.formats.codecs import dequantize_blocks, quantize
from llmctl.kernels.formats.layouts import LAYOUTS
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS, Format, format_by_name
from llmctl.quant.recipe import RECIPES, choose_types, is_matrix, model_facts
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.file_types import FILE_TYPES
from llmctl.runtime.checkpoint.gguf import GgufCheckpoint
from llmctl.runtime.checkpoint.gguf_writer import GgufWriter, Typed, ValueType

_PROBE_BLOCKS = 2048


@dataclass(frozen=True)
class Shape:
    """What a llama is made of. experts: matrices of the MLP in each layer, 0 for one MLP; a token passes top_k of them."""

    hidden: int = 2048
    layers: int = 16
    heads: int = 32
    kv_heads: int = 8
    intermediate: int = 8192
    context: int = 8192
    rope_theta: float = 5e5
    tied: bool = True
    experts: int = 0
    top_k: int = 2

    @property
    def head_dim(self) -> int:
        """Columns of a head."""
        return self.hidden // self.heads

    architecture = "llama"

    def check(self) -> None:
        """UsageError for heads that do not fit."""
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise UsageError(f"{self.heads} heads do not divide hidden {self.hidden}, or {self.kv_heads} kv heads not them")

    def metadata(self, rows: int) -> dict[str, Any]:
        """GGUF's keys of the architecture. rows: of the embedding."""
        whole = {
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.hidden,
            "feed_forward_length": self.intermediate,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "rope.dimension_count": self.head_dim,
            "vocab_size": rows,
        }
        if self.experts:
            whole |= {"expert_count": self.experts, "expert_used_count": self.top_k}
        real = {"rope.freq_base": self.rope_theta, "attention.layer_norm_rms_epsilon": 1e-5}
        return {
            **{f"llama.{key}": Typed(value, ValueType.U32) for key, value in whole.items()},
            **{f"llama.{key}": Typed(value, ValueType.F32) for key, value in real.items()},
        }

    def tensors(self, rows: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """GGUF names and torch-order shapes, in the file's order."""
        hidden, kv = self.hidden, self.kv_heads * self.head_dim
        yield "token_embd.weight", (rows, hidden)
        for i in range(self.layers):
            yield f"blk.{i}.attn_norm.weight", (hidden,)
            yield f"blk.{i}.attn_q.weight", (hidden, hidden)
            yield f"blk.{i}.attn_k.weight", (kv, hidden)
            yield f"blk.{i}.attn_v.weight", (kv, hidden)
            yield f"blk.{i}.attn_output.weight", (hidden, hidden)
            yield f"blk.{i}.ffn_norm.weight", (hidden,)
            yield from ((f"blk.{i}.ffn_{name}.weight", size) for name, size in self._mlp().items())
        yield "output_norm.weight", (hidden,)
        if not self.tied:
            yield "output.weight", (rows, hidden)

    def _mlp(self) -> dict[str, tuple[int, ...]]:
        row, column = (self.intermediate, self.hidden), (self.hidden, self.intermediate)
        sizes = {"gate": row, "up": row, "down": column}
        if not self.experts:
            return dict(sizes)
        stacks = {f"{name}_exps": (self.experts, *size) for name, size in sizes.items()}
        return {**stacks, "gate_inp": (self.experts, self.hidden)}


MIXTRAL = Shape(hidden=1024, layers=10, heads=16, kv_heads=4, intermediate=4096, rope_theta=1e6, tied=False, experts=8)


def make_random_model(path: Path, tokenizer: Path, shape: Shape | DeepSeekShape, type: str = "Q4_K_M", seed: int = 0) -> Path:
    """Write the file and return its path. type: Q4_K_M (llama.cpp's mix) or one format for all matrices.

    Errors: UsageError for a shape that cannot be, UnsupportedError for a type whose blocks cannot be made up.
    """
    if isinstance(shape, Shape):
        shape.check()
    _check_type(type)
    with open_checkpoint(tokenizer) as source:
        if not isinstance(source, GgufCheckpoint):
            raise UsageError(f"--tokenizer {tokenizer}: expected a GGUF file")
        vocabulary = {k: v for k, v in source.typed_metadata().items() if k.startswith("tokenizer.")}
        rows = len(source.metadata["tokenizer.ggml.tokens"])
        sizes, metadata = list(shape.tensors(rows)), _metadata(path.stem, shape, rows, type)
        types = _types(type, sizes, metadata)
        tensors = [(name, size, types[name]) for name, size in sizes]
        with GgufWriter(path, {**metadata, **vocabulary}) as writer:
            for name, size, form in tensors:
                writer.declare(name, form, size)
            for name, size, form in tensors:
                writer.write(name, random_tensor(form, size, np.random.default_rng([seed, zlib.crc32(name.encode())])))
    return path


def _metadata(name: str, shape: Shape | DeepSeekShape, rows: int, type: str) -> dict[str, Any]:
    file_type = next(number for number, known in FILE_TYPES.items() if known == type.upper())
    return {
        "general.architecture": shape.architecture,
        "general.name": name,
        "general.file_type": Typed(file_type, ValueType.U32),
        "general.quantization_version": Typed(2, ValueType.U32),
        **shape.metadata(rows),
    }


def _check_type(type: str) -> None:
    if type.upper() not in FILE_TYPES.values():
        raise UnsupportedError(f"--type {type}: GGUF has no such file type")
    matrices = FORMATS["Q4_K"] if type.upper() == "Q4_K_M" else format_by_name(type)
    if not matrices.is_plain and "d" not in (LAYOUTS[matrices.name].names or ()):
        raise UnsupportedError(f"--type {type}: random blocks need one scale a block, which {matrices.name} has not")


def _types(type: str, sizes: list[tuple[str, tuple[int, ...]]], metadata: dict[str, Any]) -> dict[str, Format]:
    """Q4_K_M as llama.cpp mixes it, else the one type for all matrices."""
    plain = {key: value.value if isinstance(value, Typed) else value for key, value in metadata.items()}
    if type.upper() == "Q4_K_M":
        choices = choose_types(sizes, RECIPES["Q4_K_M"], model_facts(plain, [name for name, _ in sizes]))
        return {name: choice.format for name, choice in choices.items()}
    return {name: format_by_name(type) if is_matrix(name, size) else FORMATS["F32"] for name, size in sizes}


def random_tensor(form: Format, size: tuple[int, ...], random: np.random.Generator) -> np.ndarray | QuantTensor:
    """A norm weight near one; a matrix of mean 0 and deviation 1 / √columns."""
    if len(size) == 1:
        return (1 + 0.1 * random.standard_normal(size, np.float32)).astype(np.float32)
    deviation = size[-1] ** -0.5
    if form.is_plain:
        return quantize(random.standard_normal(size, np.float32) * np.float32(deviation), form)
    records = _random_records(form, prod(size[:-1]) * form.row_bytes(size[-1]), random)
    scale, offset = _scales(form)
    spread = random.uniform(0.5, 1.5, len(records)) * deviation
    _set_scales(records, spread * scale, spread * offset)
    return QuantTensor(form, size, records.view(np.uint8).reshape(*size[:-1], -1))


def _random_records(form: Format, nbytes: int, random: np.random.Generator) -> np.ndarray:
    return np.frombuffer(bytearray(random.bytes(nbytes)), LAYOUTS[form.name])


def _set_scales(records: np.ndarray, scale: np.ndarray | float, offset: np.ndarray | float) -> None:
    records["d"] = scale
    for name in {"m", "dmin"} & set(records.dtype.names or ()):
        records[name] = offset


def _scales(form: Format) -> tuple[float, float]:
    """(scale, offset) that give random codes mean 0 and deviation 1: a block is scale · x + offset · y."""
    records = _random_records(form, _PROBE_BLOCKS * form.bytes_per_block, np.random.default_rng(0))
    parts = []
    for scale, offset in ((1.0, 0.0), (0.0, 1.0)):
        _set_scales(records, scale, offset)
        parts.append(dequantize_blocks(form, records.view(np.uint8)))
    x, y = parts
    offset = -float(x.mean() / y.mean()) if y.any() else 0.0
    deviation = float((x + offset * y).std())
    return 1 / deviation, offset / deviation


def main(arguments: list[str] | None = None) -> int:
    """Make one file from the command line and print its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="OUT.gguf")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FILE.gguf")
    parser.add_argument("--type", default="Q4_K_M")
    parser.add_argument("--seed", type=int, default=0)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--mixtral", action="store_true", help="the shape of a small Mixtral, where no number says otherwise")
    kinds.add_argument("--deepseek", action="store_true", help="that of a small DeepSeek V3")
    for name in ("hidden", "layers", "heads", "kv_heads", "intermediate", "context", "experts", "top_k"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--rope-theta", type=float)
    parser.add_argument("--untied", dest="tied", action="store_false", default=None, help="the head is a matrix of its own")
    options = vars(parser.parse_args(arguments))
    path, tokenizer, type, seed, mixtral, deepseek = (
        options.pop(name) for name in ("path", "tokenizer", "type", "seed", "mixtral", "deepseek")
    )
    stated = {name: value for name, value in options.items() if value is not None}
    shape = DeepSeekShape() if deepseek else MIXTRAL if mixtral else Shape()
    if unknown := sorted(set(stated) - {field.name for field in fields(shape)}):
        parser.error(f"--deepseek has no {', '.join(unknown)}")
    try:
        print(make_random_model(path, tokenizer, replace(shape, **stated), type, seed))
    except LlmctlError as error:
        print(f"make_random_model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
