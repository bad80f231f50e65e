"""What goes to a GPU of which size, and what is said where it does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from make_tiny_model import make_tiny_model

from llmctl.errors import OutOfMemoryError, UsageError
from llmctl.kernels.backend import Compute
from llmctl.runtime import gpu_placement, loading
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.gpu_placement import DeviceMemory, GpuChoice, parse_gpu_layers, place
from llmctl.runtime.loading import open_model
from llmctl.runtime.models.weights import ModelWeights

LAYERS, CONTEXT = 3, 64
COMPUTE = Compute("triton", "cuda", "bfloat16", "bf16", "int8")
GPU = 1 << 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("placed") / "llama", "llama")


@pytest.fixture
def weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelWeights:
    monkeypatch.setattr(gpu_placement, "_RESERVE", 0)
    return ModelWeights(open_checkpoint(folder))


def placed(
    weights: ModelWeights, nbytes: int, layers: int | str | None = "auto", utilization: float = 1.0
) -> gpu_placement.Placement:
    choice, shapes = GpuChoice(layers, utilization), weights.config.kv_layers()
    return place(weights, "bf16", shapes, choice, DeviceMemory(nbytes, nbytes), CONTEXT)


def needed(weights: ModelWeights, layers: int) -> int:
    """Bytes that so many layers take, with their cache."""
    return next(n for n in range(1 << 12, GPU, 1 << 10) if fits(weights, n, layers))


def fits(weights: ModelWeights, nbytes: int, layers: int) -> bool:
    try:
        placed(weights, nbytes, layers)
    except OutOfMemoryError:
        return False
    return True


def test_a_gpu_that_holds_all_gets_all_and_the_cache_what_is_left(weights: ModelWeights) -> None:
    small, large = placed(weights, GPU), placed(weights, GPU + (1 << 20))
    assert small.gpu_layers is None
    assert large.cache_bytes - small.cache_bytes == 1 << 20
    assert 0 < small.cache_bytes < GPU


def test_auto_takes_as_many_layers_as_fit(weights: ModelWeights) -> None:
    sizes = [needed(weights, count) for count in (1, 2, 3)]
    assert sizes == sorted(set(sizes))
    assert [placed(weights, size).gpu_layers for size in sizes] == [1, 2, None]
    assert placed(weights, sizes[1], 1).gpu_layers == 1
    assert placed(weights, sizes[2], None).gpu_layers is None


def test_memory_that_others_use_and_the_share_that_is_left_alone_do_not_count(weights: ModelWeights) -> None:
    assert DeviceMemory(60, 100).budget(0.9) == 50
    size = needed(weights, 2)
    assert placed(weights, 2 * size, utilization=0.5).gpu_layers == 2


def test_what_does_not_fit_is_told_with_what_does(weights: ModelWeights) -> None:
    with pytest.raises(OutOfMemoryError, match=r"llama: 3 layers on the GPU need .*64 tokens.*--gpu-layers 2 fits, or auto"):
        placed(weights, needed(weights, 2), None)
    with pytest.raises(OutOfMemoryError, match=r"utilization 0\.9\): --device cpu"):
        placed(weights, 1 << 12, utilization=0.9)
    with pytest.raises(UsageError, match="--gpu-layers 4: this model has 3 layers"):
        placed(weights, GPU, 4)


@pytest.mark.parametrize("text", ["0", "-1", "some", "1.5", ""])
def test_numbers_of_layers_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--gpu-layers"):
        parse_gpu_layers(text)
    assert parse_gpu_layers("12") == 12
    assert parse_gpu_layers("auto") == parse_gpu_layers(None) == "auto"


@pytest.mark.parametrize("utilization", [0.0, 1.1, -1.0])
def test_a_share_of_memory_that_is_none(utilization: float) -> None:
    with pytest.raises(UsageError, match="--gpu-memory-utilization"):
        GpuChoice(utilization=utilization)


def test_opening_a_model_plans_for_the_gpu(folder: Path, weights: ModelWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "choose_compute", lambda *choices: COMPUTE)
    for count, found in ((2, 2), (3, None)):
        size = needed(weights, count)
        monkeypatch.setattr(loading, "_device_memory", lambda compute, size=size: DeviceMemory(size, size))
        opened = open_model(folder, gpu=GpuChoice(utilization=1.0), ctx_size=CONTEXT)
        assert opened.compute == replace(COMPUTE, gpu_layers=found)
        assert opened.context_length == CONTEXT


def test_backends_without_a_gpu_split_nothing(folder: Path) -> None:
    with pytest.raises(UsageError, match="--gpu-layers 1: the reference backend on cpu splits no model"):
        open_model(folder, backend="reference", gpu=GpuChoice(1))
