"""From stored chunk KV to the first token: recipes of six slots."""
