"""Routing: the reference by its definition, against transformers' own, and native code against the reference."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from llmctl.errors import FormatError
from llmctl.kernels.moe import Routing
from llmctl.kernels.moe._reference import route

BIAS = np.linspace(-0.3, 0.3, 16, dtype=np.float32)
ROUTINGS = {
    "mixtral": Routing(8, 2, renormalize=True),
    "olmoe": Routing(16, 8),
    "one": Routing(16, 1, renormalize=True, scale=0.5),
    "all": Routing(4, 4),
    "deepseek-v2": Routing(16, 3, num_groups=4, top_groups=2, scale=16.0),
    "deepseek-v3": Routing(16, 4, True, sigmoid=True, bias=BIAS, num_groups=4, top_groups=2, group_by_top2=True, scale=2.5),
}


def logits_for(routing: Routing, tokens: int = 50, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, routing.num_experts)).astype(np.float32) * 2


def test_softmax_over_all_then_the_best() -> None:
    experts, weights = route(torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]])), Routing(4, 2))
    assert experts.tolist() == [[1, 3]]
    np.testing.assert_allclose(weights[0], [0.4, 0.3], rtol=1e-6)
    weights = route(torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]])), Routing(4, 2, renormalize=True, scale=3.0))[1]
    np.testing.assert_allclose(weights[0], [3 * 4 / 7, 3 * 3 / 7], rtol=1e-6)


def test_of_equal_experts_the_first_is_chosen() -> None:
    assert route(torch.zeros(1, 6), Routing(6, 3))[0].tolist() == [[0, 1, 2]]


def test_a_bias_moves_the_choice_and_not_the_weights() -> None:
    bias = np.array([0, 0, 1, 0], np.float32)
    logits = torch.tensor([[0.0, 2.0, -2.0, 1.0]])
    experts, weights = route(logits, Routing(4, 2, sigmoid=True, bias=bias))
    assert experts.tolist() == [[2, 1]]
    np.testing.assert_allclose(weights, logits.sigmoid()[:, [2, 1]])


def test_only_the_best_groups_have_a_say() -> None:
    logits = torch.tensor([[5.0, -9.0, 4.0, 3.9, 4.5, -9.0]])
    assert route(logits, Routing(6, 2, num_groups=3, top_groups=1))[0].tolist() == [[0, 1]]
    by_two = Routing(6, 2, sigmoid=True, num_groups=3, top_groups=1, group_by_top2=True)
    assert route(logits, by_two)[0].tolist() == [[2, 3]]


def test_equals_the_router_of_transformers() -> None:
    config = transformers.DeepseekV3Config(
        hidden_size=16, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=2.5
    )
    router = DeepseekV3TopkRouter(config)
    router.weight.data.copy_(torch.eye(16))
    router.e_score_correction_bias.copy_(torch.from_numpy(BIAS))
    logits = torch.from_numpy(logits_for(ROUTINGS["deepseek-v3"]))
    with torch.no_grad():
        _, weights, experts = router(logits)
    ours, our_weights = route(logits, ROUTINGS["deepseek-v3"])
    assert torch.equal(experts.sort()[0], ours.sort()[0])
    np.testing.assert_allclose(our_weights.gather(1, ours.argsort()), weights.gather(1, experts.argsort()), rtol=1e-5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_k": 9}, "9 experts a token cannot be chosen among 8"),
        ({"top_k": 0}, "0 experts"),
        ({"num_groups": 3}, "1 of 3 groups cannot be chosen among 8 experts"),
        ({"num_groups": 4, "top_groups": 5}, "5 of 4 groups"),
        ({"num_groups": 4, "top_k": 3}, "3 experts a token cannot be chosen among 2"),
        ({"num_groups": 8, "top_k": 1, "group_by_top2": True}, "groups of 1 experts have no two best"),
        ({"bias": np.zeros(7, np.float32)}, r"bias must be float32 \(8,\), got float32 \(7,\)"),
    ],
)
def test_what_contradicts_itself_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Routing(**{"num_experts": 8, "top_k": 2, **values})


@pytest.mark.parametrize("name", ROUTINGS)
def test_native_code_chooses_the_same(name: str) -> None:
    native = importlib.import_module("llmctl.kernels.native._native")
    from llmctl.kernels.moe._native import native_routing

    routing = ROUTINGS[name]
    logits = logits_for(routing)
    logits[7] = 0.25
    experts, weights = native.route(native_routing(routing), logits)
    expected, expected_weights = route(torch.from_numpy(logits), routing)
    assert np.array_equal(experts, expected)
    np.testing.assert_allclose(weights, expected_weights, rtol=2e-6)
