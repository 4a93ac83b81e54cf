"""Training of the embedded demo model: rendered data, two autoencoders, the transformer, its distillation, a probe.

`scenes` -> `tracks` -> `render` and `sound` make clips from a seed; `loop` trains one model step by step and resumes
bit for bit; `video_vae`, `audio_vae`, `flow` and `distil` are the losses; `recipe` holds the
numbers, `run` runs them in order.
"""
