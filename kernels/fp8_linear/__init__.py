"""Linear layers in FP8: rows of activations and of weights quantised to E4M3, products summed in FP32."""
