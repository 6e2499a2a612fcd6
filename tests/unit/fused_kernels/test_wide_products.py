"""Products of 16-bit matrices with 32-bit results, and what replaces them where PyTorch has none."""

import pytest
import torch
from problems import require_problem
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from megatron.fused_kernels.wide_products import add_product, has_wide_products


class OnGPU(torch.Tensor):
    """A tensor of a CPU that takes the paths of GPUs."""

    is_cuda = property(lambda self: True)


class Torch(TorchFunctionMode):
    """A PyTorch with these products."""

    def __init__(self, **products):
        super().__init__()
        self.products = products

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return self.products.get(function.__name__, function)(*args, **(kwargs or {}))


def bmm(x, y, out_dtype):
    return (x @ y).to(out_dtype)


@pytest.fixture(autouse=True)
def unknown():
    has_wide_products.cache_clear()
    yield
    has_wide_products.cache_clear()


def matrices():
    torch.manual_seed(0)
    total = torch.randn(3, 5)
    return total, *(torch.randn(*shape).bfloat16() for shape in ((3, 4), (4, 5)))


def test_products_without_a_kernel_are_added_with_one_warning(caplog):
    """PyTorch has these products on GPUs alone."""
    total, a, b = matrices()
    found = total.clone().as_subclass(OnGPU)
    for _ in range(2):
        add_product(found, a, b)
    assert_close(found.as_subclass(torch.Tensor), total + 2 * (a @ b).float())
    (record,) = caplog.records
    require_problem("bfloat16 … 32-bit … cpu", [record.getMessage()])


@pytest.mark.parametrize("error", [TypeError("out_dtype"), RuntimeError("")], ids=repr)
def test_a_torch_without_the_argument_has_no_such_products(caplog, error):
    def addmm(*inputs, **options):
        raise error

    with Torch(bmm=bmm, addmm=addmm):
        assert not has_wide_products(torch.device("cpu"), torch.bfloat16)
    assert (str(error) or "RuntimeError") in caplog.text


def test_full_memory_is_no_missing_kernel():
    def bmm(*inputs, **options):
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError), Torch(bmm=bmm):
        has_wide_products(torch.device("cpu"), torch.bfloat16)


def test_where_the_kernel_exists_it_adds_in_place():
    total, a, b = matrices()
    expected = total + a.float() @ b.float()

    def addmm(given, x, y, *, out_dtype, out):
        return out.addmm_(x.to(out_dtype), y.to(out_dtype))

    with Torch(bmm=bmm, addmm=addmm):
        add_product(total.as_subclass(OnGPU), a, b)
    assert_close(total, expected)
