"""rotary(x, cos, sin) -> y

x    [T, heads, head_dim]   queries or keys
cos  [T, rotary_dim / 2]    float32, one row a token (already multiplied by the attention scaling of yarn and longrope)
sin  [T, rotary_dim / 2]
y    [T, heads, head_dim]   element i is paired with i + rotary_dim / 2 ("rotate half"); the rest passes unchanged

rotary_store, of the triton backend, is the norms of heads, rotary and store_kv in one.

rotary_angles(positions, inv_freq, scaling) -> (cos, sin) makes the rows: cos(positions · inv_freq) · scaling, in float32.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
"""
