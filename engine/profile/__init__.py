"""`solgen profile`: where the time of a denoiser call goes, attended one way or several side by side."""
