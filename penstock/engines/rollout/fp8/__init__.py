"""Rollouts in FP8: weights that vLLM computes with beside the trainer's."""
