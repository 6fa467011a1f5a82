"""Decoding with the KV cache on flash: what is attended, where it lies, and what of it stays in memory."""
