"""The Triton attention kernel against float64 and FP8 oracles over the same codes."""

import math

import pytest
import torch

pytest.importorskip("triton")

from solgen.kernels.sol_attn2.triton.attention import attend
from tests.kernels.sol_attn2.attention_cases import check_attend, make_case

CASES = [
    pytest.param(1, 1, "none", id="one row"),
    pytest.param(1, 63, "none", id="H1-N63"),
    pytest.param(1, 64, "slots", id="H1-N64"),
    pytest.param(2, 65, "slots", id="H2-N65"),
    pytest.param(1, 127, "anchors", id="H1-N127"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("num_heads", "num_rows", "tail_kind"), CASES)
def test_rows_meet_both_error_rules(device, num_heads, num_rows, tail_kind):
    check_attend(attend, make_case(num_heads, num_rows, tail_kind=tail_kind, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 4, 6])
def test_every_offset(device, offset):
    check_attend(attend, make_case(1, 127, density=1.0, device=device), offset=offset)


@pytest.mark.gpu
def test_pivots_move_on_peaked_rows(device):
    check_attend(attend, make_case(1, 200, density=1.0, spread=6.0, device=device), peaked=True)


@pytest.mark.gpu
def test_rows_that_attend_to_nothing_are_zero(device):
    case = make_case(1, 130, tail_kind="none", kept=torch.zeros(1, 3, 3, dtype=torch.bool), device=device)
    out, lse = check_attend(attend, case)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.gpu
def test_a_short_last_block_counts_only_its_rows(device):
    kept = torch.zeros(1, 2, 2, dtype=torch.bool)
    kept[:, :, 1] = True
    check_attend(attend, make_case(1, 65, tail_kind="none", kept=kept, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("tail_kind", ["slots", "anchors", "none"])
@pytest.mark.parametrize(("num_heads", "num_rows"), [(7, 1001), (14, 4095), (56, 127)])
def test_larger_cases(large, num_heads, num_rows, tail_kind):
    check_attend(attend, make_case(num_heads, num_rows, tail_kind=tail_kind, device=large))


@pytest.mark.gpu
def test_longest_sequence(large):
    check_attend(attend, make_case(1, 219_524, density=0.1, device=large))


def test_in_the_interpreter(run_in_interpreter):
    run_in_interpreter()
