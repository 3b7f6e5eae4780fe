"""Reshard: the actor's weights become the rollout engine's, in the cheapest way that their placement allows.

layout.py    in which order parameters lie in the trainer's flat buffer
slices.py    which part of them lies where in this rank's parameters of vLLM
loader.py    vLLM's module, built on views of that buffer or on storage of its own
local.py     strategies `shared` and `local`: addresses, and copies within a rank
gather.py    strategy `gather`: all-gathers of ZeRO-3's shards
broadcast.py strategy `broadcast`: to rollout engines of another group, through joint.py
copies.py, buckets.py, checksum.py   what they share: copies, pipelines, proofs
strategy.py  from a strategy's name to its parts

Every strategy is a callable made once that moves the weights, proves them, waits for the device only at its end, and
returns the bytes moved. Left out: which strategy is in force (penstock/engines/groups/placement.py), versions
(penstock/engines/ranks/reshard.py).
"""
