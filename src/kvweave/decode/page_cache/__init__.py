"""Clusters held in memory: frames, which clusters they hold, and which are evicted."""
