"""The share of mass in the heaviest tenth of the key blocks, on attention whose answer is known."""

import torch

from solgen.engine.demo_training import shapes
from solgen.engine.demo_training.dataset import Group, Pool
from solgen.engine.demo_training.flow import Flow
from solgen.engine.demo_training.forward import Layout
from solgen.engine.demo_training.peaks import block_peaks, top_tenth_share

ROWS, WIDTH = 64 * 20, 16


def test_even_attention_leaves_a_tenth_in_a_tenth() -> None:
    share = top_tenth_share(torch.zeros(2, ROWS, WIDTH), torch.randn(2, ROWS, WIDTH))
    torch.testing.assert_close(share, torch.full((2,), 0.1), rtol=1e-4, atol=0)


def test_a_short_last_block_counts_as_a_block() -> None:
    rows = 64 * 19 + 1
    share = top_tenth_share(torch.zeros(1, rows, WIDTH), torch.zeros(1, rows, WIDTH))
    torch.testing.assert_close(share, torch.tensor([2 * 64 / rows]), rtol=1e-4, atol=0)


def test_attention_to_one_block_is_all_in_the_top() -> None:
    key = torch.zeros(1, ROWS, WIDTH)
    key[:, 128:192, 0] = 100.0
    query = torch.zeros(1, ROWS, WIDTH)
    query[..., 0] = 100.0
    torch.testing.assert_close(top_tenth_share(query, key), torch.ones(1))


def test_zero_queries_attend_evenly_in_every_block_and_head() -> None:
    model = shapes.new_transformer(0, shapes.TRANSFORMER | {"num_layers": 2, "num_attention_heads": 3})
    for block in model.transformer_blocks:
        block.attn.norm_q.weight.data.zero_()
    random = torch.Generator().manual_seed(0)
    layout = Layout.build(torch.ones(6, dtype=torch.long), ("first",), (12, 16, 16), 100)
    video, audio = (torch.randn(1, n, c, generator=random) for n, c in ((layout.num_video, 96), (layout.num_audio, 32)))
    group = Group(layout, torch.zeros(1, dtype=torch.long), torch.randn(1, 6, 32, generator=random))
    pool = Pool(video, audio, torch.randn(1, 2, 64, 96, generator=random), {"first": [group]})
    found = block_peaks(Flow(model, pool, 1), model, "first", group, (12, 16, 16), 0.5)
    assert found.shape == (2, 3)
    rows = sum(layout.parts)
    blocks = -(-rows // 64)
    torch.testing.assert_close(found, torch.full((2, 3), -(-blocks // 10) * 64 / rows), rtol=1e-4, atol=0)
