#!/usr/bin/env python3
"""Bring the two real, small models that tests and benchmarks use into one folder.

    python scripts/get_models.py OUT            # the GGUF files, through llmctl's own model store
    python scripts/get_models.py OUT --fp16     # also half-precision Hugging Face folders (needs the `test` extra)

OUT/SmolLM2-135M-Instruct.Q4_1.gguf   llama family, 9 heads / 3 kv heads, byte-level BPE, ChatML template (Apache-2.0)
OUT/gemma-3-270m-Q4_K_M.gguf          gemma3 family, 4 heads / 1 kv head, sliding window, SentencePiece (Gemma terms)
OUT/smollm2-135m-fp16/ OUT/gemma3-270m-fp16/    the same weights, dequantized by transformers to float16 safetensors

Everything lands by rename under a lock, so it may be run twice, or by two processes at once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

# short name of the store → name of the half-precision folder
FP16_FOLDERS = {"smollm2": "smollm2-135m-fp16", "gemma3-270m": "gemma3-270m-fp16"}


def gguf_name(model: str) -> str:
    """The model's file name, from the store's own table."""
    from llmctl.runtime.store import catalog

    return catalog()[model].file


def ensure_gguf(out: Path, model: str) -> Path:
    """The model's GGUF file inside `out`, pulled (and verified) by the store if it is not there yet.

    model: a key of FP16_FOLDERS. Raises what the store raises (DownloadError, OutputError).
    """
    target = out / gguf_name(model)
    with locked(out, target.name):
        if not target.exists():
            from llmctl.runtime.store import pull_model

            _link_or_copy(pull_model(model).path, target)
    return target


def ensure_fp16(out: Path, model: str) -> Path:
    """The model's half-precision Hugging Face folder inside `out`, made from its GGUF if it is not there yet."""
    gguf_path = ensure_gguf(out, model)
    target = out / FP16_FOLDERS[model]
    with locked(out, target.name):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=out, prefix=f".{target.name}-") as scratch:
                folder = Path(scratch) / target.name
                unfold(gguf_path, folder)
                folder.rename(target)
    return target


@contextmanager
def locked(out: Path, name: str) -> Iterator[None]:
    """Hold the lock of one result, so that a second process waits for the first instead of repeating its work."""
    out.mkdir(parents=True, exist_ok=True)
    with FileLock(out / f".{name}.lock"):
        yield


def _link_or_copy(source: Path, target: Path) -> None:
    """Give `source` a second name; copy where the two folders are on different file systems."""
    part = target.with_name(f".{target.name}.part")
    part.unlink(missing_ok=True)
    try:
        os.link(source, part)
    except OSError:
        shutil.copyfile(source, part)
    part.replace(target)


def unfold(gguf_path: Path, folder: Path) -> None:
    """Write the GGUF's weights as float16 safetensors, with config and tokenizer, as transformers reads them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": gguf_path.parent, "gguf_file": gguf_path.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float16, quantization_config=GgufConfig(dequantize=True))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    if model.config.model_type == "gemma3_text":
        (folder / "tokenizer.model").write_bytes(sentencepiece_model(gguf_path))


def sentencepiece_model(gguf_path: Path) -> bytes:
    """The tokenizer.model a Gemma folder ships with, rebuilt from the GGUF's pieces, scores and types."""
    import gguf
    from sentencepiece import sentencepiece_model_pb2

    fields = gguf.GGUFReader(gguf_path).fields
    columns = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "scores", "token_type"))
    model = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(*columns, strict=True):
        # A GGUF keeps user-defined pieces (type 4) with plain spaces where SentencePiece wants its own space mark.
        model.pieces.add(piece=token.replace(" ", "\u2581") if kind == 4 else token, score=score, type=kind)
    _describe_gemma(model)
    return model.SerializeToString()


def _describe_gemma(model) -> None:
    """Set the trainer and normalizer fields as Gemma's own file has them: BPE, byte fallback, no dummy prefix."""
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.vocab_size, trainer.byte_fallback = 2, len(model.pieces), True
    trainer.pad_id, trainer.eos_id, trainer.bos_id, trainer.unk_id = 0, 1, 2, 3
    trainer.pad_piece, trainer.eos_piece, trainer.bos_piece, trainer.unk_piece = "<pad>", "<eos>", "<bos>", "<unk>"
    normalizer.name, normalizer.escape_whitespaces = "identity", True
    normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces = False, False


def main(arguments: list[str] | None = None) -> int:
    """Make what the command line asks for and print each path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to fill; made if missing")
    parser.add_argument("--fp16", action="store_true", help="also make the half-precision Hugging Face folders")
    options = parser.parse_args(arguments)
    for model in FP16_FOLDERS:
        print(ensure_gguf(options.out, model))
        if options.fp16:
            print(ensure_fp16(options.out, model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
