"""Reshard: the trainer's weights become the rollout engine's, by sharing storage where possible, by copying elsewhere.

vLLM fuses some of Hugging Face's matrices (q, k, v; gate, up). If the optimizer keeps the parts next to each other in
one flat buffer, the fused matrix is a view of that buffer: then vLLM's parameters alias the trainer's, an optimizer
step is visible at once, and a reshard moves no bytes. `plan` gives the order in which parameters must be laid out,
`bind` makes the aliases before vLLM captures CUDA graphs, `verify` proves them by address before each rollout.

What cannot be shared (a vocabulary that vLLM pads, other dtypes, ZeRO-3's shards) is copied by vLLM's own
`load_weights` and compared value by value afterwards. Left out: other GPUs' engines.
"""
