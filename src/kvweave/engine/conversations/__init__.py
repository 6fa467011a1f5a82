"""Conversations: turns over KV that is kept, and their logs."""
