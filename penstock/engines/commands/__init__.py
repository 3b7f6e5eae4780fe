"""What flow and ranks say to each other: a frozen dataclass for every command and for every reply."""
