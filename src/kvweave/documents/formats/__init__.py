"""Readers of file formats: each turns a file's bytes into an `Extracted`."""
