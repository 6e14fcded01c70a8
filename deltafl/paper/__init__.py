"""The paper's tables and figures as recipes, and its own numbers as data."""
