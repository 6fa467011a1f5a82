"""Clusters on disk: their layout, and how they are read and written."""
