"""store_kv(keys, values, key_pages, value_pages, batch)

keys, values            [T, num_kv_heads, head_dim]                        one row a token
key_pages, value_pages  [num_blocks, block_size, num_kv_heads, head_dim]   in the cache's dtype, written in place
                        values None: the pages are latent, their values a part of the keys
batch                   its slot_mapping [T] int64: slot = block · block_size + offset; −1 writes nothing

move_tokens(pages, sources, targets) copies stored rows, bit for bit: of kv head h that of slot sources[h, i] to targets[i], one
after the other. sources [num_kv_heads, n], targets [n]  int64
"""
