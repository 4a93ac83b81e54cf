"""The Gluon attention kernel against float64 and FP8 oracles, and the Triton kernel; Hopper only."""

import math

import pytest
import torch

pytest.importorskip("triton")

from solgen.kernels.sol_attn2.gluon.attention import attend
from solgen.kernels.sol_attn2.triton.attention import attend as triton_attend
from tests.kernels.sol_attn2.attention_cases import check_attend, make_case


@pytest.fixture
def hopper(large: torch.device) -> torch.device:
    """A GPU with warpgroup products."""
    if torch.cuda.get_device_capability(large) != (9, 0):
        pytest.skip("needs sm_90")
    return large


@pytest.mark.gpu
@pytest.mark.parametrize("tail_kind", ["slots", "anchors", "none"])
@pytest.mark.parametrize(
    ("num_heads", "num_rows"), [(1, 1), (1, 7), (1, 63), (1, 64), (2, 65), (56, 127), (7, 1001), (14, 4095)]
)
def test_rows_meet_both_error_rules(hopper, num_heads, num_rows, tail_kind):
    check_attend(attend, make_case(num_heads, num_rows, tail_kind=tail_kind, device=hopper))


@pytest.mark.gpu
@pytest.mark.parametrize("offset", range(8))
def test_every_offset(hopper, offset):
    check_attend(attend, make_case(1, 1001, density=1.0, device=hopper), offset=offset)


@pytest.mark.gpu
def test_pivots_move_on_peaked_rows(hopper):
    check_attend(attend, make_case(2, 4096, spread=6.0, device=hopper), peaked=True)


@pytest.mark.gpu
def test_rows_that_attend_to_nothing_are_zero(hopper):
    kept = torch.zeros(1, 16, 16, dtype=torch.bool)
    out, lse = check_attend(attend, make_case(1, 1001, tail_kind="none", kept=kept, device=hopper))
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.gpu
def test_rows_of_surrogates_alone(hopper):
    kept = torch.zeros(2, 16, 16, dtype=torch.bool)
    check_attend(attend, make_case(2, 1001, kept=kept, device=hopper))


@pytest.mark.gpu
def test_a_dense_row_beside_sparse_ones(hopper):
    kept = torch.zeros(1, 200, 200, dtype=torch.bool)
    kept[:, 4] = True
    kept[:, :, 199] = True
    check_attend(attend, make_case(1, 200 * 64 - 5, kept=kept, device=hopper))


@pytest.mark.gpu
@pytest.mark.parametrize("tail_kind", ["slots", "anchors", "none"])
def test_longest_sequence(hopper, tail_kind):
    check_attend(attend, make_case(1, 219_524, density=0.1, tail_kind=tail_kind, device=hopper))


@pytest.mark.gpu
def test_agrees_with_the_triton_kernel(hopper):
    case = make_case(3, 2000, device=hopper)
    outputs = []
    for kernel in (attend, triton_attend):
        out = torch.empty(3, 2000, 128, dtype=torch.float32, device=hopper)
        kernel(case.operands, case.route, case.tail, out, None, scale=case.scale, offset=7, tail_kind="slots")
        outputs.append(out)
    assert (outputs[0] - outputs[1]).norm() <= 2e-3 * outputs[1].norm()
