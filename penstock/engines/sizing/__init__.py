"""Memory, operations and use of the devices."""
