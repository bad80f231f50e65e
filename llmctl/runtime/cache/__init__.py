"""The paged KV cache: tensors in kv_cache.py, page bookkeeping in block_manager.py, sizes in memory.py."""
