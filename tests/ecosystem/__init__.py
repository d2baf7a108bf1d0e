"""Frameworks above torch, each in a script as its users write it; run by `make test-ecosystem` only."""
