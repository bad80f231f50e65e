"""embedding(token_ids, table, scale=1.0) -> x

token_ids  [T]     int64
table      prepared from a plain array or QuantTensor of shape (V, H)
scale      factor applied to the looked-up rows (Gemma: sqrt(hidden_size)), rounded to the compute dtype first
x          [T, H]  compute dtype
"""
