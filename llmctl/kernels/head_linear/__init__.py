"""head_linear(x, weight) -> y

x       [T, num_heads, in_features]
weight  prepared from (num_heads, out_features, in_features): a linear weight of its own for every head
y       [T, num_heads, out_features]   y[t, h] = weight[h] · x[t, h]

Multi-head latent attention multiplies queries and outputs of every head by that head's share of the up-projection, instead of
all keys and values. DeepSeek-AI, "DeepSeek-V2", 2024.
"""
