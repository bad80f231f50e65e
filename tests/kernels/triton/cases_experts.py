"""moe: routing, few tokens and many, against the reference at sizes that fill no block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from packed_weights import behind_guards, relative_error, stored, values

from llmctl.kernels.formats.packed_int import PackedIntTensor
from llmctl.kernels.linear._triton import prepare_weight
from llmctl.kernels.moe import Experts, Routing
from llmctl.kernels.moe import _reference as reference
from llmctl.kernels.moe._triton import expert_counts, moe, prepared_experts
from llmctl.kernels.moe._triton_route import combine, route

Guard = Callable[[torch.Tensor], torch.Tensor]
HIDDEN, SIZE, EXPERTS = 96, 64, 5
TWO = Routing(EXPERTS, 2, renormalize=True)
BIAS = np.linspace(-0.3, 0.3, 15, dtype=np.float32)
ROUTINGS = {
    "mixtral": TWO,
    "all": Routing(3, 3, scale=0.5),
    "deepseek-v2": Routing(16, 3, num_groups=4, top_groups=2, scale=16.0),
    "deepseek-v3": Routing(15, 4, True, sigmoid=True, bias=BIAS, num_groups=3, top_groups=2, group_by_top2=True, scale=2.5),
}


def logits_of(tokens: int, routing: Routing = TWO) -> torch.Tensor:
    return 2 * torch.randn(tokens, routing.num_experts)


def on_device(routing: Routing) -> torch.Tensor | None:
    return None if routing.bias is None else torch.from_numpy(routing.bias)


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_routing_is_the_reference(routing: Routing, guarded: Guard) -> None:
    logits = logits_of(6, routing)
    chosen, weights = route(guarded(logits), routing, on_device(routing))
    expected = reference.route(logits, routing)
    assert torch.equal(chosen.long(), expected[0])
    torch.testing.assert_close(weights, expected[1], rtol=1e-5, atol=1e-7)


def test_of_equal_experts_the_first_is_chosen() -> None:
    for routing in (Routing(6, 3), replace(ROUTINGS["deepseek-v2"], top_k=8)):
        logits = torch.zeros(1, routing.num_experts)
        assert torch.equal(route(logits, routing, None)[0].long(), reference.route(logits, routing)[0])


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3"])
def test_logits_that_are_no_numbers_choose_experts_that_are_there(name: str) -> None:
    logits = torch.full((1, ROUTINGS[name].num_experts), float("nan"))
    chosen, weights = route(logits, ROUTINGS[name], on_device(ROUTINGS[name]))
    assert 0 <= int(chosen.min()) <= int(chosen.max()) < ROUTINGS[name].num_experts
    assert weights.isnan().all()


def test_results_are_summed_in_order_of_choice(guarded: Guard) -> None:
    results, weights = torch.randn(3, 2, 700), torch.rand(3, 2)
    torch.testing.assert_close(combine(guarded(results), guarded(weights)), (results * weights[..., None]).sum(1))


def experts_of(name: str, guarded: Guard, with_bias: bool = True) -> tuple[Experts, Experts]:
    """As the kernels take them, and as the reference does."""
    shapes = ((EXPERTS, SIZE, HIDDEN), (EXPERTS, SIZE, HIDDEN), (EXPERTS, HIDDEN, SIZE))
    parts = [stored(name, *shape) for shape in shapes]
    biases = [torch.randn(shape[:2]) if with_bias else None for shape in shapes]
    own = [behind_guards(prepare_weight(part, "cpu", torch.float32, "float"), guarded) for part in parts]
    counts = [np.zeros(EXPERTS, np.int64) for _ in range(2)]
    return Experts(*own, counts[0], *biases), Experts(*map(values, parts), counts[1], *biases)


@pytest.mark.parametrize("name", ["Q8_0", "F16"])
def test_few_tokens_and_many(name: str, guarded: Guard) -> None:
    own, known = experts_of(name, guarded)
    for tokens in (2, 11):
        x, logits = torch.randn(tokens, HIDDEN), logits_of(tokens)
        y = moe(guarded(x), guarded(logits), own, TWO, "silu")
        assert relative_error(y, reference.moe(x, logits, known, TWO, "silu")) < 1e-6
    assert np.array_equal(own.counts, np.zeros(EXPERTS))
    assert np.array_equal(expert_counts(own), known.counts)
    assert np.array_equal(expert_counts(own), known.counts)
    assert moe(torch.empty(0, HIDDEN), torch.empty(0, EXPERTS), own, TWO, "silu").shape == (0, HIDDEN)


def test_more_than_a_block_of_tokens_for_one_expert(guarded: Guard) -> None:
    own, known = experts_of("F16", guarded, with_bias=False)
    x, logits = torch.randn(20, HIDDEN), torch.zeros(20, EXPERTS)
    logits[:, 3] = 9.0
    logits[:7, 0] = 8.0
    y = moe(x, logits, own, TWO, "gelu_pytorch_tanh")
    assert relative_error(y, reference.moe(x, logits, known, TWO, "gelu_pytorch_tanh")) < 1e-6


def listed(experts: Experts, guarded: Guard, parts: list[list]) -> Experts:
    lists = [[prepare_weight(each, "cpu", torch.float32, "float") for each in part] for part in parts]
    return replace(experts, gate=lists[0], up=lists[1], down=lists[2], counts=np.zeros(EXPERTS, np.int64))


@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_one_by_one_with_columns_in_their_own_order(tokens: int, guarded: Guard) -> None:
    shapes = ((SIZE, HIDDEN), (SIZE, HIDDEN), (HIDDEN, SIZE))
    rng, parts = np.random.default_rng(0), []
    for rows, columns in shapes:
        whole = stored("I8 groups of 32", EXPERTS, rows, columns)
        orders = [rng.permutation(columns).astype(np.int32) for _ in range(EXPERTS)]
        parts.append([one_of(whole, index, orders[index]) for index in range(EXPERTS)])
    known = Experts(*(torch.stack([values(each) for each in part]) for part in parts), np.zeros(EXPERTS, np.int64))
    own = listed(known, guarded, parts)
    x, logits = torch.randn(tokens, HIDDEN), logits_of(tokens)
    assert relative_error(moe(x, logits, own, TWO, "silu"), reference.moe(x, logits, known, TWO, "silu")) < 1e-6


def one_of(whole: PackedIntTensor, index: int, order: np.ndarray) -> PackedIntTensor:
    rows = {field: getattr(whole, field)[index] for field in ("codes", "scales", "zero_points")}
    return PackedIntTensor(whole.bits, whole.group_size, whole.shape[1:], **rows, column_order=order)


def test_experts_stored_in_different_ways_become_plain(guarded: Guard) -> None:
    own, known = experts_of("F16", guarded, with_bias=False)
    names = ["Q8_0", "F16", "Q4_0", "F16", "Q8_0"]
    shapes = ((SIZE, HIDDEN), (SIZE, HIDDEN), (HIDDEN, SIZE))
    parts = [[stored(name, *shape) for name in names] for shape in shapes]
    known = Experts(*(torch.stack([values(each) for each in part]) for part in parts), np.zeros(EXPERTS, np.int64))
    own = listed(known, guarded, parts)
    x, logits = torch.randn(2, HIDDEN), logits_of(2)
    assert relative_error(moe(x, logits, own, TWO, "silu"), reference.moe(x, logits, known, TWO, "silu")) < 1e-6


def test_experts_put_side_by_side_are_kept_once(guarded: Guard) -> None:
    shapes = ((SIZE, HIDDEN), (SIZE, HIDDEN), (HIDDEN, SIZE))
    parts = [[stored("Q8_0", *shape)] * EXPERTS for shape in shapes]
    own = listed(Experts(None, None, None, np.zeros(EXPERTS, np.int64)), guarded, parts)
    ready = prepared_experts(own, TWO, torch.device("cpu"))
    assert own.gate[2].planes.low.data_ptr() == ready.gate.planes.low[2].data_ptr()
    assert prepared_experts(own, TWO, torch.device("cpu")) is ready
