"""Corpora: downloading, cleaning, filtering and deduplicating texts."""
