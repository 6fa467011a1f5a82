"""What a server serves, below HTTP."""
