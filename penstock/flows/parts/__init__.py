"""Parts that flows have in common, without a flow run of their own."""
