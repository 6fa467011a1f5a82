"""Measurements that users can repeat with `kvweave bench`. Each one is a count, or a ratio of things timed in turn."""
