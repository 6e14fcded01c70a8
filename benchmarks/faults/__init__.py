"""Attacks on deltafl's promises that take longer than a test: kills, load, bad bytes and bad clients."""
