"""What decoding by retrieval is worth: long texts under every strategy, beside dense decoding."""
