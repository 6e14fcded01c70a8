"""Attacks on the promises that take longer than a test: kills, load, bad bytes, bad clients."""
