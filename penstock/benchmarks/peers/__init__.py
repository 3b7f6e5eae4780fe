"""The systems that are measured beside Penstock: programs that run them, and figures from their logs."""
