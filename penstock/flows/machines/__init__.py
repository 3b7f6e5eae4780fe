"""The flows that run on machines of work pools."""
