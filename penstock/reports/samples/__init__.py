"""What the policy said and what it earned: responses of a run, for people."""
