"""The mathematics of the algorithms: pure functions on packed arrays, numpy for the flow, torch for the engines.

One file below ``advantages/`` or ``policy_losses/`` is one estimator or loss, and writing that file is all there is to
adding it: the registry finds it by its name. No file imports torch at module level (tensors bring their own
operations), so that a process without a GPU reads the whole catalogue without paying for torch.
"""
