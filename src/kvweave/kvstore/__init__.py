"""Chunk KV on disk: keys, format, catalogue, limits."""
