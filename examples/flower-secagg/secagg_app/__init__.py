"""Δ-SGD clients under SecAgg+, which Flower 1.41 has for its old interface only."""
