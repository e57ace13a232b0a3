"""Packing weights next to each other."""

import gc
import mmap
import sys

import pytest
import torch

from streamkv.kernels.huge_pages import ALIGNMENT, ask_for_huge_pages, pack


def test_copies_equal_and_follow_each_other() -> None:
    tensors = [
        torch.randn(3, 5),
        torch.randn(7).bfloat16(),
        torch.arange(6).view(2, 3).t(),
        torch.empty(0, 4),
    ]
    packed = pack(tensors)
    for tensor, copy in zip(tensors, packed, strict=True):
        torch.testing.assert_close(copy, tensor, rtol=0, atol=0)
        assert copy.is_contiguous()
        assert copy.data_ptr() % ALIGNMENT == 0 or not copy.numel()
    assert packed[1].data_ptr() - packed[0].data_ptr() == 64
    assert packed[2].data_ptr() - packed[1].data_ptr() == 64


def test_copies_are_independent_of_their_sources() -> None:
    source = torch.zeros(4)
    (copy,) = pack([source])
    source.fill_(1.0)
    assert copy.tolist() == [0.0] * 4
    copy.fill_(2.0)
    assert source.tolist() == [1.0] * 4


def test_parameters_are_packed_without_their_gradients() -> None:
    (copy,) = pack([torch.nn.Parameter(torch.ones(2))])
    assert not copy.requires_grad
    assert copy.tolist() == [1.0, 1.0]


def test_memory_outlives_the_other_copies() -> None:
    last = pack([torch.ones(1 << 20), torch.full((1 << 20,), 3.0)])[1]
    gc.collect()
    assert last.sum().item() == 3.0 * (1 << 20)


def test_nothing_to_pack() -> None:
    assert pack([]) == []


@pytest.mark.skipif(sys.platform != "linux", reason="madvise of Linux")
def test_advice_is_taken_or_refused_without_an_error() -> None:
    with mmap.mmap(-1, 1 << 22, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        assert ask_for_huge_pages(memory) in (True, False)
        memory[:4] = b"used"
        assert memory[:5] == b"used\0"
