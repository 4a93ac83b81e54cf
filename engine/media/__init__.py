"""Pictures and sound in and out of files, on the model's two clocks."""

FPS = 24
"""Frames per second that MiniMax-H3 generates and conditions on."""

SAMPLING_RATE = 32_000
"""Samples per second of the sound that MiniMax-H3 generates and conditions on, in stereo."""
