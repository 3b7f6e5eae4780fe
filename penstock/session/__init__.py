"""What lives as long as a training in the flow's process."""
