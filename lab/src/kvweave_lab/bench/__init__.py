"""Measurements that users can repeat: `kvweave bench`. Each is a ratio of things timed in turn, in one run, or counts."""
