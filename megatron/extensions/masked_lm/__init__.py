"""Common parts of masked language models: spans, masks and a head."""
