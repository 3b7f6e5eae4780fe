"""What each command of `penstock` takes, calls and prints; main.py lists them."""
