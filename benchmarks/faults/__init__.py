"""Attacks on deltafl's promises that take longer than a test: kills at random, and load."""
