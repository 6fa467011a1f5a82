import pytest
from prompts import quiet_adapter

from kvweave.testing import FAMILIES


@pytest.fixture(scope="module", params=FAMILIES)
def adapter(request):
    return quiet_adapter(request.param)
