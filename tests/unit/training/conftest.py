"""What tests of the run share."""

import logging

import pytest


@pytest.fixture
def told(caplog):
    """The messages of the package's log, as they come."""
    messages = []

    class Keep(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    handler, logger = Keep(), logging.getLogger("megatron")
    caplog.set_level(logging.INFO, logger="megatron")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
