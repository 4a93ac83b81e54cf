"""Benchmarks as part of the product: what `solgen bench` runs. Needs torch and triton only."""
