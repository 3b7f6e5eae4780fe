"""The endpoint at which agents ask the policy: OpenAI's chat and text completions, and vLLM's tokens in, tokens out."""
