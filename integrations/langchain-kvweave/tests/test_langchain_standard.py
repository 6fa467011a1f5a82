"""The standard suites of `langchain-tests`; what kvweave does not do is switched off by their properties."""

from pathlib import Path

import pytest
from langchain_tests.integration_tests import (
    AsyncCacheTestSuite,
    ChatModelIntegrationTests,
    RetrieversIntegrationTests,
    SyncCacheTestSuite,
)
from langchain_tests.unit_tests import ChatModelUnitTests

import kvweave
from langchain_kvweave import ChatKvweave, KvweaveCache, KvweaveRetriever

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def benchmark():
    """Runs what the suite times once: timings of a shared machine say nothing."""
    return lambda run: run()


@pytest.fixture
def vcr():
    """Recorded replies of a remote service; there is none."""


class Model:
    """What both suites ask about the chat model."""

    @pytest.fixture(autouse=True)
    def _in_home(self, home):
        self._home = home

    @property
    def chat_model_class(self):
        return ChatKvweave

    @property
    def chat_model_params(self):
        return {"home": self._home, "settings": {"max_new_tokens": 3}}

    @property
    def has_tool_calling(self):
        return False

    @property
    def has_structured_output(self):
        return False

    @property
    def supports_json_mode(self):
        return False

    @property
    def supports_image_inputs(self):
        return False

    @property
    def model_override_value(self):
        return str(Path(kvweave.__file__).parent / "models" / "reference")


class TestChatModelUnit(Model, ChatModelUnitTests):
    pass


class TestChatModel(Model, ChatModelIntegrationTests):
    @property
    def standard_chat_model_params(self):
        return {"temperature": 0, "max_tokens": 3, "timeout": 60, "stop": [], "max_retries": 2}


class TestRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _in_home(self, home):
        self._home = home

    @property
    def retriever_constructor(self):
        return KvweaveRetriever

    @property
    def retriever_constructor_params(self):
        return {"home": self._home, "kb": "notes"}

    @property
    def retriever_query_example(self):
        return "What is the password of Glorric?"


class OverCache:
    @pytest.fixture
    def cache(self, tmp_path):
        cache = KvweaveCache(home=tmp_path)
        yield cache
        cache.close()


class TestCache(OverCache, SyncCacheTestSuite):
    pass


class TestCacheFromCoroutines(OverCache, AsyncCacheTestSuite):
    pass
