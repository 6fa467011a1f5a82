"""What several test files of the lab share."""
