"""rms_norm(x, weight, eps) -> y

x       [..., H]  compute dtype; the mean square runs over the last axis, in float32
weight  [H]       float32, multiplied as it is (families with (1 + w) norms add the 1 when they load)
y       [..., H]  x / sqrt(mean(x²) + eps) · weight, in x's dtype

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""
