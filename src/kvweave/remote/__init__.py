"""Answers from a vLLM server that has kvweave's plug-in: what is sent to it, what it says of its model, and what it prepares."""
