"""What of the stored KV is in memory, and what has to go."""
