"""How a rollout gets its prompts, its responses and their scores, and which groups are refused.

Left out: what the engines are asked for, which a session holds (penstock/session/requests.py).
"""
