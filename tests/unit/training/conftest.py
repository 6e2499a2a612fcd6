"""What tests of the run share."""

import logging

import pytest


@pytest.fixture
def messages(caplog):
    """The messages of the package's log, as they come."""
    kept = []

    class Keep(logging.Handler):
        def emit(self, record):
            kept.append(record.getMessage())

    handler, logger = Keep(), logging.getLogger("megatron")
    caplog.set_level(logging.INFO, logger="megatron")
    logger.addHandler(handler)
    yield kept
    logger.removeHandler(handler)
