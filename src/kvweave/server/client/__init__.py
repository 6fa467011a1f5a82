"""Commands that use a running server of the same home."""
