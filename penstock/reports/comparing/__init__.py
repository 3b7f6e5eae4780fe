"""Runs side by side: what is read of them, statistics over seeds, tables, pictures, samples, and pages of all that."""
