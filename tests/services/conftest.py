"""The servers, installed once for all tests here."""

import pytest
from services.servers import Installed, install


@pytest.fixture(scope="session")
def installed() -> Installed:
    """Return where the servers are."""
    return install()
