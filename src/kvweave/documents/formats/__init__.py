"""Readers of file formats, one or a few in each file: bytes to `Extracted`."""
