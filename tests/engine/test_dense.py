"""Dense attention: the kernel that was asked for or an error, exact within its type, the stock model on a CPU."""

import pytest
import torch

from solgen.engine.attention import install_attention
from solgen.engine.attention_run import AttentionRun
from solgen.engine.dense import choose_dense, dense_attention
from solgen.engine.dummy import RandomWeights, open_dummy
from solgen.engine.profile.plan import plan_arms
from solgen.engine.profile.stock import stock_model
from solgen.engine.request import Options
from solgen.errors import SetupError
from tests.engine.packed import packed

CPU = torch.device("cpu")


def test_a_cpu_has_one_kernel() -> None:
    assert choose_dense("auto", CPU) == choose_dense("sdpa", CPU) == "sdpa"
    with pytest.raises(SetupError, match="FlashAttention 3 runs on sm_90, this run is on the cpu"):
        choose_dense("fa3", CPU)
    with pytest.raises(SetupError, match="needs cuDNN on a CUDA GPU, this run is on the cpu"):
        choose_dense("cudnn", CPU)


@torch.no_grad()
def test_a_dense_run_on_a_cpu_is_the_stock_model() -> None:
    (job,) = plan_arms(Options(prompt="x", preset="demo"), ["dense"], dummy=True, text_rows=None)
    model = RandomWeights(open_dummy(job.request), CPU, torch.float32).transformer()
    inputs = packed(torch.tensor([0.1, 0.7]))
    with stock_model(model, CPU, None):
        expected = model(**inputs)
    install_attention(model, AttentionRun.start(job.request.preset.attention, torch.ones(24, dtype=torch.bool)))
    for got, stock in zip(model(**inputs), expected, strict=True):
        assert torch.equal(got, stock)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("kernel", ["auto", "fa3", "cudnn", "sdpa"])
@pytest.mark.parametrize("rows", [1, 63, 65, 1001])
def test_error_on_strided_heads(kernel: str, rows: int) -> None:
    device = torch.device("cuda")
    try:
        chosen = choose_dense(kernel, device)
    except SetupError as error:
        pytest.skip(str(error))
    # As Ulysses hands them over: query, key and value of a head beside one another, NaN around them.
    memory = torch.full((1, rows + 2, 5, 3, 128), float("nan"), dtype=torch.bfloat16, device=device)
    memory[:, 1:-1, :4].normal_(generator=torch.Generator(device).manual_seed(rows))
    query, key, value = memory[:, 1:-1, :4].unbind(3)
    heads = (part.transpose(1, 2).double() for part in (query, key, value))
    exact = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)
    output = dense_attention(query, key, value, chosen)
    assert output.shape == query.shape
    # Probabilities and output are rounded to bf16, in squares.
    assert (output.double() - exact).norm() / exact.norm() < 2**-8
