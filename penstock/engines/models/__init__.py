"""Models in memory: packed forward passes, loading, writing."""
