"""Decoding with the KV cache offloaded to disk: clusters of entries, their files, and the part held in memory."""
