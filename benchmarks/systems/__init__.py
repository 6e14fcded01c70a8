"""What is measured: each module is a program that runs rounds when it is told to (see gate.py)."""
