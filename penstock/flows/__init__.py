"""Flows: the graphs, readable as pseudo-code. They import no torch, no vLLM, no DeepSpeed."""
