"""How well long texts are decoded under every strategy, compared with dense decoding."""
