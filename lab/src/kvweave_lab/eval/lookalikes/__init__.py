"""Questions that ask the same in other words, and questions that only look alike: which matcher tells them apart."""
