"""Many requests and tenants over one resident model."""
