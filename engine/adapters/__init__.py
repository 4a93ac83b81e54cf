"""Adapters: found, read by header, matched to the transformer's names, then merged or run as branches.

`source` finds a file, `header` reads it without torch, `contract` and `known` say what it was made for, `names` and
`alpha` turn its tensors into `adapter.Adapter`, and `overlay` lays adapters over a transformer by `merge` or `branch`.
"""
