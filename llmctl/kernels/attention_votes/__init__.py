"""attention_votes(queries, pages, block_table, length, scale, softcap=None, sinks=None) -> votes

queries      [W, num_heads, head_dim]   float32, those of the last W tokens of one sequence, as attention had them
pages        of a layer that sees all tokens; block_table: the sequence's pages, int64; length: its tokens, W among them
scale, softcap, sinks                   as in attention
votes        [num_kv_heads, length]     float32: the weights that these queries give to each token, summed over the queries and
                                        over the query heads that share a kv head
"""
