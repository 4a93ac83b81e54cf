"""The demo model's own byte-level BPE tokenizer: any Unicode text encodes, nothing is downloaded."""

import json

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from solgen.engine.demo_training.configs import CONTEXT_LENGTH, SPECIAL_TOKENS, VOCAB_SIZE

# What prompts of this model are made of: merges learnt here keep a typical prompt near one token per word.
_CORPUS = """
integrated_multimodal_description: [Shot 1] At 00:00.000, a wide shot of the sea at sunset, waves rolling
onto the shore.
[Shot 2] At 00:04.500, the camera slowly pans left and moves forward, following a young woman walking
through the forest.
[Shot 3] At 00:02.250, a close-up of the face of an old man who smiles, turns to the camera and speaks in a
calm voice.
overall_soundscape: wind in the trees, birds singing, water flowing, footsteps, a crowd talking and distant
traffic noise.
non_diegetic_music: soft piano and strings, a slow melody, gentle drums, no music at all, an upbeat
electronic track.
<d>[English] Hello there, what are you doing here today?</d> <d>[Chinese] ...</d> <d>[Spanish] ...</d>
<d>[French] ...</d>
<Picture 1>: <Picture 2>: <Video 1>: <Audio 1>: <Subject 1> <0.2 seconds><1.2 seconds><2.2 seconds><3.2
seconds>
A red fox runs across the snow. A black cat sits by the window while rain falls. A dog plays with a ball on
green grass.
The city street at night, neon lights reflected on wet asphalt, cars driving past, people holding umbrellas.
A chef cuts vegetables in a bright kitchen. A musician plays the guitar on stage, the audience claps and
cheers.
Children laugh and run along the beach under a blue sky with white clouds. Mountains, rivers, fields,
bridges, houses.
Cinematic lighting, shallow depth of field, high detail, realistic style, animation, black and white, slow
motion,
low angle, medium shot, handheld camera, aerial view, time lapse, zoom in, zoom out, static camera, tracking
shot.
The scene begins with, then, after that, as the, in the background, in the foreground, on the left, on the
right, from.
"""

# Words of the captions that the demo model is trained on, often enough to become one token each.
_CAPTIONS = """
A red orange yellow green cyan blue pink white circle ball disc square box triangle diamond star ring. One small red
ball bounces across a wooden floor. Two large blue circles balls discs squares boxes triangles diamonds stars rings
collide on a black background. A yellow star moves left, moves right, moves up, moves down, slides to the left, slides
to the right over black. Two small green rings move from right to left, slide, rise, fall, bounce up and down, orbit
the centre in front of a grey wall. One white box rises, falls, orbits the centre, moves in a circle in front of a navy
wall. A large pink disc grows, gets bigger over teal on a teal background. Two orange diamonds meet and part, grow, get
bigger while the camera pans left. Then a cyan triangle bounces while the camera pans right on a navy background, on a
grey background, on a wooden floor.
"""


def build_tokenizer() -> Qwen2Tokenizer:
    """Learn the vocabulary and return it as the class that diffusers' index names.

    Returns:
        A tokenizer of `VOCAB_SIZE` ids: 256 bytes, merges learnt from the text above, then `SPECIAL_TOKENS`.
    """
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator([*_CORPUS.splitlines(), *_CAPTIONS.splitlines() * 20], trainer)

    learnt = json.loads(learner.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learnt["vocab"] | {SPECIAL_TOKENS[0]: len(learnt["vocab"])},
        merges=[tuple(pair) for pair in learnt["merges"]],
        model_max_length=CONTEXT_LENGTH,
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer
