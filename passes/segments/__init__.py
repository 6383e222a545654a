"""Runs of repeated layers (CFP section 4.1): found, verified, and named by their fingerprints."""
