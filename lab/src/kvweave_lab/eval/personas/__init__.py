"""Whole systems compared on users with notes and questions: latency, hit rates, quality and storage."""
