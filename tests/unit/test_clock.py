"""Float32 arithmetic of GPUs: PyTorch's own settings, which need none to be set and read."""

import pytest
import torch
from torch import backends

from ddp_bench.bench.measure.clock import float32_precision

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True, params=["none", "tf32", "ieee"])
def of_all_backends(request):
    """What a user's module may have set for all backends at once."""
    backends.fp32_precision = request.param
    yield request.param
    backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = True


def used():
    """As the kernels ask: for products, convolutions, recurrent layers."""
    return [k.fp32_precision for k in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)]


def allowed():
    """By PyTorch's older interface, which raises where it and the newer one contradict each other."""
    return backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32


@pytest.mark.parametrize(
    ("precision", "chosen"), [("fp32", "ieee"), ("tf32", "tf32"), ("bf16", "ieee"), ("fp16", "ieee")]
)
def test_tf32_is_used_where_it_was_asked_for(precision, chosen):
    with float32_precision(precision, GPU):
        assert used() == [chosen] * 3
        assert allowed() == (chosen == "tf32", chosen == "tf32")
        assert torch.get_float32_matmul_precision() == ("high" if chosen == "tf32" else "highest")


def test_the_run_goes_on_as_before_after_its_proof():
    with float32_precision("tf32", GPU):
        with float32_precision("fp32", GPU):
            assert used() == ["ieee"] * 3
        assert used() == ["tf32"] * 3
        assert allowed() == (True, True)


def test_what_an_error_leaves_is_what_was_before(of_all_backends):
    backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32 = True, False  # PyTorch's own default
    with pytest.raises(ZeroDivisionError), float32_precision("fp32", GPU):
        raise ZeroDivisionError
    assert used() == ["ieee", "tf32", "tf32"]
    assert allowed() == (False, True)
    assert of_all_backends == backends.fp32_precision


def test_a_cpu_keeps_what_the_user_chose():
    torch.set_float32_matmul_precision("high")
    with float32_precision("fp32", CPU):
        assert torch.get_float32_matmul_precision() == "high"
