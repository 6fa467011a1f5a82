"""Baselines and ablations to compare with, not for users; kvweave finds them through the group `kvweave.recipes`."""
