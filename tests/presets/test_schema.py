"""Presets: precedence, errors that name the key, and the facts of every shipped file."""

import pytest

from solgen.errors import InputError
from solgen.presets.schema import Sampler, legal_frames, load_preset, preset_names, set_key

FACTS = {
    "demo": (256, 256, 124, 4, 0.47),
    "5s": (1344, 768, 124, 4, 0.47),
    "12s": (1344, 768, 294, 4, 0.47),
    "1080p15": (1920, 1088, 362, 4, 0.2127),
    "hyperflow-5s": (1312, 736, 124, 8, 0.47),
    "hyperflow-12s": (1312, 736, 294, 8, 0.47),
    "hyperflow-1080p15": (1920, 1088, 362, 8, 0.2127),
    "base-5s": (1344, 768, 124, 49, 0.47),
}


def test_the_shipped_presets_are_those_of_the_table() -> None:
    assert sorted(preset_names()) == sorted(FACTS)
    for name, facts in FACTS.items():
        preset = load_preset(name)
        canvas = preset.canvas
        found = (
            canvas.width,
            canvas.height,
            canvas.num_frames,
            preset.sampler.steps,
            preset.attention.epsilon,
        )
        assert found == facts, name
        assert preset.description


def test_dense_blocks_and_steps() -> None:
    for name in preset_names():
        attention = load_preset(name).attention
        assert attention.dense_steps == (10 if name == "base-5s" else 0)
        dense = [index for index in range(50) if attention.is_dense_block(index)]
        assert dense == ([0, 5] if name == "demo" else [0, 1, 2, 47, 48, 49])


def test_later_overrides_win_and_keep_the_rest() -> None:
    low = ("file", {"attention": {"epsilon": 1.0, "offset": 4}})
    high = ("flag", {"attention": {"epsilon": "2.5"}})
    attention = load_preset("demo", low, high).attention
    assert (attention.epsilon, attention.offset, attention.dense_blocks) == (2.5, 4, "0,5")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"attention": {"epsilom": 1}},
            r"flag: unknown key 'attention.epsilom'; did you mean 'attention.epsilon'\?",
        ),
        ({"atention": {}}, "flag: unknown key 'atention'"),
        ({"attention": {"epsilon": "much"}}, "flag: attention.epsilon: .*got 'much'"),
        ({"attention": {"dense_blocks": "first"}}, "flag: attention.dense_blocks"),
        ({"sampler": {"positions": "1,0.5,0"}}, "flag: sampler: positions holds 3 levels; 4 steps need 5"),
        ({"sampler": {"steps": 2, "positions": [1, 0.5, 0.1]}}, "strictly decrease to 0"),
        ({"sampler": {"steps": 2, "positions": [1, 1, 0]}}, "strictly decrease to 0"),
        ({"sampler": {"steps": 1, "video_sigmas": [1, 0]}}, "go together"),
        ({"canvas": 5}, "flag: canvas"),
    ],
)
def test_bad_keys_and_values_name_their_place(table: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_preset("demo", ("flag", table))


def test_off_switches() -> None:
    preset = load_preset("1080p15", ("--set", {"output": {"crop": "off"}, "attention": {"density": "off"}}))
    assert preset.output.crop is None
    assert preset.attention.density is None


def test_set_key_nests() -> None:
    table: dict = {}
    set_key(table, "sampler.positions=1,0.5,0")
    set_key(table, "sampler.steps=2")
    assert load_preset("demo", ("--set", table)).sampler == Sampler(steps=2, positions=(1.0, 0.5, 0.0))
    with pytest.raises(InputError, match="expected table.key=value"):
        set_key(table, "sampler")


def test_presets_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_preset("demo").canvas.width = 64  # type: ignore[misc]


@pytest.mark.parametrize(("asked", "given"), [(1, 124), (124, 124), (125, 141), (288, 294), (360, 362), (999, 362)])
def test_legal_frames_round_up_within_the_range(asked: int, given: int) -> None:
    assert legal_frames(asked) == given
