"""GGUF files, the format of llama.cpp: read, and converted once into folders that transformers loads."""
