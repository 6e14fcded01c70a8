"""Text as data: CSV files on disk, tokens in a store that is mapped into memory, padded batches."""
