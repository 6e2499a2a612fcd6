"""One cluster for all tests of this folder."""

from collections.abc import Iterator

import pytest
from cluster import Cluster, obstacle, running_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes, n1 and n2."""
    if why := obstacle():
        pytest.skip(why)
    with running_cluster(tmp_path_factory.mktemp("jobs")) as running:
        yield running
