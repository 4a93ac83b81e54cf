"""solgen: fast video-with-sound generation from MiniMax-H3."""

__version__ = "0.1.0"
