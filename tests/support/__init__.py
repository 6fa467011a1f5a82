"""What several test files share: stand-ins, samples, servers, processes and the fixtures of all tests."""
