"""Text on its way through the layers is the forward pass itself, for every family; topologies name what layers are made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from make_tiny_model import FAMILIES, make_tiny_model

from llmctl.errors import FormatError, LlmctlError
from llmctl.kernels.formats.spec import FORMATS
from llmctl.quant import awq
from llmctl.quant.activations import Activations
from llmctl.quant.capture import Batch, CaptureOps
from llmctl.quant.huggingface import needed_names
from llmctl.quant.statistics import Statistics
from llmctl.quant.walk import LayerWeights, Walk
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.engine.model_runner import compute_logits
from llmctl.runtime.loading import load_model
from llmctl.runtime.models.topology import layer_modules, layer_topology, scale_groups
from llmctl.runtime.models.weights import ModelWeights

NO_PROJECTIONS = ("norm", "embed", "lm_head", "bias", "sinks")
# Small, and asked for by every token: routers, gates, and what unfolds the latent head by head.
_ROUTERS = ("mlp.gate", "mlp.router", "block_sparse_moe.gate", "mlp.shared_expert_gate")
LEFT_ALONE = (*_ROUTERS, "self_attn.k_b_proj", "self_attn.v_b_proj")
ROWS = [np.random.default_rng(seed).integers(3, 250, size).tolist() for seed, size in enumerate((40, 3, 17, 33))]
CHOICES = {"starcoder2": {"use_bias": True}, "llama": {"attention_bias": True, "mlp_bias": True}}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny folder of the family, made once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            path = tmp_path_factory.mktemp("walked") / f"tiny-{family}"
            made[family] = make_tiny_model(path, family, **CHOICES.get(family, {}))
        return made[family]

    return make


@pytest.fixture
def weights(folder: Callable[[str], Path]) -> Callable[[str], ModelWeights]:
    return lambda family: ModelWeights(open_checkpoint(folder(family)))


def walk_of(weights: ModelWeights, **choices: int | Path) -> Walk:
    walk = Walk(weights, ROWS, **{"batch_tokens": 45, "lanes": 2, **choices})
    walk.embed()
    return walk


def logits_of(walk: Walk, family_path: Path, layers: list[LayerWeights]) -> list[np.ndarray]:
    """Logits of every row, through these layers and the model's own end."""
    model = load_model(family_path)
    for layer in layers:
        walk.advance(layer)
    found = []
    for index, batch in enumerate(walk.batches):
        logits = model.decoder._logits(model.decoder.norm.forward(walk.activations.read(index))).numpy()
        found += np.split(logits, batch.description.cu_seqlens_q[1:-1])
    return found


def layers_of(walk: Walk) -> list[LayerWeights]:
    return [walk.layer(index) for index in range(walk.weights.config.num_layers)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_walk_is_the_forward_pass(
    folder: Callable[[str], Path], weights: Callable[[str], ModelWeights], family: str
) -> None:
    """With windows, caps, sinks and positions of all kinds; batches of rows of uneven length change nothing."""
    walk = walk_of(weights(family))
    assert [batch.num_tokens for batch in walk.batches] == [43, 17, 33]
    found = logits_of(walk, folder(family), layers_of(walk))
    model = load_model(folder(family))
    for ids, logits in zip(ROWS, found, strict=True):
        np.testing.assert_allclose(logits, compute_logits(model, ids), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_topology_names_every_matrix_of_a_layer(weights: Callable[[str], ModelWeights], family: str) -> None:
    model = weights(family)
    prefix = "model.layers.1."
    names = {name.removesuffix(".weight") for name in needed_names(model) if name.startswith(prefix)}
    expected = {name.removeprefix(prefix) for name in names if not any(part in name for part in NO_PROJECTIONS)}
    modules = list(layer_modules(model.config, 1))
    assert set(modules) == expected - set(LEFT_ALONE)
    assert len(modules) == len(set(modules))


@pytest.mark.parametrize("family", FAMILIES)
def test_smoothing_changes_no_output(
    folder: Callable[[str], Path], weights: Callable[[str], ModelWeights], family: str
) -> None:
    """Any factor on any group that has somewhere to put it: (1 + w) norms, values shared by heads, fused and parallel blocks."""
    walk = walk_of(weights(family))
    generator, layers, folded = torch.Generator().manual_seed(0), layers_of(walk), 0
    for layer in layers:
        for group in scale_groups(layer.config, layer.index):
            if group.source is None:
                continue
            columns = layer.matrix(group.leader).shape[1]
            channels = torch.from_numpy(group.source.channels(columns))
            scales = torch.rand(columns, generator=generator)[channels] * 3 + 0.2
            awq.fold(layer, group, scales, FORMATS["BF16"])
            folded += 1
    assert folded >= layers[0].config.num_layers
    found = logits_of(walk, folder(family), layers)
    model = load_model(folder(family))
    for ids, logits in zip(ROWS, found, strict=True):
        np.testing.assert_allclose(logits, compute_logits(model, ids), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("family", ["llama", "phi3", "cohere"])
@pytest.mark.parametrize("lanes", [1, 3])
def test_statistics_are_those_of_all_tokens(weights: Callable[[str], ModelWeights], family: str, lanes: int) -> None:
    """Rows of 3 and 40 tokens: 93 in all, none of them padding; whatever the batches and lanes."""
    walk = walk_of(weights(family), lanes=lanes)
    groups = layer_topology(walk.weights.config, 0)
    layer = walk.layer(0)
    together = walk.collect(layer, [group.leader for group in groups])
    x = [walk.activations.read(i) for i in range(3)]
    normed = torch.cat([layer.build().attention_norm.forward(part) for part in x])
    first = together[groups[0].leader]
    assert first.count == sum(map(len, ROWS)) == 93
    torch.testing.assert_close(first.products, normed.T @ normed / 93, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first.magnitudes, normed.abs().sum(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(first.squares, 93 * first.products.diagonal())
    assert torch.equal(first.products, first.products.T)
    other = walk_of(weights(family), lanes=1, batch_tokens=1000)
    for group in groups:
        alone = other.collect(other.layer(0), [group.leader])[group.leader]
        torch.testing.assert_close(alone.products, together[group.leader].products, rtol=1e-3, atol=1e-3)
        diagonal = walk.collect(layer, [group.leader], products=False)[group.leader]
        torch.testing.assert_close(diagonal.squares, alone.squares, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma3", "cohere"])
def test_half_a_layer_and_the_rest_are_the_layer(weights: Callable[[str], ModelWeights], family: str) -> None:
    whole, halves = walk_of(weights(family)), walk_of(weights(family))
    whole.advance(whole.layer(0))
    halves.advance_half(halves.layer(0))
    halves.advance_half(halves.layer(0))
    halves.advance(halves.layer(0))
    assert all(torch.equal(whole.activations.read(i), halves.activations.read(i)) for i in range(3))


def test_what_is_replaced_counts(weights: Callable[[str], ModelWeights]) -> None:
    walk = walk_of(weights("llama"))
    layer = walk.layer(0)
    before = walk.collect(layer, ["self_attn.o_proj"])["self_attn.o_proj"].squares
    for kind in ("weight", "bias"):
        name = layer.full(f"self_attn.v_proj.{kind}")
        layer.replaced[name] = np.zeros_like(layer.read(name))
    assert before.any()
    assert not walk.collect(layer, ["self_attn.o_proj"])["self_attn.o_proj"].squares.any()


def test_spilled_activations_are_the_same(weights: Callable[[str], ModelWeights], tmp_path: Path) -> None:
    kept, spilled = walk_of(weights("llama")), walk_of(weights("llama"), spill=tmp_path)
    for walk in (kept, spilled):
        walk.advance(walk.layer(0))
    assert all(torch.equal(kept.activations.read(i), spilled.activations.read(i)) for i in range(3))
    assert list(tmp_path.iterdir()) == []  # the file has no name: a killed run leaves nothing


def test_activations_are_read_as_they_were_written_last(tmp_path: Path) -> None:
    store = Activations([2, 3], 4, tmp_path)
    for index, value in ((1, 5.0), (0, 1.0), (1, 2.0)):
        store.write(index, torch.full(((2, 3)[index], 4), value))
    assert [float(store.read(i).sum()) for i in (0, 1)] == [8.0, 24.0]
    store.close()


def test_a_matrix_with_a_number_that_is_none_is_named(weights: Callable[[str], ModelWeights]) -> None:
    layer = walk_of(weights("llama")).layer(1)
    name = layer.full("mlp.up_proj.weight")
    layer.replaced[name] = np.array(layer.read(name))
    layer.replaced[name][7, 5] = np.nan
    with pytest.raises(FormatError, match=r"'model.layers.1.mlp.up_proj.weight' holds NaN or infinity in row 7, column 5"):
        layer.matrix("mlp.up_proj")


def test_inputs_that_are_no_numbers_are_named(weights: Callable[[str], ModelWeights]) -> None:
    walk = walk_of(weights("llama"))
    layer = walk.layer(0)
    name = layer.full("self_attn.v_proj.weight")
    layer.replaced[name] = np.full_like(layer.read(name), 1e30)
    with pytest.raises(LlmctlError, match=r"what 'model.layers.0.self_attn.o_proj' reads is NaN or infinite"):
        walk.collect(layer, ["self_attn.o_proj"])


def test_sums_can_be_added_in_any_order() -> None:
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    whole, first, second = Statistics(8), Statistics(8), Statistics(8)
    whole.add(x)
    first.add(x[:3])
    second.add(x[3:])
    second.merge(first)
    for one in (whole, second):
        one.finish()
    assert whole.count == second.count == 50
    torch.testing.assert_close(whole.products, second.products)
    torch.testing.assert_close(second.mean_squares, (x * x).mean(0))
    torch.testing.assert_close(second.mean_magnitudes, x.abs().mean(0))
    second.scale(torch.arange(1.0, 9.0))
    scaled = second.take_hessian()
    torch.testing.assert_close(scaled, (x * torch.arange(1.0, 9.0)).T @ (x * torch.arange(1.0, 9.0)) / 50)


def test_what_saw_nothing_weighs_all_columns_alike() -> None:
    nothing = Statistics(4)
    nothing.finish()
    assert torch.equal(nothing.mean_squares, torch.ones(4))
    assert not nothing.take_hessian().any()




def test_layers_and_sums_stay_on_the_device_they_are_given(weights: Callable[[str], ModelWeights]) -> None:
    """torch's meta device has shapes, no numbers, and refuses what lies elsewhere: whatever strays to the CPU shows."""
    for family in ("llama", "gemma3", "deepseek_v2"):
        model, ops = weights(family), CaptureOps("meta")
        batch, seen = Batch(ops, model.config, ROWS[:2]), Statistics(model.config.hidden_size, device="meta")
        dense = next(i for i, layer in enumerate(model.config.layers) if not layer.sparse)
        x = torch.empty(batch.num_tokens, model.config.hidden_size, device="meta")
        seen.add(x)
        assert seen.products is not None
        assert seen.products.device.type == seen.magnitudes.device.type == "meta"
        assert batch.forward(LayerWeights(model, ops, dense).build(), x).device.type == "meta"


def test_the_walk_brings_batches_to_its_device_and_back(weights: Callable[[str], ModelWeights]) -> None:
    walk = Walk(weights("llama"), ROWS, batch_tokens=45, lanes=1, device="meta")
    walk.activations.write(0, torch.ones(walk.batches[0].num_tokens, walk.weights.config.hidden_size))
    assert walk.ops.device == "meta"
    assert walk.entering(0).device.type == "meta"
    assert walk.activations.read(0).device.type == "cpu"
