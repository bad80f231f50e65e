"""From a path to a model that can run: open, recognise, check memory, prepare weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmctl.errors import FormatError, LlmctlError, ModelNotFoundError, OutOfMemoryError, UsageError
from llmctl.kernels.backend import Compute, choose_compute, fit_head_dim, make_ops, make_split_ops
from llmctl.kernels.formats.spec import Format
from llmctl.kernels.ops import Ops
from llmctl.kernels.split import SplitOps
from llmctl.runtime.cache.memory import Demand, LayerShape, bytes_per_token, fitting_context, plan_cache
from llmctl.runtime.cache.policy import FULL, KvPolicy
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.checkpoint import Checkpoint
from llmctl.runtime.checkpoint.files import read_json_object
from llmctl.runtime.checkpoint.gguf import GgufCheckpoint
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.gpu_placement import USUAL_GPU, DeviceMemory, GpuChoice, place
from llmctl.runtime.machine import default_threads, memory
from llmctl.runtime.models.config import ModelConfig
from llmctl.runtime.models.decoder import Decoder
from llmctl.runtime.models.hf_config import token_ids
from llmctl.runtime.models.registry import chosen_family, config_taken_for
from llmctl.runtime.models.requantized import RequantizedWeights
from llmctl.runtime.models.split_decoder import SplitDecoder
from llmctl.runtime.models.weights import ModelWeights
from llmctl.runtime.tokenizer import Tokenizer, load_tokenizer

_log = logging.getLogger(__name__)

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_PACKED_SHARE = 1.15  # bytes of the native backend's prepared weights for a byte of the formats it reads, at most
_CACHE_SHARE = 0.5  # of the memory left after the weights: the rest is for activations and everything else


@dataclass
class LoadedModel:
    """A model ready for the engine.

    context_length: tokens a sequence may have. max_cache_bytes: of the cache, None where memory sets no limit. eos_token_ids:
    the union of every source. num_tokens: ids the sampler may draw (rows beyond the tokenizer's vocabulary are padding).
    tokenizer is None where the checkpoint has none. kv_policy: which tokens caches keep; a model with another one may share
    everything else (`dataclasses.replace`).
    """

    config: ModelConfig
    decoder: Decoder
    ops: Ops | SplitOps
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    kv_type: str
    activations: str | None
    context_length: int
    max_cache_bytes: int | None
    eos_token_ids: frozenset[int]
    num_tokens: int
    kv_policy: KvPolicy = FULL

    @property
    def device_layers(self) -> int:
        """Layers that the backend has which makes the logits: all but those of the host, where there are two."""
        return self.config.num_layers - (self.ops.num_host if isinstance(self.ops, SplitOps) else 0)

    def kv_layers(self, context: int | None = None) -> tuple[LayerShape, ...]:
        """What each layer keeps under the policy. context: that of the engine, None for the model's."""
        return self.kv_policy.shapes(self.config.kv_layers(), context or self.context_length)


@dataclass
class OpenedModel:
    """A checkpoint that was recognised and checked, its weights still unread and no backend imported.

    Whatever can be refused (a prompt too long, a missing template) is refused at this point, before the slow part. Fields as
    in LoadedModel.
    """

    weights: ModelWeights
    tokenizer: Tokenizer | None
    compute: Compute
    context_length: int
    max_cache_bytes: int | None
    kv_policy: KvPolicy = FULL
    gpu: GpuChoice = USUAL_GPU

    @property
    def config(self) -> ModelConfig:
        """The model's shapes and choices."""
        return self.weights.config

    @property
    def checkpoint(self) -> Checkpoint:
        """The files."""
        return self.weights.checkpoint

    @property
    def num_tokens(self) -> int:
        """Ids that prompts may hold and the sampler may draw."""
        rows = self.config.vocab_size
        return min(rows, self.tokenizer.num_used_tokens) if self.tokenizer else rows

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer: the union of every source."""
        return _end_tokens(self.weights, self.tokenizer)

    def load(
        self,
        *,
        threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        formats: Mapping[str, Format] | None = None,
    ) -> LoadedModel:
        """Prepare the weights for the backend. threads: None for as many as `default_threads` says. progress: called with
        (done, total) layers. formats: round these matrices, by Hugging Face name, to other formats first."""
        threads = default_threads() if threads is None else threads
        weights = self.weights if formats is None else RequantizedWeights(self.weights, formats, threads)
        if self.compute.gpu_layers is not None:
            ops: Any = make_split_ops(self.compute, threads, self.config.num_layers)
            decoder: Decoder = SplitDecoder(ops, weights, progress)
        else:
            ops = make_ops(self.compute, threads)
            decoder = Decoder(ops, weights, progress)
        _name_unneeded(self.weights)
        _name_unpacked(self.weights, self.compute)
        self.checkpoint.release_all()
        most = self.max_cache_bytes
        if (left := _left_for_cache(self.compute, self.gpu)) is not None and self.compute.gpu_layers is None:
            most = left  # what the weights really took is known now
        return LoadedModel(
            config=self.config,
            decoder=decoder,
            ops=ops,
            checkpoint=self.checkpoint,
            tokenizer=self.tokenizer,
            kv_type=self.compute.kv_type,
            activations=self.compute.activations,
            context_length=self.context_length,
            max_cache_bytes=most,
            eos_token_ids=self.eos_token_ids,
            num_tokens=self.num_tokens,
            kv_policy=self.kv_policy,
        )


def open_model(
    path: Path,
    *,
    backend: str = "reference",
    device: str = "cpu",
    dtype: str | None = None,
    kv_type: str | None = None,
    activations: str | None = None,
    ctx_size: int | None = None,
    family: str | None = None,
    kv_policy: KvPolicy = FULL,
    gpu: GpuChoice = USUAL_GPU,
) -> OpenedModel:
    """Open a checkpoint (GGUF file, Hugging Face folder) for one backend, or for two where a GPU does not hold it.

    gpu: how much of it goes there. backend … activations: as `choose_compute`. ctx_size: tokens of context, None for what the
    model was trained with as far as memory allows. family: name of the family it is taken for one of, None for the one it says
    it is. kv_policy: which tokens caches keep. Raises FormatError, UnsupportedError, UsageError and OutOfMemoryError.
    """
    choices = (backend, device, dtype, kv_type, activations)
    compute = choose_compute(*choices)
    weights = ModelWeights(open_checkpoint(path), chosen_family(family))
    compute = fit_head_dim(compute, max(layer.head_dim for layer in weights.config.kv_layers()), *choices)
    if compute.fallback:
        _log.warning("the slow reference backend computes, since %s", compute.fallback)
    tokenizer = _tokenizer(weights)
    compute, most = _placed(weights, compute, kv_policy, gpu, ctx_size)
    context = _context(weights.config, compute.kv_type, ctx_size, most)
    kv_policy.shapes(weights.config.kv_layers(), context)  # refused here, not after the weights are read
    return OpenedModel(weights, tokenizer, compute, context, most, kv_policy, gpu)


def load_model(
    path: Path,
    *,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **choices: Any,
) -> LoadedModel:
    """`open_model`, with these choices, and `OpenedModel.load` in one."""
    return open_model(path, **choices).load(threads=threads, progress=progress)


def share_memory(
    target: OpenedModel, draft: OpenedModel, draft_bytes: int, ctx_size: int | None
) -> tuple[OpenedModel, OpenedModel]:
    """Both models as they are when the draft is loaded beside the target: what its weights of `draft_bytes` leave of the memory
    for caches is shared so that both hold as many tokens. ctx_size: as it was asked for, None for what fits.

    Errors: OutOfMemoryError where the draft's weights or an asked-for context do not fit.
    """
    if target.max_cache_bytes is None:
        return target, draft
    both = target.max_cache_bytes - int(draft_bytes * _CACHE_SHARE)
    if both <= 0:
        free = target.max_cache_bytes / _CACHE_SHARE
        raise OutOfMemoryError(
            f"{draft.checkpoint.path}: {draft_bytes / 1e9:.1f} GB of weights to draft with, {free / 1e9:.1f} GB of memory free "
            f"beside {target.checkpoint.path}"
        )
    sizes = [bytes_per_token(each.config.kv_layers(), each.compute.kv_type) or 1 for each in (target, draft)]
    own, drafts = both * sizes[0] // sum(sizes), both * sizes[1] // sum(sizes)
    context = _context(target.config, target.compute.kv_type, ctx_size, own)
    most = min(context, draft.context_length)
    fitting = fitting_context(draft.config.kv_layers(), draft.compute.kv_type, drafts, most)
    return (
        replace(target, context_length=context, max_cache_bytes=own),
        replace(draft, context_length=max(1, fitting), max_cache_bytes=drafts),
    )


def read_config(path: Path, family: str | None = None) -> ModelConfig:
    """The config of a checkpoint or of a bare config.json, without reading a tensor. family: as in `open_model`."""
    if path.suffix == ".json" and not path.name.endswith(".index.json"):
        return _bare_config(path, family)
    if path.is_dir() and (path / "config.json").is_file():
        return _bare_config(path / "config.json", family)
    with open_checkpoint(path) as checkpoint:
        return ModelWeights(checkpoint, chosen_family(family)).config


def _bare_config(path: Path, family: str | None) -> ModelConfig:
    values = read_json_object(path)
    try:
        found, values = config_taken_for(values, chosen_family(family))
        return found.read_config(values)
    except LlmctlError as error:
        raise type(error)(f"{path}: {str(error).removeprefix('config.json: ')}") from error


def sampling_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """Sampling values the checkpoint itself recommends, by SamplingParams' names; empty where it says nothing."""
    if isinstance(checkpoint, GgufCheckpoint):
        found = {name: checkpoint.metadata.get(f"general.sampling.{key}") for name, key in _GGUF_SAMPLING.items()}
    else:
        values = getattr(checkpoint, "generation_config", {})
        found = {name: values.get(name) for name in _HF_SAMPLING}
        if values.get("do_sample") is False:
            found = {}
    return {name: value for name, value in found.items() if value is not None}


_HF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
_GGUF_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "repetition_penalty": "penalty_repeat",
    "repetition_window": "penalty_last_n",
}


def _tokenizer(weights: ModelWeights) -> Tokenizer | None:
    """The checkpoint's tokenizer, checked against the embedding; None where there is none (an engine fed with ids needs none).

    Tokens without a row are an error, unless all of them were added to the vocabulary afterwards: Gemma 3's text models come
    with the token of the pictures they cannot see. A prompt that has such a token is refused by the engine.
    """
    try:
        tokenizer = load_tokenizer(weights.checkpoint)
    except ModelNotFoundError:
        return None
    rows = weights.config.vocab_size
    surplus = range(rows, tokenizer.vocab_size)
    if not all(tokenizer.is_added(token_id) for token_id in surplus):
        raise FormatError(
            f"{weights.checkpoint.path}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding {rows} rows; "
            f"the first surplus token is {tokenizer.token_text(rows)!r} (id {rows})"
        )
    return tokenizer


def _name_unneeded(weights: ModelWeights) -> None:
    """Say which tensors the model has no use for; FormatError for those it would be wrong without."""
    if unneeded := weights.unneeded(weights.names_read):
        more = f" and {len(unneeded) - 3} more" if unneeded[3:] else ""
        _log.warning(
            "%s: no part of the model its config describes, left out: %s%s",
            weights.checkpoint.path,
            ", ".join(map(quoted, unneeded[:3])),
            more,
        )


def _name_unpacked(weights: ModelWeights, compute: Compute) -> None:
    """Say which packed weights take more memory than their file, for want of a kernel (the reference unpacks them all)."""
    if compute.backend == "reference":
        return
    for (form, dtype), nbytes in weights.unpacked.items():
        _log.warning(
            "%s: no kernel reads %s as it is stored here: unpacked to %s, exactly, %.1f MB of memory",
            weights.checkpoint.path,
            form,
            dtype,
            nbytes / 1e6,
        )


def _end_tokens(weights: ModelWeights, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The union of what the config, the generation config and the tokenizer call an end."""
    path = weights.checkpoint.path
    generation = getattr(weights.checkpoint, "generation_config", {}).get("eos_token_id")
    listed = token_ids(generation, f"{path}: generation_config.json: 'eos_token_id'")
    return frozenset({*weights.config.eos_token_ids, *listed, *(tokenizer.eos_token_ids if tokenizer else ())})


def _placed(
    weights: ModelWeights, compute: Compute, kv_policy: KvPolicy, gpu: GpuChoice, ctx_size: int | None
) -> tuple[Compute, int | None]:
    """Which layers go where, and the bytes there are for the cache (None: unknown)."""
    if compute.backend == "triton" and (found := _device_memory(compute)) is not None:
        shapes = kv_policy.shapes(weights.config.kv_layers(), ctx_size or weights.config.max_position_embeddings)
        placement = place(weights, compute.kv_type, shapes, gpu, found, ctx_size)
        if placement.gpu_layers is not None:
            _log.warning("%d of %d layers on the GPU, the others on the CPU", placement.gpu_layers, weights.config.num_layers)
        return replace(compute, gpu_layers=placement.gpu_layers), placement.cache_bytes
    if isinstance(gpu.layers, int):
        compute = _split_without_plan(compute, gpu.layers, weights.config.num_layers)
    available = _available_bytes(weights, compute)
    return compute, None if available is None else int(available * _CACHE_SHARE)


def _split_without_plan(compute: Compute, layers: int, count: int) -> Compute:
    """Where the interpreter stands for a GPU. Errors: UsageError for other backends, and for more layers than there are."""
    if compute.backend != "triton":
        raise UsageError(f"--gpu-layers {layers}: the {compute.backend} backend on {compute.device} splits no model")
    if layers > count:
        raise UsageError(f"--gpu-layers {layers}: this model has {count} layers")
    return replace(compute, gpu_layers=None if layers == count else layers)


def _left_for_cache(compute: Compute, gpu: GpuChoice) -> int | None:
    """Bytes of the GPU that the weights, which are on it, have left. None where no GPU computes."""
    found = _device_memory(compute) if compute.backend == "triton" else None
    return None if found is None else max(0, found.budget(gpu.utilization))


def _device_memory(compute: Compute) -> DeviceMemory | None:
    """Of the GPU that the model is for; None for an interpreter on the CPU."""
    if compute.device != "cuda":
        return None
    from llmctl.kernels._reference_devices import free_memory

    return DeviceMemory(*free_memory())


def _available_bytes(weights: ModelWeights, compute: Compute) -> int | None:
    """Memory left once the weights are prepared for the backend (None: unknown); OutOfMemoryError if they do not fit."""
    machine = memory()
    if compute.device != "cpu" or machine.available is None:
        return None
    available = min(machine.available, machine.limit or machine.available)
    checkpoint, stored = weights.checkpoint, [weights.stored(name) for name in weights.names()]
    if compute.backend == "native":
        prepared = sum(weight.bytes_on_native for weight in stored)
        needed, form, smaller = int(prepared * _PACKED_SHARE), "as the native kernels read them", ""
    else:
        elements = sum(weight.num_elements for weight in stored)
        needed, form = elements * _DTYPE_BYTES[compute.dtype], f"in {compute.dtype}"
        smaller = "; --dtype bfloat16 halves that" if compute.dtype == "float32" else ""
    if needed > available:
        raise OutOfMemoryError(
            f"{checkpoint.path}: {needed / 1e9:.1f} GB of weights {form}, {available / 1e9:.1f} GB of memory free{smaller}"
        )
    return available - needed


def _context(config: ModelConfig, kv_type: str, ctx_size: int | None, most_bytes: int | None) -> int:
    """Tokens of context. An asked-for size whose cache is more than `most_bytes` is an error, never cut silently.

    Only the dynamic rope type is made to go beyond the trained length.
    """
    trained, layers = config.max_position_embeddings, config.kv_layers()
    stretches = any(layer.rope and layer.rope.kind == "dynamic" for layer in config.layers)
    if bytes_per_token(layers, kv_type) is None:
        sizes = ", ".join(map(str, sorted({layer.head_dim for layer in layers})))
        raise UsageError(
            f"--kv-type {kv_type} keeps blocks of 32 numbers, which heads of {sizes} are not made of: take f16, bf16 or fp8"
        )
    if "=" in kv_type and any(layer.latent for layer in layers):
        raise UsageError(f"--kv-type {kv_type}: this model keeps one vector for keys and values alike, which has one type")
    if ctx_size is not None and ctx_size < 1:
        raise UsageError(f"--ctx-size must be at least 1, found {ctx_size}")
    if ctx_size is not None and ctx_size > trained and not stretches:
        raise UsageError(f"--ctx-size {ctx_size} is more than the {trained} tokens this model was trained with")
    asked = ctx_size or trained
    fitting = asked if most_bytes is None else fitting_context(layers, kv_type, most_bytes, asked)
    if ctx_size is not None and fitting < ctx_size:
        needed = plan_cache(layers, kv_type, Demand(ctx_size)).nbytes or 0
        raise OutOfMemoryError(
            f"a context of {ctx_size} tokens needs {needed / 1e9:.1f} GB of {kv_type} cache; about {fitting} tokens fit in memory"
        )
    return max(1, fitting)
