"""The state plane: everything durable about a run. No torch, no Prefect, no tracker."""
