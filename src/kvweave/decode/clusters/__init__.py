"""Clusters of entries: how they are formed, described, and selected by queries."""
