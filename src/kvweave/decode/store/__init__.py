"""Clusters in memory: frames, which clusters they hold, and the store that moves clusters between them and the disk."""
