"""One cluster for all tests of this folder."""

from collections.abc import Iterator

import pytest
from cluster import Cluster, cluster_in


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from cluster_in(tmp_path_factory.mktemp("jobs"))
