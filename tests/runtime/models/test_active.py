"""What one token passes: the chosen experts of all, a row of a table, everything else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from make_tiny_model import make_tiny_model
from safetensors.numpy import load_file, save_file

from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.models.active import active_weights
from llmctl.runtime.models.weights import ModelWeights


@pytest.mark.parametrize("tied", [False, True])
def test_a_dense_model_reads_all_but_its_table(tmp_path: Path, tied: bool) -> None:
    with open_checkpoint(make_tiny_model(tmp_path, "llama", tie_word_embeddings=tied)) as checkpoint:
        weights = ModelWeights(checkpoint)
        table = 0 if tied else (weights.config.vocab_size - 1) * weights.config.hidden_size
        active = active_weights(weights)
        assert active.parameters == checkpoint.total_elements - table
        assert active.nbytes == checkpoint.total_bytes - 4 * table


def test_of_experts_only_the_chosen_ones_count(tmp_path: Path) -> None:
    with open_checkpoint(make_tiny_model(tmp_path, "qwen2_moe", tie_word_embeddings=True)) as checkpoint:
        weights = ModelWeights(checkpoint)
        config = weights.config
        experts = config.experts
        one = 3 * config.hidden_size * experts.intermediate_size
        idle = (experts.num_experts - experts.top_k) * one * sum(layer.sparse for layer in config.layers)
        assert active_weights(weights).parameters == checkpoint.total_elements - idle


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.self_attn.kv_b_proj.weight"])
@pytest.mark.parametrize("shape", [(0, 96), ()])
def test_tensors_of_no_rows_count_for_nothing(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    """inspect shows a broken file; what loads it says what is wrong."""
    folder = make_tiny_model(tmp_path, "deepseek_v2")
    tensors = {**load_file(folder / "model.safetensors"), name: np.zeros(shape, np.float32)}
    save_file(tensors, folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        assert active_weights(ModelWeights(checkpoint)).parameters > 0
