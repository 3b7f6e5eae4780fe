"""Engine plane: rank processes that hold models, and the flow's side of talking to them. No Prefect here."""
