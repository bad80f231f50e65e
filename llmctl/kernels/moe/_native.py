"""moe in native code: experts prepared once, run for any number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from llmctl.kernels.moe import Routing
from llmctl.kernels.native import _native
from llmctl.kernels.native._native import Moe, PackedWeight, ThreadPool

Experts = PackedWeight | Sequence[PackedWeight]
"""One weight of (experts, out, in), or one of (out, in) an expert."""


def make_moe(
    pool: ThreadPool,
    gate: Experts,
    up: Experts,
    down: Experts,
    routing: Routing,
    activation: str,
    *,
    int8: bool = True,
    isa: str | None = None,
) -> Moe:
    """The experts of one layer; its `run(x, router_logits)` takes and returns float32 arrays [T, H], [T, E] → [T, H].

    int8: activations of quantized weights are rounded to int8 (per 32 numbers). isa: an instruction set by name, None for the
    best there is. ValueError for matrices that do not belong together.
    """
    return Moe(pool, listed(gate), listed(up), listed(down), native_routing(routing), activation, int8, isa)


def native_routing(routing: Routing) -> _native.Routing:
    """The same routing for native code."""
    return _native.Routing(
        routing.num_experts,
        routing.top_k,
        routing.renormalize,
        routing.sigmoid,
        [] if routing.bias is None else routing.bias.tolist(),
        routing.num_groups,
        routing.top_groups,
        routing.group_by_top2,
        routing.scale,
    )


def listed(experts: Experts) -> list[PackedWeight]:
    """The weights that hold the experts, in order."""
    return [experts] if isinstance(experts, PackedWeight) else list(experts)
