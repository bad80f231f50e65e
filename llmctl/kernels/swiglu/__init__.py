"""gated_activation(gate, up, activation) -> y, activation(x, activation) -> y

The second is the first without a gate: activation(x), of the same shape.

gate, up    [T, I]
activation  "silu" (SwiGLU), "gelu_pytorch_tanh" or "gelu" (GeGLU); gated only: "clamped_swiglu"
y           [T, I]  activation(gate) · up; clamped_swiglu: (up + 1) · gate · sigmoid(1.702 · gate) with gate at most 7 and up
            from −7 to 7

Shazeer, "GLU Variants Improve Transformer", 2020; OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025.
"""

ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")
CLAMPED_SWIGLU = "clamped_swiglu"
GATED_ACTIVATIONS = (*ACTIVATIONS, CLAMPED_SWIGLU)
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
