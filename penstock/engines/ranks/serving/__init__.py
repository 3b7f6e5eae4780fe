"""What surrounds a rank's commands: which function carries one out, what is under way meanwhile, what it used."""
