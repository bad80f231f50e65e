"""linear(x, weight, bias=None) -> y

x       [T, K]   activations in the compute dtype
weight  prepared from a plain array or QuantTensor of shape (N, K): quantized along K, row n makes output n
bias    [N] or None
y       [T, N]   y[t, n] = Σ_k x[t, k] · weight[n, k] + bias[n]
"""
