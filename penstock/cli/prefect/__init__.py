"""What the command line does with Prefect: its server, deployments, live overrides, what it may say."""
