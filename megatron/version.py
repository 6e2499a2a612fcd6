"""The version of this package and of what it writes to disk."""

VERSION = "0.1.0"
CHECKPOINT_FORMAT = 3
