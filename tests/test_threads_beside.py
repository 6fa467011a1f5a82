"""Threads that compute beside others: without helper threads, except in `all_threads`."""

import ctypes
import os
import threading
from pathlib import Path

import pytest
import torch

from kvweave.embedding import TextEncoder
from kvweave.machine import _library, all_threads, use_one_thread
from kvweave.server.running import and_free

NUMBERS = torch.ones(4_000_000)


def in_a_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    (result,) = found
    return result


def tasks():
    return set(os.listdir("/proc/self/task"))


def new_since(before):
    """Count the tasks that were not there before: helpers of an earlier thread may end at any moment."""
    return len(tasks() - before)


@pytest.fixture
def two_threads():
    if _library("libgomp.so.1") is None or not Path("/proc/self/task").exists():
        pytest.skip("this PyTorch does not compute with GNU OpenMP")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_thread_of_one_keeps_no_helpers_and_others_keep_their_number(two_threads):
    def work():
        use_one_thread()
        before = tasks()
        NUMBERS.mul(2)
        with all_threads():
            NUMBERS.mul(2)
            inside = new_since(before)
            number = torch.get_num_threads()
        return inside, number, new_since(before), torch.get_num_threads()

    assert in_a_thread(work) == (1, 2, 0, 1)
    assert torch.get_num_threads() == 2
    assert in_a_thread(torch.get_num_threads) == 2


def test_a_thread_that_was_not_limited_stays_as_it_is(two_threads):
    def work():
        before = tasks()
        NUMBERS.mul(2)
        with all_threads():
            pass
        return new_since(before), torch.get_num_threads()

    assert in_a_thread(work) == (1, 2)


def test_products_are_the_same(two_threads):
    left, right = torch.randn(64, 300), torch.randn(300, 200)

    def work():
        use_one_thread()
        alone = left @ right
        with all_threads():
            return alone, left @ right

    for found in in_a_thread(work):
        torch.testing.assert_close(found, left @ right)


def test_a_requests_thread_keeps_no_buffers():
    """A server has dozens of such threads, and MKL's buffers would stay with each."""
    math = _library("libtorch_cpu.so")
    if math is None or not hasattr(math, "mkl_serv_mem_stat"):
        pytest.skip("this PyTorch does not compute with MKL")
    math.mkl_serv_mem_stat.restype = ctypes.c_int64
    count = ctypes.c_int()
    encoder = TextEncoder()
    encoder.encode(["loaded"])

    def held(call):
        before = math.mkl_serv_mem_stat(ctypes.byref(count))
        call(encoder.encode, ["Which room is cedar?"])
        return math.mkl_serv_mem_stat(ctypes.byref(count)) - before

    kept = in_a_thread(lambda: held(lambda work, texts: work(texts)))
    if not kept:
        pytest.skip("PyTorch does not compute these products with MKL on this processor")
    assert kept > 1_000_000
    assert in_a_thread(lambda: held(and_free)) == 0
