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
        ({"canvas": 5}, "flag: canvas: expected a table, got 5; set its keys, as canvas.width"),
        ({"attention": "off"}, "flag: attention: expected a table, got 'off'"),
        ({"num_outputs": 2}, "flag: unknown key 'num_outputs'$"),
        ({"epsilon": 1}, "flag: unknown key 'epsilon'; did you mean 'attention.epsilon'"),
        ({"attention": {"epsilon": "nan"}}, "attention.epsilon: expected a finite number .*density=1.*got 'nan'"),
        ({"attention": {"epsilon": float("inf")}}, "attention.epsilon: expected a finite number"),
        ({"attention": {"tau": "nan"}}, "flag: attention.tau: expected a finite number, got"),
        ({"sampler": {"video_shift": "inf"}}, "flag: sampler.video_shift: expected a finite number"),
        ({"sampler": {"positions": "nan,0", "steps": 1}}, "flag: sampler.positions.0: expected a finite number"),
        ({"lora": {"alpha": "inf"}}, "flag: lora.alpha: expected a finite number"),
        ({"attention": {"density": 0}}, "flag: attention.density: Input should be greater than 0"),
        ({"attention": {"density": 0.0}}, "flag: attention.density: Input should be greater than 0"),
        ({"output": {"crop": 0}}, "flag: output.crop: Input should be greater than 0"),
        ({"attention": {"density": 0.1, "top_k": 0.1}}, "flag: attention: density and top_k both set"),
        ({"attention": {"dense_blocks": "5-3"}}, "flag: attention.dense_blocks: 5-3 is an empty range; expected 3-5"),
        ({"attention": {"dense_blocks": "1 2"}}, "attention.dense_blocks: expected block numbers as 0-2,47-49"),
        ({"attention": {"dense_blocks": [1]}}, "attention.dense_blocks: expected block numbers as 0-2,47-49"),
        ({"attention": {"dense_blocks": "9" * 5000}}, "attention.dense_blocks: expected block numbers"),
        ({"sampler": {"positions": "1,,0"}}, "flag: sampler.positions.1: .*got ''"),
        ({"tasks": "x"}, "flag: tasks.0: .*got 'x'"),
        ({"adapter": {"repo": "x"}}, "flag: adapter.file: is missing; set it too"),
    ],
)
def test_bad_keys_and_values_name_their_place(table: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_preset("demo", ("flag", table))


def test_off_switches() -> None:
    preset = load_preset("1080p15", ("--set", {"output": {"crop": "off"}, "attention": {"density": "off"}}))
    assert preset.output.crop is None
    assert preset.attention.density is None


@pytest.mark.parametrize(
    ("text", "blocks"),
    [(" 0 , 5 ", [0, 5]), ("1 - 3,5", [1, 2, 3, 5]), ("", []), ("off", []), (False, []), ("none", [])],
)
def test_dense_blocks_are_read_with_spaces_and_off(text: object, blocks: list[int]) -> None:
    attention = load_preset("demo", ("flag", {"attention": {"dense_blocks": text}})).attention
    assert [index for index in range(50) if attention.is_dense_block(index)] == blocks
    assert " " not in attention.dense_blocks


def test_levels_that_leave_no_choice_of_steps_say_who_set_them() -> None:
    steps = ("command line", {"sampler": {"steps": 4}})
    expected = "command line: sampler: positions holds 9 levels; 4 steps need 5; presets/hyperflow-5s.toml fixes"
    with pytest.raises(InputError, match=f"{expected} the calls, --set sampler.positions=off frees them"):
        load_preset("hyperflow-5s", steps)
    with pytest.raises(InputError, match=expected):
        load_preset("hyperflow-5s", steps, ("--set", {"sampler": {"video_shift": 3}}))
    assert load_preset("hyperflow-5s", steps, ("--set", {"sampler": {"positions": "off"}})).sampler.steps == 4


def test_the_last_layer_that_holds_a_value_is_blamed() -> None:
    low, other = ("low", {"attention": {"offset": 9}}), ("other", {"attention": {"sink": True}})
    with pytest.raises(InputError, match="low: attention.offset"):
        load_preset("demo", low, other)
    with pytest.raises(InputError, match="high: attention.offset"):
        load_preset("demo", low, other, ("high", {"attention": {"offset": 8}}))


@pytest.mark.parametrize("pair", [("canvas=3", "canvas.width=64"), ("canvas.width=3", "canvas.width.x=64")])
def test_a_key_cannot_be_a_value_and_a_table(pair: tuple[str, str]) -> None:
    table: dict = {}
    set_key(table, pair[0])
    with pytest.raises(InputError, match="is set to '3' already"):
        set_key(table, pair[1])


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
