import pytest

from kvweave.testing import FAMILIES
from support.prompts import quiet_adapter


@pytest.fixture(scope="module", params=FAMILIES)
def adapter(request):
    return quiet_adapter(request.param)
