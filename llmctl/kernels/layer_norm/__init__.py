"""layer_norm(x, weight, bias, eps) -> y

x       [..., H]  compute dtype; mean and variance run over the last axis, in float32
weight  [H]       float32; of heads [..., heads, H] also [heads, H], a vector for each
bias    [H]       float32, or None
y       [..., H]  (x − mean(x)) / sqrt(var(x) + eps) · weight + bias, in x's dtype

Ba, Kiros and Hinton, "Layer Normalization", 2016.
"""
