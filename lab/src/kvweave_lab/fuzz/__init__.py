"""Hostile files for every reader of the product: each must be read, or be refused by one clear line, in bounded time and memory."""
