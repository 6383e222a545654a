"""Runs of repeated layers (CFP section 4.1): searched, verified, and named by their fingerprints."""
