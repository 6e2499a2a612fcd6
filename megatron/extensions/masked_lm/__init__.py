"""What masked language models have in common: spans, masks and a head."""
