"""gated_activation(gate, up, activation) -> y, activation(x, activation) -> y

The second is the first without a gate: activation(x), of the same shape.

gate, up    [T, I]
activation  "silu" (SwiGLU), "gelu_pytorch_tanh" or "gelu" (GeGLU)
y           [T, I]  activation(gate) · up

Shazeer, "GLU Variants Improve Transformer", 2020.
"""

ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")
