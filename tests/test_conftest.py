"""The nets that other tests rely on do hold."""

import os

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_unwritten_floats_are_nan(dtype):
    x = torch.zeros(3, dtype=dtype)
    for made in (torch.empty(3, dtype=dtype), torch.empty_like(x), x.new_empty(3)):
        assert made.isnan().all()
    assert torch.empty_strided((2, 2), (1, 2), dtype=dtype).isnan().all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_unwritten_integers_are_absurd(dtype):
    assert (torch.empty(3, dtype=dtype) > 100).all()


def test_poison_keeps_requires_grad_and_shape():
    x = torch.empty(2, 3, requires_grad=True)
    assert x.requires_grad and x.is_leaf and x.shape == (2, 3)


def test_kernels_are_interpreted_off_the_gpu():
    assert torch.cuda.is_available() or os.environ["TRITON_INTERPRET"] == "1"


def test_random_numbers_do_not_depend_on_what_ran_before():
    assert torch.rand(1).item() == pytest.approx(0.4962565898895264)
