"""Whether a model file is what it claims to be: its structure, its numbers, its keys, its tokenizer, its hashes.

Whatever can be found is found in one run; only a file that cannot be opened ends it at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from llmctl.errors import FormatError, LlmctlError, ModelNotFoundError, UnsupportedError
from llmctl.quant import manifest as manifests
from llmctl.quant.findings import Finding
from llmctl.quant.group_index import check_group_indices
from llmctl.quant.huggingface import needed_names
from llmctl.quant.tensor_values import check_values
from llmctl.quant.workers import Progress, Workers
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.checkpoint import Checkpoint
from llmctl.runtime.checkpoint.gguf_types import WRITTEN_NAME_BYTES, padding
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.registry import chosen_family
from llmctl.runtime.models.weights import ModelWeights
from llmctl.runtime.tokenizer import Tokenizer, load_tokenizer

_EMBEDDINGS = ("token_embd.weight", "model.embed_tokens.weight", "language_model.model.embed_tokens.weight")
_NO_TOKEN = 0xFFFFFFFF  # how some writers say that there is none
_LAYER = re.compile(r"blk\.(\d+)\.")
# Below the architecture; what every language model's file states.
_CORE_KEYS = ("block_count", "context_length", "embedding_length")


@dataclass
class Check:
    """One part of the verification. skipped: why it was not done, None if it was."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    skipped: str | None = None

    @property
    def status(self) -> str:
        """skipped, error, warning or ok."""
        if self.skipped is not None:
            return "skipped"
        return next((level for level in ("error", "warning") if any(f.level == level for f in self.findings)), "ok")


@dataclass
class Report:
    """What was looked at, and what was found. manifest: the one that was compared with, None without one."""

    path: Path
    kind: str | None = None
    files: list[Path] = field(default_factory=list)
    num_tensors: int = 0
    tensor_bytes: int = 0
    manifest: Path | None = None
    checks: list[Check] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        """Of all checks, in their order."""
        return [finding for check in self.checks for finding in check.findings]

    @property
    def ok(self) -> bool:
        """Whether there is no error; warnings are allowed."""
        return not any(finding.level == "error" for finding in self.findings)


def verify(
    path: Path,
    *,
    manifest: Path | None = None,
    use_manifest: bool = True,
    threads: int = 1,
    progress: Progress | None = None,
    family: str | None = None,
) -> Report:
    """Check the model at `path`, a file or folder.

    manifest: to compare with; by default the one beside the weights, if there is one. use_manifest: False compares with none.
    threads, progress: as `Workers`. family: it is taken for one of, None for what it says it is.
    Errors: ModelNotFoundError, and FormatError for a manifest that is none; faults of the model itself are findings.
    """
    report = Report(path)
    stated = manifests.read_manifest(manifest) if manifest is not None else None
    structure = Check("structure")
    report.checks.append(structure)
    try:
        checkpoint = open_checkpoint(path)
    except ModelNotFoundError:
        raise
    except LlmctlError as error:
        structure.findings.append(Finding("error", "structure", _without_path(error, path)))
        return report
    with checkpoint:
        _describe(report, checkpoint)
        structure.findings += _oddities(checkpoint)
        if use_manifest and stated is None and (beside := manifests.default_path(checkpoint)).is_file():
            stated = manifests.read_manifest(beside)
        report.manifest = stated.path if stated is not None else None
        _run_checks(report, checkpoint, stated, chosen_family(family), Workers(threads, progress, _work(checkpoint, stated)))
    return report


def _describe(report: Report, checkpoint: Checkpoint) -> None:
    report.kind, report.files = checkpoint.kind, checkpoint.files
    report.num_tensors, report.tensor_bytes = len(checkpoint.names()), checkpoint.total_bytes


def _oddities(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What a GGUF file may be and none should: safetensors allows neither."""
    if checkpoint.kind != "gguf":
        return
    for file in checkpoint.files:
        entries = [entry for entry in checkpoint.entries() if entry.file == file]
        end = max((entry.offset + entry.nbytes for entry in entries), default=None)
        if end is not None and (rest := file.stat().st_size - end - padding(end, checkpoint.alignment)) > 0:
            yield Finding("warning", "structure", f"{quoted(file.name)}: {rest} bytes behind the last tensor belong to none")
    for name in checkpoint.names():
        if len(name.encode()) > WRITTEN_NAME_BYTES:
            message = f"its name is longer than the {WRITTEN_NAME_BYTES} bytes that llama.cpp reads"
            yield Finding("warning", "structure", message, name)


def _work(checkpoint: Checkpoint, stated: manifests.Manifest | None) -> int:
    """Bytes that are looked at."""
    return checkpoint.total_bytes + (manifests.hashed_bytes(checkpoint, tensors=False) if stated else 0)


def _run_checks(
    report: Report, checkpoint: Checkpoint, stated: manifests.Manifest | None, family: Family | None, workers: Workers
) -> None:
    report.checks.append(_values(checkpoint, workers))
    report.checks.append(Check("groups", list(check_group_indices(checkpoint))))
    weights, model = _model(checkpoint, family)
    report.checks.append(model)
    report.checks.append(_tokenizer(checkpoint, weights))
    if stated is None:
        report.checks.append(Check(manifests.CHECK, skipped="there is none; --write-manifest makes one"))
    else:
        report.checks.append(Check(manifests.CHECK, list(manifests.check_manifest(checkpoint, stated, workers))))


def _values(checkpoint: Checkpoint, workers: Workers) -> Check:
    found = workers.in_order(lambda entry: check_values(checkpoint, entry, workers), checkpoint.entries())
    return Check("values", [finding for findings in found for finding in findings])


def _model(checkpoint: Checkpoint, family: Family | None) -> tuple[ModelWeights | None, Check]:
    """Keys and tensors against what the architecture asks for: every one there, of the right shape, none too many."""
    check = Check("model")
    if reason := _no_model(checkpoint):
        check.skipped = reason
        return None, check
    try:
        weights = ModelWeights(checkpoint, family)
        names = needed_names(weights)
        others = weights.unneeded(names)
    except UnsupportedError as error:
        check.findings += _unknown_model(checkpoint, _without_path(error, checkpoint.path))
        return None, check
    except FormatError as error:
        check.findings.append(Finding("error", "model", _without_path(error, checkpoint.path)))
        return None, check
    check.findings += [Finding("warning", "model", "no part of the model", name) for name in others]
    return weights, check


def _no_model(checkpoint: Checkpoint) -> str | None:
    """Why there is no language model in these files to be checked."""
    if checkpoint.kind == "safetensors":
        return None if checkpoint.config else "there is no config.json beside the weights"
    kind = checkpoint.metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        return f"the file holds no model, but {quoted(kind)}"
    return None if checkpoint.names() else "the file holds no tensors"


def _unknown_model(checkpoint: Checkpoint, reason: str) -> Iterator[Finding]:
    """Of an architecture that cannot be run here only what all have in common can be checked."""
    yield Finding("warning", "model", f"not checked against its architecture: {reason}")
    arch = checkpoint.metadata.get("general.architecture") if checkpoint.kind == "gguf" else None
    if not isinstance(arch, str):
        return
    missing = [f"{arch}.{key}" for key in _CORE_KEYS if f"{arch}.{key}" not in checkpoint.metadata]
    yield from (Finding("error", "model", f"metadata key {quoted(key)} is missing") for key in missing)
    layers = {int(found[1]) for name in checkpoint.names() if (found := _LAYER.match(name))}
    stated = checkpoint.metadata.get(f"{arch}.block_count")
    if isinstance(stated, int) and layers and layers != set(range(stated)):
        yield Finding("error", "model", f"{arch}.block_count is {stated}, but there are tensors of {len(layers)} layers")


def _tokenizer(checkpoint: Checkpoint, weights: ModelWeights | None) -> Check:
    """That it can be read, and that the embedding has a row for every token."""
    check = Check("tokenizer")
    rows = _embedding_rows(checkpoint, weights)
    if checkpoint.kind == "gguf" and "tokenizer.ggml.model" not in checkpoint.metadata:
        check.skipped = "the file has none"
        return check
    try:
        tokenizer = load_tokenizer(checkpoint)
    except ModelNotFoundError as error:
        check.skipped = _without_path(error, checkpoint.path)
        return check
    except LlmctlError as error:
        level = "warning" if isinstance(error, UnsupportedError) else "error"
        check.findings.append(Finding(level, "tokenizer", _without_path(error, checkpoint.path)))
        return check
    if rows is not None:
        check.findings += _row_findings(checkpoint, tokenizer, rows)
    if checkpoint.kind == "gguf":
        check.findings += _special_findings(checkpoint, tokenizer.vocab_size)
    return check


def _special_findings(checkpoint: Checkpoint, count: int) -> Iterator[Finding]:
    """The ids of BOS, EOS and the like must be tokens: we ignore what is none, others index with it."""
    for key, value in checkpoint.metadata.items():
        if not key.startswith("tokenizer.ggml.") or not key.endswith("_token_id"):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not (0 <= value < count or value == _NO_TOKEN):
            yield Finding("error", "tokenizer", f"{key} is {quoted(value)}, which is none of the {count} tokens")


def _row_findings(checkpoint: Checkpoint, tokenizer: Tokenizer, rows: int) -> Iterator[Finding]:
    """Tokens and rows should be as many. Tokens added for what the text model cannot see (pictures) do no harm."""
    count = tokenizer.vocab_size
    if count > rows:
        added = all(tokenizer.is_added(token) for token in range(rows, count))
        first = f"{quoted(tokenizer.token_text(rows))} (id {rows})"
        message = f"{count} tokens, but {rows} rows of embedding; the first surplus token is {first}"
        yield Finding("warning" if added else "error", "tokenizer", message)
    elif count < rows and checkpoint.kind == "gguf":
        message = f"{count} tokens, but {rows} rows of embedding: llama.cpp asks for as many; unused tokens should fill them"
        yield Finding("warning", "tokenizer", message)


def _embedding_rows(checkpoint: Checkpoint, weights: ModelWeights | None) -> int | None:
    if weights is not None:
        return weights.config.vocab_size
    shapes = [checkpoint.entry(name).shape for name in _EMBEDDINGS if name in checkpoint]
    return shapes[0][0] if shapes and shapes[0] else None


def _without_path(error: Exception, path: Path) -> str:
    return str(error).removeprefix(f"{path}: ")


