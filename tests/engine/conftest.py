"""Fixtures of the engine's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Triton decides when a kernel is decorated whether it will be compiled or interpreted. Without a
# GPU, kernels are interpreted, in every process that these tests start.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and idle threads that spin slow a shared machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """Where Triton kernels are run: a GPU if there is one, else a CPU, interpreted."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
