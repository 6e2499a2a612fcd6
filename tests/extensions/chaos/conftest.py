"""Jobs that have run once, calmly."""

import pytest
from small_job import Job, calm_job

EVALUATES = ["--eval-interval", "3", "--eval-iters", "3", "--split", "80,20,0"]


@pytest.fixture(scope="session")
def keeping_job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """One process, all checkpoints kept."""
    return calm_job(tmp_path_factory.mktemp("keeping"))


@pytest.fixture(scope="session")
def job_of_two(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Two replicas that divide the optimizer, and evaluate."""
    flags = ["--keep-last", "1", "--zero-stage", "1", *EVALUATES]
    return calm_job(tmp_path_factory.mktemp("two"), *flags, ranks=2)
